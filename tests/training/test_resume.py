"""Runs that are killed, at random moments and at every point of a save, end as if nothing had happened."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from runs import assert_same_outcome, make_config, outcome, write_inputs

from gapless.data.loader import Loader
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import list_checkpoints, no_fault
from gapless.training.trainer import Trainer

SETTINGS = {"eval_steps": 3}
KILLS_PER_RUN = 3
# Children are forked from a process that has imported everything and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["gapless.training.trainer", "runs"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def record_rows(path: Path) -> None:
    """Have the loader note the source rows of every step it hands out."""
    plain = Loader.next_step

    def next_step(self):
        data = plain(self)
        with path.open("a") as file:
            file.write(json.dumps([data.step, data.where()]) + "\n")
        return data

    Loader.next_step = next_step


def child(inputs: Path, output: Path, kind: str, fault=no_fault) -> None:
    """What a child process does: the same command, started again."""
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(output / "stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    record_rows(output / "rows.jsonl")
    config = make_config(inputs, output, kind, eval=(str(inputs / "eval.jsonl"),), **SETTINGS)
    Trainer(config, fault=fault).train()


def start(*args):
    process = CONTEXT.Process(target=child, args=args)
    process.start()
    return process


def finish(*args) -> float:
    """Run to the end; returns the seconds it took."""
    begin = time.perf_counter()
    process = start(*args)
    process.join()
    assert process.exitcode == 0
    return time.perf_counter() - begin


@pytest.fixture(scope="module", params=["lora", "full"])
def reference(request, inputs, tmp_path_factory):
    """An uninterrupted run: its kind, outcome, rows and duration."""
    output = tmp_path_factory.mktemp("reference")
    seconds = finish(inputs, output, request.param)
    rows = dict(json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines())
    return request.param, outcome(output), rows, seconds


def assert_as_uninterrupted(output: Path, reference) -> None:
    _, expected, rows, _ = reference
    assert_same_outcome(outcome(output), expected)
    seen = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines() if line.endswith("]")]
    assert {step for step, _ in seen} == set(rows)
    for step, where in seen:
        assert where == rows[step]


def test_kill_at_random_moments(inputs, reference, tmp_path):
    kind, _, _, seconds = reference
    draw = random.Random()
    killed = resumed = 0
    for run in range(5):
        output = tmp_path / str(run)
        for _ in range(KILLS_PER_RUN):
            process = start(inputs, output, kind)
            process.join(timeout=draw.uniform(0.1, 0.9) * seconds)
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
        finish(inputs, output, kind)
        resumed += "going on from" in (output / "stdout").read_text()
        assert_as_uninterrupted(output, reference)
    assert killed >= 10  # of 15; a kill that comes after the end is none
    assert resumed >= 3


class KillAt:
    """A fault hook that kills its process when it is called for the n-th time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, point: str) -> None:
        self.count -= 1
        if self.count < 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Record:
    """A fault hook that notes the points in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, point: str) -> None:
        with self.path.open("a") as file:
            file.write(point + "\n")


def test_kill_at_every_point_of_a_save(inputs, reference, tmp_path):
    kind = reference[0]
    finish(inputs, tmp_path / "recorded", kind, Record(tmp_path / "points"))
    points = (tmp_path / "points").read_text().splitlines()
    end = points.index("pruned one") + 1
    # The save that first prunes passes every kind of point; it is preceded by saves that do not prune.
    first = max(index for index in range(end - 1) if points[index] == "renamed" and index < end - 2) + 1
    assert len(set(points[first:end])) == len(points[first:end]) >= 6
    for count in range(first, end):
        output = tmp_path / str(count)
        process = start(inputs, output, kind, KillAt(count))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        finish(inputs, output, kind)
        assert_as_uninterrupted(output, reference)


class Signal(Callback):
    """Sends signals to the process after a step."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    def on_step_end(self, trainer, metrics):
        if metrics["step"] == self.step:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(inputs, tmp_path, capsys, number):
    Trainer(make_config(inputs, tmp_path / "straight")).train()
    config = make_config(inputs, tmp_path / "stopped", save_steps=None)
    before = signal.getsignal(number)
    result = Trainer(config, callbacks=[Signal(3, number)]).train()
    assert signal.getsignal(number) is before
    assert (result.finished, result.step, result.result_dir) == (False, 4, None)
    assert "run the same command again to go on" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path / "stopped" / "checkpoints")] == ["step-000004"]
    assert Trainer(config).train().finished
    found, expected = outcome(tmp_path / "stopped"), outcome(tmp_path / "straight")
    for both in (found, expected):
        del both["checkpoints"], both["state"]["settings"]
    assert_same_outcome(found, expected)


def test_a_second_ctrl_c_aborts(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, callbacks=[Signal(5, signal.SIGINT, signal.SIGINT)]).train()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000002", "step-000004"]
    assert Trainer(config).train().finished
