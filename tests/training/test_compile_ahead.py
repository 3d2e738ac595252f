"""Kernels are compiled by a process beside a run: those that it launches, and no run waits for that in vain."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gapless.config import MemoryConfig
from gapless.config_file import dump_config
from gapless.kernels import compiling
from gapless.kernels.runtime import Chip, triton
from gapless.training import compile_ahead as ahead
from gapless.training import trainer
from training.runs import make_config, write_inputs

HERE = Path(__file__).parent
CHIP = Chip(86, 84, 6 << 20)
KINDS = ("lora", "lora and a head", "lora in layers that run again", "full in rows of any length")
ALL_KINDS = (
    *(*KINDS, "documents of one length", "lora of some layers", "lora in rows of any length", "lora in float32"),
    *("full", "full in layers that run again", "full with moments in 8 bits", "full in pure bf16"),
)
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are launched")


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Processes that are started compile, into a folder of the test."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def launches(*arguments):
    """The lines of launches.py."""
    run = subprocess.run(
        [sys.executable, HERE / "launches.py", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_foreseen(folder, kinds):
    lines = launches("keys", folder, *kinds)
    assert len(lines) == 2 * len(kinds)
    assert not {line["kind"]: line["missed"] for line in lines if line["missed"]}
    assert all(line["launched"] > 10 and line["in vain"] < 3 for line in lines), lines


@needs_triton
@no_gpu
def test_what_a_run_launches_is_foreseen(compiles, tmp_path):
    assert_foreseen(tmp_path, KINDS)


@needs_triton
@no_gpu
@pytest.mark.slow
def test_what_any_run_launches_is_foreseen(compiles, tmp_path):
    assert_foreseen(tmp_path, ALL_KINDS)


def request_of(config, **changes):
    request = {"config": dataclasses.asdict(ahead._decisive(config)), "chip": CHIP, "evaluates": False}
    return request | {"launchers": False, "key": ahead._key(request)} | changes


@needs_triton
@no_gpu
@pytest.mark.slow
def test_steps_find_what_was_compiled(compiles, tmp_path):
    config = make_config(write_inputs(tmp_path), tmp_path / "run", "full")
    request = request_of(config)
    assert not compiling.remembered(request["key"])
    said = []
    process = ahead.CompilingProcess(request)
    process.wait(said.append)
    process.close()
    (tmp_path / "run.toml").write_text(dump_config(config))
    assert "waiting for kernels to be compiled" in said[0]
    (line,) = launches("steps", tmp_path)
    assert line["kernels"] > 10
    assert (line["fresh"], line["failed"]) == (0, [])
    assert f"compiled {line['kernels']} kernels in " in said[1]
    assert compiling.remembered(request["key"])
    # Kernels that somebody has cleared away are compiled again.
    kernel = next(path.parent for path in (tmp_path / "cache").rglob("flash_keys.json"))
    shutil.rmtree(kernel)
    assert not compiling.remembered(request["key"])


@needs_triton
def test_what_goes_wrong_there_is_told_and_no_more(compiles, tmp_path):
    config = make_config(write_inputs(tmp_path), tmp_path / "run")
    request = request_of(config)
    shutil.rmtree(tmp_path / "model")
    said = []
    process = ahead.CompilingProcess(request)
    process.wait(said.append)
    process.close()
    assert said[-1].startswith("note: kernels were not compiled ahead, but are when steps need them: FileNotFoundError")


@needs_triton
def test_it_ends_with_the_run(compiles, tmp_path):
    request = request_of(make_config(write_inputs(tmp_path), tmp_path / "run"))
    said = []
    closed, left = (ahead.CompilingProcess(request) for _ in range(2))
    closed.wait(said.append, seconds=0)
    assert "steps compile what they still need" in said[-1]
    closed.close()
    assert closed._process.returncode == -signal.SIGKILL
    left._process.stdin.close()  # as when the run is killed
    assert left._process.wait(20) == -signal.SIGKILL


@needs_triton
def test_when_it_is_started(monkeypatch, tmp_path):
    config = make_config(write_inputs(tmp_path), tmp_path / "run")
    gpu = torch.device("cuda")
    assert ahead.compile_ahead(config, torch.device("cpu"), evaluates=True) is None
    monkeypatch.setattr(ahead, "runs_kernels", lambda _: True)
    monkeypatch.setattr(ahead, "chip", lambda _: CHIP)
    monkeypatch.setattr(ahead, "CompilingProcess", lambda request: request)
    monkeypatch.setattr(compiling, "remembered", lambda key: key == known)
    assert ahead.compile_ahead(config, gpu, evaluates=True) is None  # kernels are interpreted
    monkeypatch.setattr(ahead.triton.knobs.runtime, "interpret", False)
    known = None
    started = ahead.compile_ahead(config, gpu, evaluates=True)
    known = started["key"]
    assert ahead.compile_ahead(config, gpu, evaluates=True) is None
    moved = Path(shutil.copytree(tmp_path / "model", tmp_path / "moved"))
    alike = replace(
        config,
        model=replace(config.model, path=str(moved)),
        optim=replace(config.optim, learning_rate=1.0),
        training=replace(config.training, output_dir="elsewhere", max_steps=3),
    )
    assert ahead.compile_ahead(alike, gpu, evaluates=True) is None
    assert ahead.compile_ahead(config, gpu, evaluates=False) is not None
    other = replace(config, adapter=replace(config.adapter, r=8))
    assert ahead.compile_ahead(other, gpu, evaluates=True) is not None
    other = replace(config, memory=MemoryConfig(checkpointing="full"))
    assert ahead.compile_ahead(other, gpu, evaluates=True) is not None
    shutil.rmtree(moved)
    assert ahead.compile_ahead(alike, gpu, evaluates=True) is None  # who reads the model says that it is gone


class Stub:
    def __init__(self):
        self.calls = []

    def wait(self, show):
        self.calls.append("wait")

    def close(self):
        self.calls.append("close")


def test_a_run_waits_for_it_before_its_first_step_and_ends_it(monkeypatch, tmp_path):
    stub = Stub()
    monkeypatch.setattr(trainer, "compile_ahead", lambda *_, evaluates: stub)
    steps = trainer.train_step

    def train_step(*args, **options):
        assert stub.calls == ["wait"]
        return steps(*args, **options)

    monkeypatch.setattr(trainer, "train_step", train_step)
    config = make_config(write_inputs(tmp_path), tmp_path / "run", max_steps=3)
    trainer.train(config)
    assert stub.calls == ["wait", "close"]
    stub.calls.clear()
    missing = replace(config, model=replace(config.model, path=str(tmp_path / "missing")))
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        trainer.train(missing)
    assert stub.calls == ["close"]
