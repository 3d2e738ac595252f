"""The kernels of a run are compiled by a process beside it, while its rows and weights are read.

Which kernels a run launches follows from its settings, and how Triton specialises them from shapes and addresses. So
that process goes through training steps, and evaluations, of the run's own model and batch sizes: the same code, on the
meta device. All it leaves behind is in Triton's cache on disk, where the run's first step finds it. What is not there,
because it could not be compiled or belongs to a piece of a layer that is cut over ranks, the step compiles itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.adapters.lora import apply_lora, lora_layers, unchanged
from gapless.batch import BatchLayout, Document, PackedBatch, build_batch
from gapless.config import (
    AdapterConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainingConfig,
)
from gapless.data.loader import TrainStep
from gapless.inference.load import DTYPES
from gapless.kernels import compiling
from gapless.kernels.runtime import Chip, chip, runs_kernels, triton
from gapless.memory.checkpointing import apply_checkpointing
from gapless.models.weights import meta_decoder
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.training import setup
from gapless.training.optim import AdamW
from gapless.training.start import source_digest
from gapless.training.step import train_step

_MOST_THREADS = 8
"""The longest kernel takes a fifth of all: more threads would only wait for it."""
_LONGEST = 120.0
"""Seconds after which the run goes on without."""
_SHORT = 16
"""Tokens of a short document."""
_COMMAND = "import sys; sys.path[:] = sys.argv[1:]; from gapless.training.compile_ahead import main; main()"


# ---- in the run's process ----


def compile_ahead(config: RunConfig, device: torch.device, *, evaluates: bool) -> CompilingProcess | None:
    """Start to compile a run's kernels; None where none run, or where all are known to be in the cache.

    Args:
        config: the run.
        device: of the run.
        evaluates: whether it has rows to evaluate on.
    """
    if device.type != "cuda" or not runs_kernels(device) or triton.knobs.runtime.interpret:
        return None
    if not sys.executable:  # Python is a part of some other program
        return None
    request = {
        "config": dataclasses.asdict(_decisive(config)),
        "chip": chip(device),
        "evaluates": evaluates,
        "launchers": True,
    }
    try:
        key = _key(request)
        return None if compiling.remembered(key) else CompilingProcess(request | {"key": key})
    except OSError:  # of the model, the cache or the interpreter: whoever needs it will tell
        return None


def _decisive(config: RunConfig) -> RunConfig:
    """The settings that kernels follow from; all others at their defaults."""
    data, training, optim = config.data, config.training, config.optim
    return RunConfig(
        model=ModelConfig(path=config.model.path, dtype=config.model.dtype),
        data=DataConfig(train=(), max_length=data.max_length, packing=data.packing, max_documents=data.max_documents),
        training=TrainingConfig(
            output_dir="",
            per_device_train_batch_size=training.per_device_train_batch_size,
            per_device_eval_batch_size=training.per_device_eval_batch_size,
            deterministic=training.deterministic,
        ),
        adapter=config.adapter,
        memory=config.memory,
        optim=OptimConfig(
            optim=optim.optim,
            adam_beta1=optim.adam_beta1,
            adam_beta2=optim.adam_beta2,
            pure_bf16=optim.pure_bf16,
        ),
    )


def _key(request: dict[str, Any]) -> str:
    """A digest of what the kernels follow from. The model's folder counts by what its config says."""
    config = request["config"]
    described = Path(config["model"]["path"], "config.json").read_bytes()
    placeless = request | {"config": config | {"model": {"dtype": config["model"]["dtype"]}}}
    facts = json.dumps([placeless, source_digest(), triton.__version__], sort_keys=True)
    return hashlib.sha256(facts.encode() + described).hexdigest()


class CompilingProcess:
    """The process that compiles. It ends with the run's, however that ends."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Start it, in a session of its own: what a terminal sends is the run's business.

        Raises:
            OSError: it cannot be started.
        """
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # a context would take memory of the GPU
            start_new_session=True,
        )
        with contextlib.suppress(BrokenPipeError):  # it has ended; `wait` tells why
            self._send(request)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # Kept open: its end tells the process that this one is gone.
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def wait(self, show: Callable[[str], None], seconds: float = _LONGEST) -> None:
        """Wait until all is compiled; `show` hears of it.

        Args:
            show: takes a line.
            seconds: to wait for at most.
        """
        if self._process.poll() is None:
            show("waiting for kernels to be compiled")
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            show(f"note: kernels are not compiled after {seconds:g} s more; steps compile what they still need")
            return
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        if self._process.returncode or not lines:
            self._errors.seek(0)
            why = self._errors.read().strip().rpartition("\n")[2] or f"exit code {self._process.returncode}"
            show(f"note: kernels were not compiled ahead, but are when steps need them: {why}")
            return
        self._report(json.loads(lines[-1]), show)

    @staticmethod
    def _report(found: dict[str, Any], show: Callable[[str], None]) -> None:
        if found["fresh"]:
            s = "" if found["fresh"] == 1 else "s"
            show(f"compiled {found['fresh']} kernel{s} in {found['seconds']:.1f} s while the run was prepared")
        if found["failed"]:
            show(f"note: {len(found['failed'])} kernels do not compile ahead: {found['failed'][0]}")

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the tools that it runs
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            file.close()


# ---- in the process beside it ----


def main() -> None:
    """Read a request from stdin, compile, write what became of it to stdout; end when stdin does."""
    began = time.perf_counter()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    found = compile_request(request)
    if not found.failed:
        compiling.remember(request["key"], found.files)
    seconds = time.perf_counter() - began
    print(json.dumps({"fresh": found.fresh, "failed": found.failed, "seconds": seconds}), flush=True)
    os._exit(0)  # nothing is left to put in order, which would take its time


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def compile_request(request: dict[str, Any]) -> compiling.Compiled:
    """Compile the kernels of a request of `compile_ahead`, for a chip that need not be here."""
    config = _read_config(request["config"])
    return compiling.compile_kernels(
        lambda: go_through(config, evaluates=request["evaluates"]),
        Chip(*request["chip"]),
        threads=min(len(os.sched_getaffinity(0)), _MOST_THREADS),
        launchers=request["launchers"],
    )


def _read_config(tables: dict[str, Any]) -> RunConfig:
    """A config of JSON, in which tuples have become lists."""
    sections: dict[str, Any] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig}
    sections |= {"adapter": AdapterConfig, "memory": MemoryConfig, "optim": OptimConfig}
    made = {}
    for name, section in sections.items():
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in tables[name].items()}
        made[name] = section(**values)
    return RunConfig(**made)


def go_through(config: RunConfig, *, evaluates: bool) -> None:
    """Training steps, and evaluations, of a run's model on the meta device, as one process alone has them."""
    model = meta_decoder(config.model.path, dtype=DTYPES[config.model.dtype], max_length=config.data.max_length)
    model.train()
    if config.adapter.type == "lora":
        apply_lora(model, config.adapter, seed=config.training.seed)
    apply_checkpointing(model, config.memory.checkpointing)
    model.rotary_frequencies = model.rotary_frequencies.to("meta")
    parallel = ParallelModel([model], Mesh.single(), config.parallel)
    optimizer = AdamW(setup.trained_views(config, model), config.optim, "meta")
    rows = config.training.per_device_train_batch_size
    with setup.determinism(config.training.deterministic), closing(parallel), closing(optimizer):
        parallel.bind(optimizer.buffers())
        for batch in _batches(setup.build_layout(config, model, rows)):
            with unchanged(*lora_layers(model)):
                train_step(parallel, optimizer, _step(batch))
        if evaluates:
            rows = config.training.per_device_eval_batch_size or rows
            parallel.modes(training=False)
            for batch in _batches(setup.build_layout(config, model, rows)):
                with unchanged(*lora_layers(model)):
                    parallel.loss_sum([batch])


def _step(batch: PackedBatch) -> TrainStep:
    none: Any = None  # the rows, which are for messages
    return TrainStep([batch], batch.num_trained, step=0, epoch=0.0, store=none, documents=none)


def _batches(layout: BatchLayout) -> Iterator[PackedBatch]:
    """Batches between which kernels are chosen: of documents as long, and as short, as may be."""
    short = max(2, min(_SHORT, layout.row_tokens // layout.row_documents))
    for length in (layout.row_tokens, short):
        document = Document(np.zeros(length, dtype=np.int32), np.full(length, True))
        row = [document] * min(layout.row_documents, layout.row_tokens // length)
        yield build_batch(layout, [row] * layout.rows).to("meta")
