"""The main job on an NVIDIA GPU: the same code as on a CPU, with pinned batches and no copy to the host in a step."""

import os
import signal
import warnings
from contextlib import contextmanager

import pytest
import torch

import gapless
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import list_checkpoints
from gapless.training.graph import CudaRecorder
from gapless.training.metrics import read_metrics
from gapless.training.trainer import Trainer
from training.runs import assert_same_outcome, make_config, outcome, write_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def losses(output):
    return [line["loss"] for line in read_metrics(output / "metrics.jsonl") if "loss" in line]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_losses_are_those_of_a_cpu(inputs, tmp_path, kind):
    runs = {}
    for device in ("cpu", "cuda"):
        config = make_config(inputs, tmp_path / device, kind, device=device, dtype="fp32")
        gapless.train(config)
        runs[device] = losses(tmp_path / device)
    assert runs["cuda"] == pytest.approx(runs["cpu"], rel=2e-3)  # ten steps; tf32 is off


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_runs_have_the_same_bits(inputs, tmp_path, kind):
    for name in ("first", "second"):
        gapless.train(make_config(inputs, tmp_path / name, kind, device="cuda", dtype="bf16"))
    assert_same_outcome(outcome(tmp_path / "first"), outcome(tmp_path / "second"))


def test_a_stopped_run_goes_on_with_the_same_bits(inputs, tmp_path):
    class StopAtFive(Callback):
        def on_step_end(self, trainer, metrics):
            if metrics["step"] == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    config = make_config(inputs, tmp_path / "whole", device="cuda", dtype="bf16")
    gapless.train(config)
    config = make_config(inputs, tmp_path / "stopped", device="cuda", dtype="bf16")
    assert not Trainer(config, callbacks=[StopAtFive()]).train().finished
    assert list_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert gapless.train(config).finished
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_generation_is_that_of_a_cpu(inputs):
    answers = {}
    for device in ("cpu", "cuda"):
        model, tokenizer = gapless.load_model(inputs / "model", dtype="fp32", device=device)
        prompts = [
            tokenizer.chat_ids([{"role": "user", "content": text}]) for text in ("a lazy dog", "rain", "fox " * 9)
        ]
        answers[device] = [answer.tokens for answer in gapless.generate(model, tokenizer, prompts, max_new_tokens=12)]
    assert answers["cuda"] == answers["cpu"]


@contextmanager
def sync_debug(mode):
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_reads_nothing_back(inputs, tmp_path, monkeypatch, kind, graphs):
    """From the batch's arrival to the optimizer's end, nothing waits for the device; to record a graph does, once."""
    launch, record, steps = Trainer._launch, CudaRecorder.record, []

    def watched(*args, **settings):
        with sync_debug("error"):
            steps.append(launch(*args, **settings))
        return steps[-1]

    def recorded(*args):
        with sync_debug("default"):
            return record(*args)

    monkeypatch.setattr(Trainer, "_launch", watched)
    monkeypatch.setattr(CudaRecorder, "record", recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gapless.train(make_config(inputs, tmp_path / "run", kind, device="cuda", dtype="bf16", cuda_graphs=graphs))
    assert len(steps) == 10
