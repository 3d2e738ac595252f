"""What a job of many ranks refuses at its start, on all ranks, and what it waits for."""

import os
import time
from pathlib import Path

import pytest
from layouts import layout_config
from pool import run
from runs import write_inputs
from torch.nn import functional

from gapless.cli import main
from gapless.inference.export import export
from gapless.inference.generate import generate
from gapless.training.callbacks import Callback
from gapless.training.trainer import Trainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), rows=5)


def refused(rank, world, configs):
    messages = []
    for config in configs:
        try:
            Trainer(config).train()
            messages.append("trained")
        except (ValueError, SystemExit) as error:
            messages.append(str(error))
    return messages


def test_what_does_not_divide(inputs):
    """The tiny model has 2 kv heads and 2 layers, its rows fill 3 packed rows."""
    cases = [
        ({"tp_size": 4}, ("tp_size = 4", "2 key-value heads")),
        ({"tp_size": 2, "max_length": 127}, ("127", "2")),
        ({"pp_size": 4, "gradient_accumulation_steps": 4}, ("4", "2 layers")),
        ({"pp_size": 2, "gradient_accumulation_steps": 1}, ("gradient_accumulation_steps is 1", "pp_size 2")),
        ({"pp_size": 2, "pp_schedule": "interleaved"}, ("2 layers",)),
        ({"dp_shard_size": 3}, ("dp_shard_size 3 takes a multiple of 3 processes, and there are 4",)),
        ({}, ("3 packed rows", "4 data-parallel ranks")),
    ]
    configs = [layout_config(inputs, "lora", output_dir=str(inputs / "refused"), **case) for case, _ in cases]
    results = run(4, refused, configs)
    for index, (_, words) in enumerate(cases):
        for rank in results:
            assert all(word in rank[index] for word in words), rank[index]
    assert not (inputs / "refused").exists()


def elsewhere(rank, world, config, folders):
    """Train from a working folder of this rank's own."""
    before = Path.cwd()
    os.chdir(folders[rank])
    try:
        return refused(rank, world, [config])
    finally:
        os.chdir(before)


def test_a_run_folder_that_is_not_shared(inputs, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    found = run(2, elsewhere, layout_config(inputs, "lora", output_dir="run"), folders)
    assert all("rank 1 does not see" in message for (message,) in found)
    assert not (folders[1] / "run").exists()


class Slow(Callback):
    """Takes longer than a collective may, on one rank, wherever a callback may."""

    def wait(self, trainer):
        time.sleep(0.8 if trainer.rank == 0 else 0.0)

    def on_train_begin(self, trainer):
        self.wait(trainer)

    def on_evaluate(self, trainer, metrics):
        self.wait(trainer)

    def on_save(self, trainer, folder):
        self.wait(trainer)


def train_slowly(rank, world, configs):
    return [Trainer(config, callbacks=[Slow()]).train().finished for config in configs]


def test_callbacks_may_take_longer_than_a_collective(inputs, tmp_path):
    settings = {"max_steps": 2, "save_steps": None, "eval": (str(inputs / "eval.jsonl"),)}
    configs = [
        layout_config(inputs, "lora", output_dir=str(tmp_path / str(later)), async_save=later, **settings)
        for later in (False, True)
    ]
    assert run(2, train_slowly, configs, collective=0.5) == [[True, True]] * 2


def own_loss(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="sum")


def with_a_loss_on_one(rank, world, config):
    try:
        Trainer(config, loss_fn=own_loss if rank == 0 else None).train()
    except ValueError as error:
        return str(error)


def test_a_loss_of_one_rank_alone(inputs, tmp_path):
    for message in run(2, with_a_loss_on_one, layout_config(inputs, "lora", output_dir=str(tmp_path / "run"))):
        assert 'loss_fn: rank 0 has "one of a script\'s own", rank 1 has "cross-entropy"' in message


class Ask(Callback):
    def on_train_begin(self, trainer):
        generate(trainer.model, trainer.tokenizer, [[5, 6]], max_new_tokens=2)


def ask_a_piece(rank, world, configs):
    messages = []
    for config in configs:
        try:
            Trainer(config, callbacks=[Ask()]).train()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_piece_of_a_model_does_not_generate(inputs, tmp_path):
    layouts = [{"tp_size": 2}, {"pp_size": 2, "gradient_accumulation_steps": 2}]
    configs = [layout_config(inputs, "lora", output_dir=str(tmp_path / "run"), **layout) for layout in layouts]
    for messages in run(2, ask_a_piece, configs):
        assert len(messages) == 2
        assert all("cut by parallel.tp_size or parallel.pp_size" in message for message in messages)


@pytest.mark.parametrize(("rank", "code"), [("0", 0), ("1", 2)])
def test_export_is_the_work_of_one_process(inputs, tmp_path, monkeypatch, capsys, rank, code):
    """In a script the main rank's call is good; the command is refused on all."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, (rank, rank, "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    if code:
        with pytest.raises(ValueError, match="export is the work of one process, and this is rank 1 of 2; call it"):
            export(inputs / "model", tmp_path / "out")
    else:
        export(inputs / "model", tmp_path / "out")
    model = str(inputs / "model")
    for arguments in (
        ["export", model, "--to", "merged", "--out", str(tmp_path / "other")],
        ["generate", model, "--prompt", "Hi"],
    ):
        assert main(arguments) == 2
        assert f"this is rank {rank} of 2; start it without torchrun" in capsys.readouterr().err
