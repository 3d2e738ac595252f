"""What the child processes of test_resume.py do; imported once, by the process they are forked from."""

import json
import os
import signal
from pathlib import Path

import torch
import torch._dynamo  # loaded on the first use of some operations: once here instead of in every child
from runs import make_config

from gapless.data.loader import Loader
from gapless.training.checkpoint import no_fault
from gapless.training.trainer import Trainer


def record_rows(path: Path) -> None:
    """Have the loader note the source rows of every step it hands out."""
    plain = Loader.next_step

    def next_step(self):
        data = plain(self)
        with path.open("a") as file:
            file.write(json.dumps([data.step, data.where()]) + "\n")
        return data

    Loader.next_step = next_step


def train(inputs: Path, output: Path, kind: str, fault=no_fault) -> None:
    """What a child process does: the same command, started again."""
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(output / "stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    record_rows(output / "rows.jsonl")
    config = make_config(inputs, output, kind, eval=(str(inputs / "eval.jsonl"),), eval_steps=3)
    trainer = Trainer(config)
    trainer.fault = fault
    trainer.train()


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
