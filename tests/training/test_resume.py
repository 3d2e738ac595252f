"""Runs that are killed, at random moments and at every point of a save, end as if nothing had happened."""

import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import children
import pytest
from runs import assert_same_outcome, make_config, outcome, write_inputs

from gapless.training.callbacks import Callback
from gapless.training.checkpoint import list_checkpoints
from gapless.training.signals import StopSignals
from gapless.training.trainer import Trainer

KILLS, KILLS_PER_RUN = 15, 3
"""For LoRA and for full fine-tuning: 30 kills."""
CONTEXT = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def no_nohup():
    """Tests that run under nohup ignore SIGHUP otherwise, and so do their children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The inputs, and a process to fork children from, which has imported everything and computed nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        CONTEXT.set_forkserver_preload(["children"])
        forkserver.ensure_running()
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def start(*args):
    process = CONTEXT.Process(target=children.train, args=args)
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
    finish(inputs, tmp_path_factory.mktemp("warm-up"), request.param)  # starts the server, tokenises
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
    killed = resumed = runs = 0
    # A kill may come after the end or before the first checkpoint: as many runs as it takes.
    while killed < KILLS or resumed < KILLS / 3:
        runs += 1
        assert runs <= KILLS
        output = tmp_path / str(runs)
        for _ in range(KILLS_PER_RUN):
            process = start(inputs, output, kind)
            process.join(timeout=draw.uniform(0, 0.9) * seconds)
            process.kill()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
        finish(inputs, output, kind)
        resumed += (output / "stdout").read_text().count("going on from")
        assert_as_uninterrupted(output, reference)


def test_kill_at_every_point_of_a_save(inputs, reference, tmp_path):
    kind = reference[0]
    finish(inputs, tmp_path / "recorded", kind, children.Record(tmp_path / "points"))
    points = (tmp_path / "points").read_text().splitlines()
    # The first save that prunes passes every kind of point.
    end = points.index("pruned one") + 1
    first = end - len(set(points))
    assert len(set(points[first:end])) == end - first >= 6
    for count in range(first, end):
        output = tmp_path / str(count)
        process = start(inputs, output, kind, children.KillAt(count))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        finish(inputs, output, kind)
        assert_as_uninterrupted(output, reference)


def test_a_signal_in_the_last_step_leaves_the_result_to_the_next_start(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    stopped = Trainer(config, callbacks=[Signal(9, signal.SIGTERM)]).train()
    assert (stopped.step, stopped.finished, stopped.result_dir) == (10, False, None)
    result = Trainer(config).train()
    assert (result.finished, result.result_dir) == (True, tmp_path / "adapter")


class Signal(Callback):
    """Sends signals to the process after a step."""

    def __init__(self, step: int, *numbers: int) -> None:
        self.step, self.numbers = step, numbers

    def on_step_end(self, trainer, metrics):
        if metrics["step"] == self.step:
            for number in self.numbers:
                signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(inputs, tmp_path, capsys, number):
    Trainer(make_config(inputs, tmp_path / "straight")).train()
    config = make_config(inputs, tmp_path / "stopped", save_steps=None)
    before = signal.getsignal(number)
    result = Trainer(config, callbacks=[Signal(3, number)]).train()
    assert signal.getsignal(number) is before
    assert (result.finished, result.step, result.result_dir) == (False, 4, None)
    assert (result.stopped_by, result.exit_code) == (number.name, 128 + number)
    assert "run the same command again to go on" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path / "stopped" / "checkpoints")] == ["step-000004"]
    result = Trainer(config).train()
    assert (result.finished, result.stopped_by, result.exit_code) == (True, None, 0)
    found, expected = outcome(tmp_path / "stopped"), outcome(tmp_path / "straight")
    for both in (found, expected):
        del both["checkpoints"], both["state"]["settings"]
    assert_same_outcome(found, expected)


def test_a_signal_in_the_middle_of_a_print_is_no_trouble(inputs, tmp_path, monkeypatch):
    class Screen(io.RawIOBase):
        """A slow terminal: the signal comes while a line is written to it."""

        signals = 1

        def writable(self):
            return True

        def write(self, data):
            if self.signals and b"step 3/" in bytes(data):
                self.signals -= 1
                signal.raise_signal(signal.SIGINT)
            return len(data)

    stream = io.TextIOWrapper(io.BufferedWriter(Screen()))
    monkeypatch.setattr(sys, "stdout", stream)
    result = Trainer(make_config(inputs, tmp_path, save_steps=None)).train()
    assert (result.finished, result.result_dir) == (False, None)


def test_after_the_terminal_closed_output_goes_nowhere():
    script = """
import os, signal
from gapless.training.signals import StopSignals
outer, terminal = os.openpty()
os.dup2(terminal, 1); os.dup2(terminal, 2); os.close(terminal)
with StopSignals() as signals:
    os.close(outer)
    signal.raise_signal(signal.SIGHUP)
    print("finishing", flush=True)
os._exit(129 if signals.received == "SIGHUP" else 1)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 129


def test_nohup_stays_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_of_many_ranks_a_second_ctrl_c_is_only_noted(capfd):
    """Launchers pass on what the terminal has sent to all already."""
    for rank in (0, 1):
        with StopSignals(rank, ranks=2) as signals:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signals.received == "SIGINT"
        assert ("SIGINT: finishing this step, then saving\n" in capfd.readouterr().err) == (rank == 0)


def test_a_second_ctrl_c_aborts(inputs, tmp_path):
    config = make_config(inputs, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, callbacks=[Signal(5, signal.SIGINT, signal.SIGINT)]).train()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-000002", "step-000004"]
    assert Trainer(config).train().finished
