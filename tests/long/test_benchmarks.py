"""The benchmarks start, and what of them a CPU can run does run; their numbers need a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from gapless.kernels.runtime import triton
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE
from training.runs import write_inputs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(triton is None, reason="the benchmarks need Triton")]


def run(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_cases_of_kernels():
    listed = run(BENCHMARKS / "kernels.py", "--list")
    assert listed.returncode == 0, listed.stderr
    names = listed.stdout.split()
    for kind in ("rms_norm", "rope", "qk_norm_rope", "swiglu", "adamw", "linear_ce", "lora"):
        assert any(name.startswith(kind) for name in names)


def test_steps_are_those_of_transformers(tmp_path):
    inputs = write_inputs(tmp_path)
    write_tiny_model(inputs / "model", dtype="bf16", vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    options = ["--steps", 5, "--full-steps", 5, "--max-length", 128, "--r", 4, "--device", "cpu"]
    made = run(BENCHMARKS / "smollm2_steps.py", inputs / "model", inputs / "train.jsonl", *options)
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count("two runs have the same bits: yes") == 2
