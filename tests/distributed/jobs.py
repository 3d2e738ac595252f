"""Whole jobs of processes that train, started as srun starts them: what the processes do, and what a test sees.

Imported once, by the process they are forked from.
"""

import dataclasses
import os
import signal
import socket
import sys
import time
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path

import torch
from children import Record
from runs import make_config

import gapless
from gapless.config import ParallelConfig, RunConfig
from gapless.parallel.watch import CommandExit, Watch
from gapless.training import setup
from gapless.training.callbacks import Callback
from gapless.training.checkpoint import list_checkpoints
from gapless.training.trainer import Trainer

BOUND = 20.0
"""Seconds after the end of one process in which all others must have ended; on an idle machine it is one or two."""
LIMIT = 120.0
"""Seconds that a job may take in all."""


def job_config(inputs: Path, output: Path, kind: str = "lora", **settings) -> RunConfig:
    """A run of 10 steps with evaluations, its checkpoints two steps apart; keys of [parallel] beside the others."""
    parallel = {name: settings.pop(name) for name in list(settings) if name in ParallelConfig.__dataclass_fields__}
    settings = {"eval": (str(inputs / "eval.jsonl"),), "eval_steps": 3} | settings
    return dataclasses.replace(make_config(inputs, output, kind, **settings), parallel=ParallelConfig(**parallel))


class Job:
    """A job that was started.

    Attributes:
        codes: exit codes by rank, once it has ended; negative for a signal.
        lag: seconds from the end of its first process to that of the last.
    """

    def __init__(self, folder: Path, config: RunConfig, make=None, size: int = 2) -> None:
        """Start it.

        Args:
            folder: gets what the ranks say.
            config: of the run.
            make: (rank, config) -> Trainer, called in each process; of this module, for it is pickled.
            size: processes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self.codes, self.lag = folder, [], 0.0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._said = {path: path.stat().st_size for path in folder.glob("std*")}
        context = get_context("forkserver")
        arguments = [(rank, size, port, folder, config, make or plain) for rank in range(size)]
        self.processes = [context.Process(target=train, args=each, daemon=True) for each in arguments]
        for process in self.processes:
            process.start()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank, if it is still there."""
        if self.processes[rank].exitcode is None:
            os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of a process, for so many seconds at most; whether one has ended."""
        return bool(connection.wait([process.sentinel for process in self.processes], seconds))

    def finish(self) -> "Job":
        """Wait for the end of all, which must come soon after that of the first."""
        self.wait(LIMIT)
        begin = time.monotonic()
        for process in self.processes:
            process.join(max(0.1, begin + BOUND - time.monotonic()))
        self.lag = time.monotonic() - begin
        hanging = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for process in self.processes:
            process.kill()
        assert not hanging, f"ranks {hanging} did not end within {BOUND} s"
        self.codes = [process.exitcode for process in self.processes]
        return self

    def said(self, rank: int, stream: str = "stderr") -> str:
        """What a rank of this job, not of one before it in the same folder, has written."""
        path = self._folder / f"{stream}-{rank}"
        return path.read_bytes()[self._said.get(path, 0) :].decode()

    def errors(self) -> list[str]:
        """Lines on stderr of all ranks that tell of failures; torch tells of broken connections in others."""
        lines = [line for rank in range(len(self.processes)) for line in self.said(rank).splitlines()]
        return [line for line in lines if line.startswith("rank ")]


def newest(output: Path) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(output / "checkpoints")]
    return steps[-1] if steps else 0


# ---- in the processes ----


def train(rank: int, size: int, port: int, folder: Path, config: RunConfig, make) -> None:
    """What a process does: the same command, started again."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    with CommandExit():
        code = make(rank, config).train().exit_code
    sys.stdout.flush()
    sys.exit(code)


def plain(rank: int, config: RunConfig) -> Trainer:
    return Trainer(config)


class KillAt:
    """Kills a rank at a point of a save; `after` saves pass that point before."""

    def __init__(self, rank: int, point: str, after: int = 0) -> None:
        self.rank, self.point, self.left = rank, point, after

    def __call__(self, rank: int, config: RunConfig) -> Trainer:
        trainer = Trainer(config)
        if rank == self.rank:
            trainer.fault = self._pass
        return trainer

    def _pass(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def killed_when_done(rank: int, config: RunConfig) -> Trainer:
    """Rank 1 is killed as soon as it has said that it has done its part."""
    done = Watch.done

    def last_act(self):
        done(self)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        Watch.done = last_act
    return Trainer(config)


def recording(rank: int, config: RunConfig, *, folder: Path) -> Trainer:
    """Notes the points of saves in files."""
    trainer = Trainer(config)
    trainer.fault = Record(folder / f"points-{rank}")
    return trainer


class AfterStep(Callback):
    """Calls a function when the metrics of a step were read."""

    def __init__(self, step: int, function) -> None:
        self.step, self.function = step, function

    def on_step_end(self, trainer, metrics):
        if metrics["step"] == self.step:
            self.function()


def signalled(rank: int, config: RunConfig, *, on: int, number: int) -> Trainer:
    """One rank gets a signal after step 3."""
    return Trainer(config, callbacks=[AfterStep(3, partial(signal.raise_signal, number))] if rank == on else [])


def stopping(rank: int, config: RunConfig, *, on: int) -> Trainer:
    """One rank asks for the end after step 3."""

    def stop():
        trainer.stop()

    trainer = Trainer(config, callbacks=[AfterStep(3, stop)] if rank == on else [])
    return trainer


def raise_key_error():
    raise KeyError("a mistake of the script")


def callback_raising(rank: int, config: RunConfig, *, on: int) -> Trainer:
    return Trainer(config, callbacks=[AfterStep(3, raise_key_error)] if rank == on else [])


class Loss:
    """Cross-entropy, until it is called for the n-th time on one of the ranks."""

    def __init__(self, rank: int, config: RunConfig, *, on: int, step: int, raises: bool) -> None:
        self.calls = (step - 1) * config.training.gradient_accumulation_steps if rank == on else None
        self.raises = raises

    def __call__(self, logits, labels):
        if torch.is_grad_enabled() and self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                if self.raises:
                    raise_key_error()
                return (logits * float("inf")).abs().sum()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def loss_failing(rank: int, config: RunConfig, *, on: int, raises: bool) -> Trainer:
    """A loss of the script's own that in step 3 raises or is infinite, on one rank."""
    return Trainer(config, loss_fn=Loss(rank, config, on=on, step=3, raises=raises))


def differing(rank: int, config: RunConfig, *, what: str, folder: Path) -> Trainer:
    """Rank 1 has another seed, version, setting, or content of the model folder."""
    os.chdir(folder / f"node-{rank}")  # with a folder `model`
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path="model"))
    if rank == 1 and what == "version":
        gapless.__version__ = "0.0.0"
    if rank == 1 and what == "seed":
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=43))
    if rank == 1 and what == "setting":
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, weight_decay=0.5))
    return Trainer(config)


def slow_to_tokenise(rank: int, config: RunConfig, *, seconds: float) -> Trainer:
    """Rank 0 tokenises for so long."""
    tokenize = setup.tokenize

    def slow(*args, **settings):
        time.sleep(seconds)
        return tokenize(*args, **settings)

    if rank == 0:
        setup.tokenize = slow
    return Trainer(config)
