"""What a run leaves before it is finished: its checkpoints, to generate with and to export."""

import json
import shutil
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapless.batch import segments
from gapless.config import AdapterConfig, DataConfig, LoggingConfig, ModelConfig, RunConfig, TrainingConfig
from gapless.inference.export import export
from gapless.inference.load import find_model, load_model
from gapless.training.trainer import train
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

TOKENS = torch.arange(14, dtype=torch.int32)
ADAPTERS = {
    "lora": AdapterConfig(r=4),
    "saved": AdapterConfig(r=2, target_modules=("q_proj", "up_proj"), modules_to_save=("embed_tokens",)),
    "none": AdapterConfig(type="none"),
}


@pytest.fixture(scope="module", params=ADAPTERS)
def finished(request, tmp_path_factory):
    """A run whose last checkpoint is its result."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder / "base", "qwen3", vocab_size=VOCAB_SIZE)
    write_tiny_tokenizer(folder / "base")
    turns = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris"}]
    (folder / "rows.jsonl").write_text(4 * (json.dumps({"messages": turns}) + "\n"))
    config = RunConfig(
        model=ModelConfig(path=str(folder / "base"), dtype="bf16", device="cpu"),
        data=DataConfig(train=(str(folder / "rows.jsonl"),), max_length=128),
        adapter=ADAPTERS[request.param],
        training=TrainingConfig(output_dir=str(folder / "run"), max_steps=2, save_steps=1),
        logging=LoggingConfig(report_to=()),
    )
    train(config)
    return folder / "run"


@pytest.fixture
def stopped(finished, tmp_path):
    """The same run without its result."""
    shutil.copytree(finished, tmp_path / "run")
    for name in ("adapter", "model"):
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    return tmp_path / "run"


@torch.no_grad()
def logits(folder):
    model, _ = load_model(folder, dtype="fp32", device="cpu")
    return model.logits(model(TOKENS, segments([len(TOKENS)])))


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_a_checkpoint_gives_the_logits_of_the_run_at_its_step(finished, stopped, capsys):
    expected = logits(finished)
    assert torch.equal(logits(finished / "checkpoints" / "step-000002"), expected)
    assert not torch.equal(logits(finished / "checkpoints" / "step-000001"), expected)
    assert capsys.readouterr().err == ""
    assert torch.equal(logits(stopped), expected)
    assert f"note: {stopped} has no result yet; this is its newest checkpoint, step-000002" in capsys.readouterr().err


def test_exports_of_a_checkpoint_equal_those_of_the_result(finished, stopped, tmp_path):
    kinds = ("merged",) if (finished / "model").exists() else ("merged", "adapter")
    for kind in kinds:
        ours, theirs = (
            export(source, tmp_path / f"{name}-{kind}", kind=kind)
            for name, source in (("step", stopped / "checkpoints" / "step-000002"), ("result", finished))
        )
        assert ours.changed == theirs.changed
        assert {path.name for path in ours.folder.iterdir()} == {path.name for path in theirs.folder.iterdir()}
        for path in ours.folder.iterdir():
            assert path.read_bytes() == (theirs.folder / path.name).read_bytes(), path.name
    if "adapter" not in kinds:
        with pytest.raises(ValueError, match="has no adapter; export it as merged"):
            export(stopped, tmp_path / "out", kind="adapter")


def test_an_adapter_of_a_checkpoint_keeps_the_template_of_its_run(finished, stopped, tmp_path):
    if (finished / "model").exists():
        pytest.skip("has no adapter")
    (tmp_path / "own.jinja").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    config = (stopped / "config.toml").read_text()
    (stopped / "config.toml").write_text(config.replace("[data]", f'[data]\nchat_template = "{tmp_path}/own.jinja"'))
    export(stopped, tmp_path / "out", kind="adapter")
    _, tokenizer = load_model(tmp_path / "out", device="cpu")
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<hi>"


def test_slices_are_put_together(finished, stopped, tmp_path):
    """As four ranks would have written them: every tensor cut by rows and, if it is a matrix, by columns."""
    folder = stopped / "checkpoints" / "step-000002"
    index = json.loads((folder / "index.json").read_text())
    ranks = [{} for _ in range(4)]
    for name, whole in tensors(folder).items():
        slices = index["tensors"][name]["slices"] = []
        for rank, rows in enumerate(whole.split([1, len(whole) - 1])):
            cuts = rows.split([2, rows.shape[1] - 2], dim=1) if rows.dim() == 2 and rows.shape[1] > 2 else [rows]
            for half, box in enumerate(cuts):
                ranks[rank + 2 * half][name] = box.contiguous()
                start = [rank, 2 * half][: box.dim()]
                slices.append({"file": f"{rank + 2 * half}.safetensors", "start": start, "shape": list(box.shape)})
    for path in folder.glob("rank0-*.safetensors"):
        path.unlink()
        del index["files"][path.name]
    for rank, boxes in enumerate(ranks):
        save_file(boxes, folder / f"{rank}.safetensors")
        data = (folder / f"{rank}.safetensors").read_bytes()
        index["files"][f"{rank}.safetensors"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    (folder / "index.json").write_text(json.dumps(index))
    assert torch.equal(logits(folder), logits(finished))
    ours, theirs = (
        export(source, tmp_path / f"out-{name}", kind="merged").folder
        for name, source in (("slices", folder), ("result", finished))
    )
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    name = next(name for name in index["tensors"] if name.startswith("weight/"))
    index["tensors"][name]["slices"].pop()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="do not cover its shape"):
        load_model(folder, device="cpu")


def test_checkpoints_that_cannot_be_used_are_refused(stopped, tmp_path):
    folder = stopped / "checkpoints" / "step-000002"
    config, index = (stopped / "config.toml").read_text(), (folder / "index.json").read_text()
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        load_model(folder)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name} is missing"):
        load_model(folder)
    (folder / "index.json").write_text(index.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format_version 2; this version of gapless reads 1"):
        load_model(folder)
    (stopped / "config.toml").write_text(config.replace("/base", "/gone"))
    with pytest.raises(FileNotFoundError, match="correct model.path in"):
        find_model(folder)
    with pytest.raises(FileNotFoundError, match="is a checkpoint, and .* above it is no run folder"):
        find_model(shutil.copytree(folder, tmp_path / "apart"))


@pytest.mark.parametrize(("old", "new"), [("r = ", "r = 1"), ("target_modules = [", 'target_modules = ["k_proj", ')])
def test_a_checkpoint_that_does_not_fit_its_run_is_refused(finished, stopped, old, new):
    if (finished / "model").exists():
        old, new = 'type = "none"', 'type = "lora"'
    config = (stopped / "config.toml").read_text()
    assert f"\n{old}" in config
    (stopped / "config.toml").write_text(
        config.replace(f"\n{old}", f"\n{new}").replace('k_proj", "all-linear', "k_proj")
    )
    with pytest.raises(ValueError, match="does not fit its run's config.toml|this model takes"):
        load_model(stopped, device="cpu")


def test_a_missing_base_model_comes_with_the_commands_that_help(finished, tmp_path):
    if (finished / "model").exists():
        pytest.skip("has no adapter")
    adapter = shutil.copytree(finished / "adapter", tmp_path / "adapter")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    for base, message in (("gone", "was trained on gone"), (None, "does not name its base model")):
        (adapter / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": base}))
        with pytest.raises((ValueError, FileNotFoundError), match=f"{message}.*generate BASE --adapter {adapter}"):
            find_model(adapter)
