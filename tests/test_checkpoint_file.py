"""Reading checkpoints: any box of a tensor, put together from whatever boxes the ranks wrote."""

import json
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gapless import checkpoint_file
from gapless.checkpoint_file import Box, CheckpointError, is_tiled, open_checkpoint

NAME = "weight/a"


@st.composite
def boxes(draw, shape):
    """A box of a tensor, possibly empty."""
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(first for first, _ in ends), tuple(last for _, last in ends))


@st.composite
def tilings(draw, whole):
    """Boxes that fill another one, from cutting it again and again: not a grid."""
    found = [whole]
    for _ in range(draw(st.integers(0, 6))):
        box = found.pop(draw(st.integers(0, len(found) - 1)))
        dim = draw(st.integers(0, len(whole.start) - 1))
        cut = draw(st.integers(box.start[dim], box.stop[dim]))
        before, after = list(box.stop), list(box.start)
        before[dim] = after[dim] = cut
        found += [Box(box.start, tuple(before)), Box(tuple(after), box.stop)]
    return [found[i] for i in draw(st.permutations(range(len(found))))]


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = Box.at([0] * len(shape), shape)
    return whole, draw(tilings(whole)), draw(boxes(shape))


def write(folder, tensor, slices):
    """A checkpoint of one tensor, a file for each box."""
    files, parts = {}, []
    (folder / "state.json").write_text('{"step": 1}')
    for number, box in enumerate(slices):
        path = folder / f"rank{number}-00001.safetensors"
        save_file({NAME: tensor[box.inside(Box.at([0] * tensor.dim(), tensor.shape))].contiguous()}, path)
        data = path.read_bytes()
        files[path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
        parts.append({"file": path.name, "start": list(box.start), "shape": list(box.shape)})
    entry = {"shape": list(tensor.shape), "slices": parts}
    (folder / "index.json").write_text(json.dumps({"format_version": 1, "tensors": {NAME: entry}, "files": files}))
    return open_checkpoint(folder)


def touched(box):
    """Its elements, by brute force."""
    return {tuple(i.tolist()) for i in torch.ones(box.shape).nonzero() + torch.tensor(box.start)} if box.size else set()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_any_box_is_read_from_any_boxes(tmp_path_factory, case):
    whole, tiles, wanted = case
    tensor = torch.randn(whole.shape).to(torch.bfloat16)
    checkpoint = write(tmp_path_factory.mktemp("boxes"), tensor, [tile for tile in tiles if tile.size])
    opened = []
    plain = checkpoint_file.Checkpoint._stored
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_file.Checkpoint, "_stored", lambda *args: opened.append(args[2]) or plain(*args))
        found = checkpoint.read(NAME, wanted.start, wanted.shape)
    assert torch.equal(found, tensor[wanted.inside(whole)])
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    if wanted.size:  # only what overlaps, and that once
        assert sorted(opened) == sorted(tile for tile in tiles if touched(tile) & touched(wanted))
    assert torch.equal(checkpoint.read(NAME), tensor)
    assert torch.equal(dict(checkpoint.tensors("weight"))[NAME], tensor)
    assert torch.equal(checkpoint.read(NAME, wanted.start), tensor[tuple(slice(i, None) for i in wanted.start)])


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_tilings_are_told_from_gaps_and_overlaps(case, data):
    whole, tiles, extra = case
    assert is_tiled(whole, tiles)
    some = data.draw(st.lists(st.sampled_from([*tiles, extra]), max_size=len(tiles) + 1))
    counts = torch.zeros(whole.shape)
    for box in some:
        counts[box.inside(whole)] += 1
    assert is_tiled(whole, some) == bool((counts == 1).all())
    outside = Box(tuple(i + 1 for i in whole.start), tuple(i + 1 for i in whole.stop))
    assert not is_tiled(whole, [outside])


def test_tensors_without_dimensions(tmp_path):
    checkpoint = write(tmp_path, torch.tensor(3.0), [Box((), ())])
    assert checkpoint.read(NAME).item() == 3.0


def test_boxes_that_do_not_fill_the_wanted_one_are_refused(tmp_path):
    tensor = torch.randn(4, 6)
    left, right = Box((0, 0), (4, 3)), Box((0, 3), (4, 6))
    checkpoint = write(tmp_path, tensor, [left, right])
    slices = checkpoint.index["tensors"][NAME]["slices"]
    gone = slices.pop()
    assert torch.equal(checkpoint.read(NAME, (1, 1), (3, 2)), tensor[1:4, 1:3])
    with pytest.raises(CheckpointError, match=r"weight/a do not cover its shape \[4, 6\]$"):
        checkpoint.read(NAME)
    with pytest.raises(CheckpointError, match=r"do not cover its shape \[4, 6\] from \[0, 2\] on for \[1, 2\]"):
        checkpoint.read(NAME, (0, 2), (1, 2))
    slices += [gone, {**gone, "start": [0, 2]}]
    with pytest.raises(CheckpointError, match="do not cover"):
        checkpoint.read(NAME)
    slices[:] = []
    with pytest.raises(CheckpointError, match="do not cover"):
        checkpoint.read(NAME)
    with pytest.raises(CheckpointError, match="has no tensor weight/b"):
        checkpoint.read("weight/b")


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    checkpoint = write(tmp_path, torch.randn(4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))])
    first, second = checkpoint.index["tensors"][NAME]["slices"]
    first["shape"], second["start"], second["shape"] = [1, 6], [1, 0], [3, 6]
    with pytest.raises(CheckpointError, match=r"weight/a is \[2, 6\] in rank0-00001.safetensors, index.json says"):
        checkpoint.read(NAME)
    first["file"] = "gone"
    with pytest.raises(CheckpointError, match="gone does not hold weight/a"):
        checkpoint.read(NAME)
    save_file({NAME: torch.zeros(3, 6, dtype=torch.bfloat16)}, tmp_path / "narrow")
    save_file({NAME: torch.zeros(1, 6)}, tmp_path / "wide")
    first["file"], second["file"] = "wide", "narrow"
    with pytest.raises(CheckpointError, match="different dtypes: BF16, F32"):
        checkpoint.read(NAME)


def test_a_file_is_opened_once(tmp_path, monkeypatch):
    checkpoint = write(tmp_path, torch.randn(4, 6), [Box((0, 0), (2, 6)), Box((2, 0), (4, 6))])
    opened = []
    plain = checkpoint_file.safe_open
    monkeypatch.setattr(
        checkpoint_file, "safe_open", lambda *args, **rest: opened.append(args[0].name) or plain(*args, **rest)
    )
    for row in range(4):
        checkpoint.read(NAME, (row, 0), (1, 6))
    assert opened == ["rank0-00001.safetensors", "rank1-00001.safetensors"]


def test_processes_share_the_checksums(tmp_path):
    write(tmp_path, torch.randn(3, 2), [Box((row, 0), (row + 1, 2)) for row in range(3)])
    path = tmp_path / "rank1-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for rank in range(2):
        if rank == 1:
            with pytest.raises(CheckpointError, match="rank1-00001.safetensors is damaged: its checksum"):
                open_checkpoint(tmp_path, share=(rank, 2))
        else:
            open_checkpoint(tmp_path, share=(rank, 2))
    path.write_bytes(data + b"0")
    with pytest.raises(CheckpointError, match="bytes instead of"):
        open_checkpoint(tmp_path, share=(0, 2))
