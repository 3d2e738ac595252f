"""The run folder: going on, what is refused, and what a failure leaves."""

import errno
import json
import os
import resource
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from runs import assert_same_outcome, make_config, outcome, write_inputs
from safetensors.torch import load_file, save_file

from gapless.data.tokenizer import Tokenizer
from gapless.parallel.watch import OtherRankFailed
from gapless.training import setup
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import CheckpointError
from gapless.training.run_folder import open_run_folder
from gapless.training.trainer import Trainer, train
from tiny import write_tiny_model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


# ---- going on ----


def test_a_finished_run_is_left_as_it_is(inputs, tmp_path, capsys):
    config = make_config(inputs, tmp_path)
    first = train(config)
    before = outcome(tmp_path)
    assert train(config) == first
    assert_same_outcome(outcome(tmp_path), before)
    assert before["checkpoints"] == ["step-000008", "step-000010"]
    shown = capsys.readouterr().out
    assert "already finished at step 10" in shown
    assert "going on from" not in shown
    assert shown.count("wrote ") == 1
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    assert train(replace(config, data=replace(config.data, eval=(str(inputs / "eval.jsonl"),)))) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == files
    (first.result_dir / "README.md").touch()
    train(config)
    assert (first.result_dir / "README.md").exists()


def test_a_result_older_than_the_last_checkpoint_is_written_anew(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    adapter = train(config).result_dir
    before = outcome(tmp_path)
    os.utime(adapter, ns=(0, 0))  # as if the run had been killed between the two
    (adapter / "adapter_model.safetensors").write_bytes(b"of an earlier step")
    train(config)
    assert_same_outcome(outcome(tmp_path), before)
    shutil.rmtree(adapter)
    train(config)
    assert_same_outcome(outcome(tmp_path), before)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 5e-4}, r"optim.learning_rate = 0.01, now it is 0.0005"),
        ({"r": 8}, r"adapter.r = 4, now it is 8"),
        ({"kind": "full"}, r"adapter.type = .lora., now it is .none."),
        ({"max_length": 64}, r"data.max_length = 128, now it is 64"),
        ({"dtype": "bf16"}, r"model.dtype = 'fp32', now it is 'bf16'"),
        ({"seed": 1}, r"training.seed = 42, now it is 1"),
        ({"gradient_accumulation_steps": 1}, r"rows_per_step 2 -> 1.*set training.gradient_accumulation_steps to 2"),
        ({"target_modules": ("q_proj",)}, r"adapter.target_modules = \['all-linear'\], now it is \['q_proj'\]"),
        ({"max_steps": 12}, "a run of 4 steps, now there are 12"),
        ({"resume": "never"}, "has step-000004 and training.resume is never"),
    ],
)
def test_another_run_s_folder_is_refused(inputs, finished, settings, words):
    run_file = (finished / "config.toml").read_text()
    with pytest.raises(ValueError, match=words):
        train(make_config(inputs, finished, **{"max_steps": 4, **settings}))
    assert (finished / "config.toml").read_text() == run_file


@pytest.fixture(scope="module")
def finished(inputs, tmp_path_factory):
    """A finished run of 4 steps."""
    output = tmp_path_factory.mktemp("finished")
    train(make_config(inputs, output, max_steps=4))
    return output


def test_settings_that_change_no_number_may_change(inputs, finished):
    train(make_config(inputs, finished, max_steps=4, save_steps=None, logging_steps=3, save_total_limit=None))


def test_other_rows_are_refused(inputs, finished, tmp_path):
    rows = (inputs / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[1:]) + "\n")
    with pytest.raises(ValueError, match="other training data"):
        train(make_config(inputs, finished, max_steps=4, train=(str(tmp_path / "train.jsonl"),)))


def test_another_base_model_is_refused(inputs, finished, tmp_path):
    config = make_config(inputs, finished, max_steps=4)
    (tmp_path / "model").symlink_to(inputs / "model")
    train(replace(config, model=replace(config.model, path=str(tmp_path / "model"))))  # the same weights elsewhere
    write_tiny_model(tmp_path / "other", vocab_size=384, num_hidden_layers=2, seed=1)
    Tokenizer.from_folder(inputs / "model").save(tmp_path / "other")
    with pytest.raises(ValueError, match="other is not the one this run began with"):
        train(replace(config, model=replace(config.model, path=str(tmp_path / "other"))))


def test_a_constant_rate_may_run_on(inputs, tmp_path):
    settings = {"lr_scheduler_type": "constant", "save_total_limit": None}
    train(make_config(inputs, tmp_path / "straight", **settings))
    train(make_config(inputs, tmp_path / "longer", max_steps=4, **settings))
    train(make_config(inputs, tmp_path / "longer", max_steps=10, **settings))
    assert_same_outcome(outcome(tmp_path / "longer"), outcome(tmp_path / "straight"))
    with pytest.raises(ValueError, match="step-000010 is past the end of a run of 9 steps"):
        train(make_config(inputs, tmp_path / "longer", max_steps=9, **settings))


def test_a_damaged_checkpoint_is_refused(inputs, tmp_path):
    config = make_config(inputs, tmp_path, max_steps=4)
    train(config)
    expected = outcome(tmp_path, 4)
    newest = tmp_path / "checkpoints" / "step-000004"
    with (newest / "rank0-00001.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=f"delete {newest} to go on from step-000002"):
        train(config)
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    train(config)
    assert_same_outcome(outcome(tmp_path, 4), expected)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_result_without_checkpoints_is_not_replaced(inputs, tmp_path, kind):
    config = make_config(inputs, tmp_path, kind, max_steps=2)
    result = train(config).result_dir
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=f"{result} is the result of a run whose checkpoints are gone"):
        train(config)
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before


# ---- the folder ----


def test_bad_rows_leave_no_new_folder_behind(inputs, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}')
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    for folder in ("new/nested/run", "old"):
        with pytest.raises(ValueError, match="asistant"):
            train(make_config(inputs, tmp_path / folder, train=(str(rows),), cache_dir=None))
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "checkpoints").is_dir()


@pytest.mark.parametrize("error", [OtherRankFailed(1, "it found a bad row"), ValueError("a bad row")])
def test_a_refusal_by_any_rank_leaves_no_new_folder_behind(inputs, tmp_path, error):
    def refuse(output, file):
        with open_run_folder(make_config(inputs, output)) as folder:
            (folder / file).touch()
            raise error

    for file in ("rows", "config.toml"):
        with pytest.raises(type(error)) as raised:
            refuse(tmp_path / file / "run", file)
        assert raised.value is error
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_new_folder_that_cannot_be_removed_does_not_hide_the_refusal(inputs, tmp_path, monkeypatch):
    """On NFS a file that is removed while it is open stays under another name."""

    def busy(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rmdir", busy)
    with pytest.raises(ValueError, match="a bad row"), open_run_folder(make_config(inputs, tmp_path / "run")):
        raise ValueError("a bad row")


def test_a_folder_in_use_is_refused(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    with open_run_folder(config), pytest.raises(ValueError, match="another process is training"):
        train(config)


def test_a_folder_that_cannot_be_made_is_refused(inputs, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*file/run: Not a directory"):
        train(make_config(inputs, tmp_path / "file" / "run"))


@contextmanager
def file_size_limit():
    """Yields what sets the largest size of a file that can be written, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("file", ["metrics.jsonl", "tensorboard"])
def test_a_log_that_cannot_be_written_is_one_line(inputs, tmp_path, file):
    class Fill(Callback):
        def on_step_end(self, trainer, metrics):
            path = tmp_path / file if file == "metrics.jsonl" else next((tmp_path / file).iterdir())
            limit(path.stat().st_size + 10)

    report_to = ("tensorboard",) if file == "tensorboard" else ()
    config = make_config(inputs, tmp_path, save_steps=None, report_to=report_to, max_steps=4)
    with file_size_limit() as limit, pytest.raises(ValueError, match=r"cannot write .*: File too large; put that"):
        Trainer(config, callbacks=[Fill()]).train()
    assert train(config).finished


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_result_that_cannot_be_written_is_one_line_and_leaves_the_last_one(inputs, tmp_path, kind):
    class Fill(Callback):
        def on_save(self, trainer, folder):
            limit(18000)

    settings = {"lr_scheduler_type": "constant"}
    result = train(make_config(inputs, tmp_path, kind, max_steps=2, **settings)).result_dir
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    config = make_config(inputs, tmp_path, kind, max_steps=3, **settings)
    with file_size_limit() as limit, pytest.raises(ValueError, match=rf"cannot write {result}: .*File too large"):
        Trainer(config, callbacks=[Fill()]).train()
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_tokenizer_larger_than_the_embedding_is_refused(inputs, tmp_path):
    write_tiny_model(tmp_path / "model", vocab_size=300)
    Tokenizer.from_folder(inputs / "model").save(tmp_path / "model")
    with pytest.raises(ValueError, match="384 tokens, the model embeds 300"):
        train(make_config(inputs, tmp_path / "run", path=str(tmp_path / "model")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "spoil", "words"),
    [
        ({}, lambda model: edit(model, architectures=["MambaForCausalLM"]), "MambaForCausalLM is not supported"),
        ({}, lambda model: (model / "config.json").write_text("{"), "config.json is not JSON"),
        ({}, lambda model: edit(model, num_hidden_layers=3), "weights are missing: model.layers.2."),
        ({}, lambda model: (model / "model.safetensors").unlink(), "model.safetensors does not exist"),
        ({"target_modules": ("q_prj",)}, None, "no q_prj to adapt"),
        ({"modules_to_save": ("norm",)}, None, "norm is not possible"),
        ({"r": 99}, None, "r = 99 exceeds"),
        ({"report_to": ("wandb",)}, None, "wandb.* not installed"),
        ({"eval": ("missing.jsonl",)}, None, "missing.jsonl does not exist"),
        ({"device": "cuda"}, None, "torch sees no GPU"),
    ],
)
def test_what_can_be_refused_is_before_rows_are_read(inputs, tmp_path, monkeypatch, settings, spoil, words):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("has a GPU")
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delattr(setup, "tokenize")
    shutil.copytree(inputs / "model", tmp_path / "model")
    if spoil:
        spoil(tmp_path / "model")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        train(make_config(inputs, tmp_path / "run", **{"path": str(tmp_path / "model"), **settings}))
    assert not (tmp_path / "run").exists()


def edit(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_tied_head_that_is_stored_too_trains(inputs, tmp_path):
    Tokenizer.from_folder(inputs / "model").save(
        write_tiny_model(tmp_path / "model", vocab_size=384, tie_word_embeddings=True)
    )
    stored = load_file(tmp_path / "model" / "model.safetensors")
    save_file(
        stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, tmp_path / "model/model.safetensors"
    )
    assert train(make_config(inputs, tmp_path / "run", path=str(tmp_path / "model"), max_steps=2)).finished
