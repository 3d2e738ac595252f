"""Checkpoints that are written while the training goes on: the same bits, and told once they are on the disk."""

import time
from functools import partial
from pathlib import Path

import pytest
from jobs import BOUND, Job, callback_raising, job_config, newest
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
    ("kind", "layout", "slow"),
    [
        ("lora", {}, 0),
        ("full", {"dp_shard_size": 2}, 1),
        pytest.param("lora", {}, 1, marks=pytest.mark.slow),
        pytest.param("full", {"dp_shard_size": 2}, 0, marks=pytest.mark.slow),
        pytest.param("full", {"pp_size": 2}, 0, marks=pytest.mark.slow),
        pytest.param("full", {"pp_size": 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
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


def hanging(rank, config, *, on):
    """The disk of rank 1 hangs in the save of step 2; the script of rank `on` makes a mistake after step 3."""
    trainer = callback_raising(rank, config, on=on)
    if rank == 1:
        trainer.fault = lambda point: time.sleep(600) if point == "rank1-00001.safetensors written" else None
    return trainer


@pytest.mark.parametrize("on", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_is_told_while_a_disk_hangs(tmp_path, on):
    inputs = write_inputs(tmp_path / "inputs")
    job = Job(tmp_path, job_config(inputs, tmp_path / "run", async_save=True, timeout=30.0), partial(hanging, on=on))
    while not (tmp_path / "run" / "logs").exists():  # importing may take long on a machine that does much else
        assert not job.wait(0.05), job.errors()
    assert job.wait(BOUND)
    assert job.finish().codes == [1, 1]
    assert job.said(on).count(f"rank {on}: KeyError: 'a mistake of the script'") == 1
    (line,) = [line for line in job.said(1 - on).splitlines() if line.startswith("rank ")]
    assert line == f"rank {1 - on}: stopped because rank {on} failed: KeyError: 'a mistake of the script'"
    assert newest(tmp_path / "run") == 0
