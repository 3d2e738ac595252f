"""Checkpoints that are written while the training goes on: the same bits, and told once they are on the disk."""

import time
from pathlib import Path

import pytest
from jobs import job_config
from pool import run
from runs import assert_same_outcome, outcome, write_inputs

from gapless.checkpoint_file import open_checkpoint
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import CheckpointWriter
from gapless.training.trainer import Trainer


class Saves(Callback):
    """Notes the checkpoints that it is told of, and the step at which it is."""

    def __init__(self) -> None:
        self.told = []

    def on_save(self, trainer, folder: Path):
        assert open_checkpoint(folder).step == int(folder.name.removeprefix("step-"))  # all of it is there
        self.told.append((folder.name, trainer.step))


def train(rank, size, config, slow=None):
    """Train; the disk of rank `slow` is slow."""
    saves, write = Saves(), CheckpointWriter._write_pieces

    def write_late(writer, *args):
        time.sleep(0.1)
        return write(writer, *args)

    if rank == slow:
        CheckpointWriter._write_pieces = write_late
    try:
        Trainer(config, callbacks=[saves]).train()
    finally:
        CheckpointWriter._write_pieces = write
    return saves.told


@pytest.mark.parametrize(
    ("kind", "layout"), [("lora", {}), ("full", {"dp_shard_size": 2}), ("full", {"pp_size": 2})], ids=str
)
@pytest.mark.parametrize("slow", [0, 1])
def test_the_outcome_is_that_of_a_run_that_waits(tmp_path, kind, layout, slow):
    inputs = write_inputs(tmp_path / "inputs")
    settings = {"save_steps": 5, "save_total_limit": None, **layout}
    names = ["step-000005", "step-000010"]
    told = run(2, train, job_config(inputs, tmp_path / "waits", kind, **settings))
    assert told == [[(name, int(name[-2:])) for name in names]] * 2
    told = run(2, train, job_config(inputs, tmp_path / "goes on", kind, async_save=True, **settings), slow)
    assert [[name for name, _ in rank] for rank in told] == [names] * 2
    assert all(6 <= rank[0][1] <= 10 for rank in told)  # it went on
    for step in (5, 10):
        assert_same_outcome(outcome(tmp_path / "goes on", step), outcome(tmp_path / "waits", step))
