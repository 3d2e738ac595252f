"""The result is made from the last checkpoint, and is what the model in memory would have been written as."""

import json
import shutil
import weakref
import zlib
from dataclasses import replace
from functools import partial

import pytest
from runs import assert_same_outcome, make_config, outcome, write_inputs
from safetensors.torch import load_file, save_file

from gapless.adapters.merge import merged_tensors
from gapless.adapters.peft import save_adapter
from gapless.checkpoint_file import CheckpointError, open_checkpoint
from gapless.models.weights import save_weights
from gapless.training import result as result_module
from gapless.training import setup
from gapless.training.callbacks import Callback
from gapless.training.result import write_result
from gapless.training.trainer import Trainer

SAVED = {"target_modules": ("q_proj", "down_proj"), "modules_to_save": ("embed_tokens",)}


@pytest.fixture(scope="module", params=["lora", "saved", "full"])
def finished(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_inputs(folder, rows=6)
    if request.param == "saved":  # one tensor under two names
        write_tied(folder / "model")
    settings = SAVED if request.param == "saved" else {}
    kind = "full" if request.param == "full" else "lora"
    config = make_config(folder, folder / "run", kind, max_steps=2, gradient_accumulation_steps=1, **settings)
    trainer = Trainer(config)
    trainer.train()
    return trainer


def write_tied(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")


def meta(trainer):
    return setup.describe_model(trainer.config, trainer.tokenizer)


def cut(folder):
    """Rewrite a checkpoint as four ranks would have written it: boxes in two dimensions, of uneven sizes."""
    index = json.loads((folder / "index.json").read_text())
    whole = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
        del index["files"][path.name]
    parts = [{} for _ in range(4)]
    for name, tensor in whole.items():
        slices = []
        ends = [(0, size // 3, size) for size in (*tensor.shape, 1)[:2]]
        for rank in range(4):
            start = [ends[dim][(rank >> dim) & 1] for dim in range(2)]
            stop = [ends[dim][((rank >> dim) & 1) + 1] for dim in range(2)]
            box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))[: tensor.dim()]
            if tensor[box].numel() and (tensor.dim() == 2 or rank < 2):
                parts[rank][name] = tensor[box].contiguous()
                shape = list(tensor[box].shape)
                slices.append({"file": f"rank{rank}-00001.safetensors", "start": start[: tensor.dim()], "shape": shape})
        index["tensors"][name]["slices"] = slices
    for rank, tensors in enumerate(parts):
        path = folder / f"rank{rank}-00001.safetensors"
        save_file(tensors, path)
        index["files"][path.name] = {"bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_are_those_of_the_model_in_memory(finished, tmp_path):
    if finished.config.adapter.type == "lora":
        save_adapter(finished.model, finished.config.adapter, tmp_path, finished.config.model.path)
        written = finished._folder / "adapter"
        assert contents(written) == contents(tmp_path)
        trained = [name for name in load_file(written / "adapter_model.safetensors") if "lora" not in name]
        assert len(trained) == (2 if finished.config.adapter.modules_to_save else 0)
    else:
        save_weights(tmp_path, merged_tensors(finished.model))
        assert (finished._folder / "model" / "model.safetensors").read_bytes() == (
            tmp_path / "model.safetensors"
        ).read_bytes()


def test_a_run_with_asynchronous_saves_is_the_same(finished, tmp_path):
    training = replace(finished.config.training, output_dir=str(tmp_path / "run"), async_save=True, save_steps=1)
    saved = []

    class Saves(Callback):
        def on_save(self, trainer, path):
            assert path.is_dir()
            saved.append(path.name)

    Trainer(replace(finished.config, training=training), callbacks=[Saves()]).train()
    found, expected = outcome(tmp_path / "run", 2), outcome(finished._folder, 2)
    assert found.pop("checkpoints") == ["step-000001", "step-000002"] == saved
    expected.pop("checkpoints")
    assert_same_outcome(found, expected)


def test_slices_of_many_ranks_give_the_same_files(finished, tmp_path):
    run = finished._folder
    folder = cut(shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "step-000002"))
    result = write_result(open_checkpoint(folder), meta(finished), finished.tokenizer, finished.config, tmp_path)
    assert contents(result) == contents(run / result.name)


def test_a_checkpoint_of_another_model_leaves_nothing(finished, tmp_path):
    checkpoint = open_checkpoint(finished._folder / "checkpoints" / "step-000002")
    name = next(name for name in checkpoint.index["tensors"] if name.startswith("weight/"))
    checkpoint.index["tensors"].pop(name)
    with pytest.raises(CheckpointError, match="does not fit the run"):
        write_result(checkpoint, meta(finished), finished.tokenizer, finished.config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_are_streamed(finished, tmp_path, monkeypatch):
    """At most one file's worth of tensors is in memory."""
    if finished.config.adapter.type == "lora":
        pytest.skip("an adapter is one file")
    limit = 40_000
    live, peak = {}, 0
    checkpoint = open_checkpoint(finished._folder / "checkpoints" / "step-000002")
    plain = type(checkpoint).read

    def read(self, name, *box):
        nonlocal peak
        tensor = plain(self, name, *box)
        live[name] = weakref.ref(tensor)
        sizes = [ref().nbytes for ref in live.values() if ref() is not None]
        peak = max(peak, sum(sizes))
        return tensor

    monkeypatch.setattr(type(checkpoint), "read", read)
    monkeypatch.setattr(result_module, "save_weights", partial(save_weights, max_shard_bytes=limit))
    write_result(checkpoint, meta(finished), finished.tokenizer, finished.config, tmp_path)
    total = sum(load_file(p)[n].nbytes for p in (tmp_path / "model").glob("*.safetensors") for n in load_file(p))
    largest = max(t.nbytes for p in (tmp_path / "model").glob("*.safetensors") for t in load_file(p).values())
    assert peak <= limit + largest < total
