"""Two GPUs in every layout against one: NCCL, bf16, and nothing that waits for the device in a step."""

import os
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from layouts import assert_same_numbers, layout_config, train_alone, train_layout
from pool import run
from runs import make_config, write_inputs

from gapless.config_file import dump_config
from gapless.parallel.model import ParallelModel
from gapless.training.metrics import read_metrics
from gapless.training.optim import AdamW
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two NVIDIA GPUs")]

LAYOUTS = {
    "ddp": {},
    "zero-1": {"dp_shard_size": 2, "zero_stage": 1},
    "zero-2": {"dp_shard_size": 2, "zero_stage": 2},
    "zero-3": {"dp_shard_size": 2},
    "zero-3, frozen whole": {"dp_shard_size": 2, "shard_frozen": False},
    "tensor": {"tp_size": 2, "sequence_parallel": False},
    "tensor, sequence": {"tp_size": 2},
    "gpipe": {"pp_size": 2, "pp_schedule": "gpipe"},
    "1f1b": {"pp_size": 2},
    "interleaved": {"pp_size": 2, "pp_schedule": "interleaved"},
    "zero bubble": {"pp_size": 2, "pp_schedule": "zero_bubble"},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"), rows=27)
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=4, tie_word_embeddings=True)
    return folder


def config_of(inputs, kind, dtype, data_ranks, accumulation, **layout):
    rows = 8 // accumulation // data_ranks
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    return layout_config(
        inputs, kind, device="cuda", dtype=dtype, eval=(str(inputs / "eval.jsonl"),), **settings, **layout
    )


@pytest.fixture(scope="module")
def alone(inputs):
    return {
        (kind, dtype): train_alone(config_of(inputs, kind, dtype, 1, 1))
        for kind in ("full", "lora")
        for dtype in ("fp32", "bf16")
    }


def on_gpus(rank, world, configs):
    """Train each, without waiting for the device once a model has had its first step."""
    torch.cuda.set_device(rank)
    warnings.simplefilter("ignore")
    begun = weakref.WeakSet()  # not of id(): a model that is gone gives its own to a later one
    accumulate, update = ParallelModel.accumulate, AdamW.step

    def watched(model, *args):
        torch.cuda.set_sync_debug_mode("error" if model in begun else "default")
        begun.add(model)
        return accumulate(model, *args)

    def updated(*args):
        try:
            return update(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    ParallelModel.accumulate, AdamW.step = watched, updated
    try:
        results = [train_layout(rank, world, config) for config in configs]
        assert rank == 0 or not torch._C._cuda_hasPrimaryContext(0), "the other rank's GPU was touched"
        return results
    finally:
        ParallelModel.accumulate, AdamW.step = accumulate, update
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_one_gpu(inputs, alone, layout):
    settings = LAYOUTS[layout]
    data_ranks = 2 // settings.get("tp_size", 1) // settings.get("pp_size", 1)
    cases = [case for case in alone if case[0] == "lora" or "shard_frozen" not in settings]
    configs = [config_of(inputs, *case, data_ranks, 2, **settings) for case in cases]
    results = run(2, on_gpus, configs, timeout=240.0, backend="cpu:gloo,cuda:nccl")
    for index, (kind, dtype) in enumerate(cases):
        found, expected = [result[index] for result in results], alone[kind, dtype]
        if dtype == "fp32":
            assert_same_numbers(found, expected, rel=1e-4)
        for rank in found:
            assert rank["losses"] == pytest.approx(expected["losses"], rel=2e-2)
            assert rank["norms"] == pytest.approx(expected["norms"], rel=5e-2)


def test_the_command_under_torchrun(inputs, tmp_path):
    schedule = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    config = make_config(inputs, tmp_path / "out", device="cuda", dtype="bf16", **schedule)
    (tmp_path / "run.toml").write_text(dump_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gapless", "train"]
    for steps in (4, 10):
        options = ["--parallel.dp_shard_size", "2", "--training.max_steps", str(steps)]
        done = subprocess.run(
            [*command, "run.toml", *options],
            cwd=tmp_path,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
