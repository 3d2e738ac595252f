"""Checkpoints: whole or absent, checked before anything is read."""

import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from gapless.checkpoint_file import open_written
from gapless.parallel.world import World
from gapless.training import checkpoint as ckpt
from gapless.training import files
from gapless.training.checkpoint import CheckpointError, CheckpointWriter, Piece, list_checkpoints, open_newest


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight/a": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "master/a": torch.randn(3, 5, generator=generator),
        "exp_avg/b": torch.randn(7, generator=generator),
    }


def pieces(tensors):
    return (Piece.whole(name, tensor) for name, tensor in tensors.items())


def save(folder, step, **settings):
    with CheckpointWriter(folder, World.single(), **settings) as writer:
        return writer.save(step, pieces(tensors(step)), {"loader": {"row": step}})


def assert_is(checkpoint, step) -> None:
    found = dict(checkpoint.tensors())
    assert (checkpoint.step, checkpoint.state["loader"]) == (step, {"row": step})
    assert found.keys() == tensors(step).keys()
    for name, tensor in tensors(step).items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def test_what_is_saved_is_loaded(tmp_path):
    folder = tmp_path / "checkpoints"
    assert open_newest(folder) is None
    assert save(folder, 7).name == "step-000007"
    save(folder, 1000001)
    assert_is(open_newest(folder), 1000001)
    assert {path.name for path in folder.iterdir()} == {"step-000007", "step-1000001"}


def test_tensors_are_split_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_FILE_BYTES", 64)
    path = save(tmp_path, 1)
    assert len(list(path.glob("*.safetensors"))) == 2
    assert_is(open_newest(tmp_path), 1)


def test_slices_of_several_files_are_put_together(tmp_path):
    path = save(tmp_path, 3)
    index = json.loads((path / "index.json").read_text())
    whole = tensors(3)["master/a"]
    slices = []
    for rank, (start, columns) in enumerate([(0, 2), (2, 3)]):
        data = safetensors.torch.save({"master/a": whole[:, start : start + columns].contiguous()})
        index["files"][f"extra{rank}"] = ckpt._write_file(path / f"extra{rank}", [data])
        slices.append({"file": f"extra{rank}", "start": [0, start], "shape": [3, columns]})
    index["tensors"]["master/a"]["slices"] = slices
    (path / "index.json").write_text(json.dumps(index))
    assert_is(open_newest(tmp_path), 3)

    index["tensors"]["master/a"]["slices"] = slices[:1]
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="master/a do not cover"):
        dict(open_newest(tmp_path).tensors())


def test_the_newest_are_kept(tmp_path):
    for step in (5, 10, 9999999, 20000000):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-9999999", "step-20000000"]
    assert_is(open_newest(tmp_path), 20000000)


def record_points(folder) -> list[str]:
    points: list[str] = []
    save(folder, 1)
    save(folder, 2, keep=1, fault=points.append)
    return points


def test_a_kill_at_every_point_leaves_one_checkpoint_loadable(tmp_path):
    points = record_points(tmp_path / "recorded")
    assert {"renamed", "folder synced", "state written", "index written", "pruned one"} <= set(points)
    for index in range(len(points)):
        folder = tmp_path / str(index)
        save(folder, 1)
        child = os.fork()
        if child == 0:
            calls = iter(range(len(points)))

            def die(point, calls=calls, index=index):
                if next(calls) == index:
                    os.kill(os.getpid(), signal.SIGKILL)

            save(folder, 2, keep=1, fault=die)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        files.clear_temporary(folder)
        assert_is(open_newest(folder), 2 if index >= points.index("renamed") else 1)
        assert not list(folder.glob(".tmp-*"))
        save(folder, 3, keep=1)
        assert_is(open_newest(folder), 3)


def damage_cut(path):
    with (path / "rank0-00001.safetensors").open("r+b") as file:
        file.truncate(100)
    return "rank0-00001.safetensors is damaged: 100 bytes instead of"


def damage_flip(path):
    with (path / "rank0-00001.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    return "rank0-00001.safetensors is damaged: its checksum"


def damage_state(path):
    (path / "state.json").write_text((path / "state.json").read_text().replace("2", "3"))
    return "state.json is damaged: its checksum"


def damage_index(path):
    (path / "index.json").write_text((path / "index.json").read_text()[:50])
    return "index.json is damaged: it is not JSON"


def damage_index_keys(path):
    (path / "index.json").write_text('{"format_version": 1, "tensors": {}}')
    return "index.json is damaged: it has no tensors or no files"


def damage_missing(path):
    (path / "rank0-00001.safetensors").unlink()
    return "rank0-00001.safetensors is missing"


def damage_version(path):
    index = json.loads((path / "index.json").read_text())
    (path / "index.json").write_text(json.dumps(index | {"format_version": 99}))
    return "format_version 99; this version of gapless reads 1"


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_flip, damage_state, damage_index, damage_index_keys, damage_missing, damage_version]
)
def test_damage_is_refused_with_file_and_remedy(tmp_path, damage):
    save(tmp_path, 1)
    words = damage(save(tmp_path, 2))
    with pytest.raises(CheckpointError) as error:
        open_newest(tmp_path)
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(f"delete {tmp_path / 'step-000002'} to go on from step-000001")


@pytest.mark.parametrize("damage", [damage_cut, damage_index, damage_index_keys, damage_missing, damage_version])
def test_what_was_just_written_is_not_read_to_open_it(tmp_path, monkeypatch, damage):
    path = save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.delattr("zlib.crc32")
        assert_is(open_written(path), 2)
    words = damage(path)
    with pytest.raises(CheckpointError, match=words):
        open_written(path)


def test_names_and_shapes_must_be_those_of_the_run(tmp_path):
    checkpoint = ckpt.open_checkpoint(save(tmp_path, 1))
    shapes = checkpoint.shapes()
    ckpt.check_names(checkpoint, shapes)
    for expected, words in [
        (shapes | {"weight/z": (2,)}, "weight/z is missing in the checkpoint"),
        ({name: shape for name, shape in shapes.items() if name != "exp_avg/b"}, "exp_avg/b .* not trained in the run"),
        (shapes | {"weight/a": (5, 3)}, r"weight/a is \(3, 5\) in the checkpoint, \(5, 3\) in the run"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            ckpt.check_names(checkpoint, expected)


def test_a_failed_write_gives_one_line_and_keeps_the_last_checkpoint(tmp_path):
    save(tmp_path, 1)
    big = {"weight/a": torch.zeros(1 << 16)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot write .*step-000002: .*goes on from step-000001"):
            CheckpointWriter(tmp_path, World.single()).save(2, pieces(big), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        save(tmp_path / "file", 1)


def test_a_disk_that_loses_its_connection_gives_one_line(tmp_path):
    def lose(point):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    with pytest.raises(CheckpointError, match=r"cannot write .*step-000001: Connection reset by peer; make room"):
        save(tmp_path, 1, fault=lose)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY, errno.EACCES])
def test_what_another_process_is_writing_is_cleared_as_far_as_it_goes(tmp_path, monkeypatch, number):
    for name in ("one", "two"):
        files.temporary(tmp_path / name).mkdir()
    remove = files.shutil.rmtree

    def busy(path):
        if path.name == ".tmp-one":
            raise OSError(number, os.strerror(number))
        remove(path)

    monkeypatch.setattr(files.shutil, "rmtree", busy)
    if number == errno.EACCES:
        with pytest.raises(PermissionError):
            files.clear_temporary(tmp_path)
    else:
        files.clear_temporary(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".tmp-one"]


def test_publish_replaces_a_folder(tmp_path):
    for content in ("one", "two"):
        files.temporary(tmp_path / "model").mkdir()
        (files.temporary(tmp_path / "model") / "file").write_text(content)
        files.publish(tmp_path / "model")
    assert (tmp_path / "model" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_kill_left_aside_goes_back(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "file").write_text("one")
    (files.temporary(tmp_path / "model")).mkdir()
    rename = Path.rename

    def killed_at_the_second(path, target):
        if path == files.temporary(tmp_path / "model"):
            raise InterruptedError
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed_at_the_second)
        with pytest.raises(InterruptedError):
            files.publish(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    files.clear_temporary(tmp_path)
    assert (tmp_path / "model" / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_removal_and_replacement_begin_with_a_rename(tmp_path, monkeypatch):
    """A kill while files are being deleted leaves no folder that looks like a checkpoint."""

    def killed(path):
        raise InterruptedError

    save(tmp_path, 1)
    monkeypatch.setattr(files.shutil, "rmtree", killed)
    with pytest.raises(InterruptedError):
        files.remove_folder(tmp_path / "step-000001")
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(InterruptedError):
        files.clear_temporary(tmp_path)  # it does not come back
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "model").mkdir()
    (files.temporary(tmp_path / "model") / "new").mkdir(parents=True)
    with pytest.raises(InterruptedError):
        files.publish(tmp_path / "model")
    assert (tmp_path / "model" / "new").exists()
