"""The command line as torchrun starts it: trained, killed, resumed, exported, and loaded by transformers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from jobs import BOUND, newest
from pool import run
from runs import assert_same_outcome, outcome, write_inputs
from transformers import AutoModelForCausalLM

from gapless import cli
from gapless.batch import segments
from gapless.checkpoint_file import open_checkpoint
from gapless.config_file import load_config
from gapless.inference.load import load_model
from gapless.training.metrics import read_metrics
from gapless.training.trainer import Trainer

STEPS, SAVE_STEPS = 24, 4
RUN_FILE = f"""
[model]
path = "inputs/model"
dtype = "fp32"
device = "cpu"

[data]
train = ["inputs/train.jsonl"]
max_length = 128

[optim]
learning_rate = 1e-2

[training]
output_dir = "run"
max_steps = {STEPS}
gradient_accumulation_steps = 4
save_steps = {SAVE_STEPS}
"""
LORA_FSDP = "[adapter]\nr = 4\n\n[parallel]\ndp_shard_size = 2\n"
FULL_TENSOR = '[adapter]\ntype = "none"\n\n[parallel]\ntp_size = 2\n'
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gapless", "train", "run.toml"]


@pytest.fixture
def folder(tmp_path):
    write_inputs(tmp_path / "inputs")
    return tmp_path


def start(folder: Path, *command: str, **variables: object) -> subprocess.Popen:
    """Start Python with a command; what it says goes into files."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()}
    with (folder / "stdout").open("a") as out, (folder / "stderr").open("a") as err:
        return subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=out, stderr=err)


def worker(launcher: int, rank: int) -> int:
    """The process number of a rank."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    raise AssertionError(f"no rank {rank}")


def kill_in_the_middle(folder: Path, rank: int) -> None:
    """Train under torchrun until there is a checkpoint, then kill a rank."""
    launcher = start(folder, *TORCHRUN)
    while not newest(folder / "run"):
        assert launcher.poll() is None, (folder / "stderr").read_text()
        time.sleep(0.02)
    number = worker(launcher.pid, rank)
    os.kill(number, signal.SIGKILL)
    begin = time.monotonic()
    assert launcher.wait(BOUND) != 0
    print(f"torchrun ended {time.monotonic() - begin:.1f} s after the kill")
    text = f"rank {1 - rank}: stopped because rank {rank} failed: "
    said = [line for line in (folder / "stderr").read_text().splitlines() if line.startswith("rank ")]
    # torchrun ends the other process too, perhaps before it has told.
    assert len(said) <= 1
    assert all(line.startswith(text) for line in said)
    assert 0 < newest(folder / "run") < STEPS
    assert not {"adapter", "model"} & {path.name for path in (folder / "run").iterdir()}
    assert_shown_once(folder, events=1)


def assert_shown_once(folder: Path, events: int) -> None:
    """There is one display and one log of metrics, and a log of each rank."""
    lines = [line for line in (folder / "stdout").read_text().splitlines() if line.startswith("step ")]
    shown = [int(re.match(r"step (\d+)/", line)[1]) for line in lines]
    logged = [line["step"] for line in read_metrics(folder / "run" / "metrics.jsonl")]
    assert len(logged) == len(set(logged))
    # What was trained again after the last checkpoint is shown again, once.
    assert max(Counter(shown).values()) <= events
    assert sorted(set(shown)) == logged == list(range(1, len(logged) + 1))
    assert len(list((folder / "run" / "tensorboard").iterdir())) == events
    logs = sorted(path.name for path in (folder / "run" / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]


def train_in_pool(rank, size, run_file, output):
    config = load_config(str(run_file), ["--training.output_dir", str(output)])
    Trainer(config).train()


@pytest.mark.slow
def test_profile(folder):
    """Each rank writes files of its own, rank 0 shows its tables; one step, after which ranks go on for some more."""
    (folder / "run.toml").write_text(RUN_FILE + LORA_FSDP)
    command = [*TORCHRUN[:-2], "profile", "run.toml", "--steps", "1", "--before", "1"]
    assert start(folder, *command).wait(60) == 0, (folder / "stderr").read_text()
    assert not (folder / "run").exists()
    kinds = [("report", "json"), ("timeline", "html"), ("trace-measured", "json.gz"), ("trace-traced", "json.gz")]
    names = {f"{name}-rank{rank}.{end}" for name, end in kinds for rank in range(2)}
    assert {path.name for path in (folder / "run-profile").iterdir()} == {"tokens"} | names
    for rank in range(2):
        report = json.loads((folder / "run-profile" / f"report-rank{rank}.json").read_text())
        assert (report["rank"], report["steps"]["recorded"], report["steps"]["micro_batches"]) == (rank, 1, [4])
    assert (folder / "stdout").read_text().count("Operations on the host") == 1


@torch.no_grad()
def assert_loads(merged: Path, run_folder: Path) -> None:
    tokens = torch.randint(0, 100, (20,), generator=torch.Generator().manual_seed(0))
    model, _ = load_model(run_folder, dtype="fp32", device="cpu")
    ours = model.logits(model(tokens.int(), segments([len(tokens)])))
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(tokens[None]).logits[0]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "rank"), [(LORA_FSDP, 1), pytest.param(FULL_TENSOR, 0, marks=pytest.mark.slow)], ids=["lora", "full"]
)
def test_train_kill_resume_export(folder, layout, rank):
    (folder / "run.toml").write_text(RUN_FILE + layout)
    kill_in_the_middle(folder, rank)
    assert start(folder, *TORCHRUN).wait(60) == 0, (folder / "stderr").read_text()
    assert newest(folder / "run") == STEPS
    assert "going on from" in (folder / "stdout").read_text()
    assert_shown_once(folder, events=2)
    checkpoint = folder / "run" / "checkpoints" / f"step-{STEPS:06d}"
    assert {path.name[:5] for path in checkpoint.glob("*.safetensors")} == {"rank0", "rank1"}
    open_checkpoint(checkpoint)
    run(2, train_in_pool, folder / "run.toml", folder / "straight")
    assert_same_outcome(outcome(folder / "run", STEPS), outcome(folder / "straight", STEPS))
    assert cli.main(["export", str(folder / "run"), "--to", "merged", "--out", str(folder / "merged")]) == 0
    assert_loads(folder / "merged", folder / "run")


def test_processes_that_srun_starts(folder):
    (folder / "run.toml").write_text(RUN_FILE + LORA_FSDP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = ["-m", "gapless", "train", "run.toml", "--training.max_steps", "2"]
    processes = [start(folder, *command, RANK=rank, LOCAL_RANK=rank, **place) for rank in (0, 1)]
    assert [process.wait(60) for process in processes] == [0, 0], (folder / "stderr").read_text()
    assert_shown_once(folder, events=1)
    index = json.loads((folder / "run" / "checkpoints" / "step-000002" / "index.json").read_text())
    assert {name[:5] for name in index["files"]} == {"rank0", "rank1", "state"}
