"""One side of a comparison of training, in a process of its own: our run, or a peer's, step by step as it is told.

The process that compares sends a line of JSON, this one answers with one: first that it is ready (its packages are
imported), then after "begin" the losses and gradient norms of the first steps, then after "steps" the milliseconds and
tokens of so many steps. Our side is a run of the trainer: a callback holds it between turns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from common import FAILURES, Stopwatch, one_line

from cases.finetune_plan import TARGETS, Plan, R, batches, peer_model, run_config
from gapless.adapters.peft import WEIGHTS_FILE, save_adapter
from gapless.batch import PackedBatch
from gapless.inference.load import DTYPES
from gapless.training.callbacks import Callback
from gapless.training.trainer import Trainer

LEAD = 2
"""First steps of a turn that do not count: the GPU was given nothing before, or another side's."""
PACKAGES = {
    "gapless": (),
    "profile": ("gapless.profiling.report",),
    "hf": ("transformers", "peft"),
    "hf-liger": ("transformers", "peft", "liger_kernel.transformers"),
    "unsloth": ("unsloth", "transformers", "peft"),
}
"""What each side imports, in this order."""
PROFILED = {"steps": 4, "before": 24}
"""Steps that are recorded, and those that warm up: packed rows bring graphs that are new for some time."""


class Channel(Protocol):
    """To the process that compares."""

    def send(self, message: dict[str, Any]) -> None:
        """Answer."""
        ...

    def receive(self) -> dict[str, Any]:
        """What to do next."""
        ...


class Lines:
    """Lines of JSON on the standard streams. What is printed here goes to standard error."""

    def __init__(self) -> None:
        """Take standard output away from everybody else, what is not Python included."""
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: dict[str, Any]) -> None:
        """See `Channel`."""
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()

    def receive(self) -> dict[str, Any]:
        """See `Channel`; the end if nobody is there any more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "end"}


class Enough(Exception):
    """The run has served its purpose."""


def work(side: str, plan: Plan, channel: Channel) -> None:
    """Be a side until told to end."""
    try:
        for package in PACKAGES[side]:
            importlib.import_module(package)
    except FAILURES as error:
        channel.send({"missing": one_line(error)})
        return
    channel.send({"ready": True})
    if channel.receive()["do"] == "end":
        return
    try:
        if side == "gapless":
            our_run(plan, channel)
        elif side == "profile":
            our_profile(plan, channel)
        else:
            Peer(side, plan, channel).run()
    except FAILURES as error:
        traceback.print_exc()
        channel.send({"error": one_line(error)})


def peak_gib(device: str) -> float:
    """Of the GPU's allocator."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


# ---- ours ----


class Turns(Callback):
    """Holds a run between turns. `on_step_end` of a step comes when the next one was launched: that is marked."""

    def __init__(self, plan: Plan, channel: Channel, tokens: list[int]) -> None:
        """Args: `tokens` of every step, padding left out."""
        self._plan, self._channel, self._tokens = plan, channel, tokens
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._marked: list[int] = []
        self._watch = Stopwatch(plan.device)
        self._wanted = 0

    def on_train_begin(self, trainer) -> None:
        """Keep the adapter that all start from."""
        if self._plan.lora:
            save_adapter(trainer.model, trainer.config.adapter, self._plan.adapter, self._plan.model)
        if self._plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def on_step_end(self, trainer, metrics) -> None:
        """Count and mark."""
        if len(self._losses) < self._plan.checked:
            if not self._losses:
                self._first = time.perf_counter() - self._begun
            self._losses.append(metrics["loss"])
            self._norms.append(metrics["grad_norm"])
            if len(self._losses) == self._plan.checked:
                found = {"losses": self._losses, "norms": self._norms, "first_step_s": self._first}
                self._answer(found)
            return
        self._watch.point()
        self._marked.append(metrics["step"])  # counted from 1: the tokens of the next are at this index
        if len(self._watch) == self._wanted:
            count = self._wanted - LEAD
            times = self._watch.read()[-count:]
            tokens = [self._tokens[step] for step in self._marked[-count:]]
            self._answer({"ms": times, "tokens": tokens, "peak_gib": peak_gib(self._plan.device)})

    def _answer(self, found: dict[str, Any]) -> None:
        if self._plan.device == "cuda":
            torch.cuda.synchronize()
        self._channel.send(found)
        message = self._channel.receive()
        if message["do"] == "end":
            raise Enough
        self._marked.clear()
        self._wanted = LEAD + message["count"]


def our_run(plan: Plan, channel: Channel) -> None:
    """The trainer's own loop."""
    tokens = [batch.num_tokens for batch in batches(plan)]
    with contextlib.suppress(Enough):
        Trainer(run_config(plan), callbacks=[Turns(plan, channel, tokens)]).train()


def our_profile(plan: Plan, channel: Channel) -> None:
    """GPU busy by `gapless profile`."""
    profile = importlib.import_module("gapless.profiling.report").profile
    config = run_config(plan)
    report = profile(config, Path(plan.work, "profile"), **PROFILED)
    gpu = report["gpu"]
    if gpu is None:
        raise RuntimeError("nothing of a GPU was recorded")
    if recorded := report["steps"]["graphs_recorded"]:
        raise RuntimeError(f"{recorded} graphs were recorded in the measured steps, which takes time")
    channel.send({"busy": gpu["busy_percent"], "plain": gpu["busy_percent_of_plain_steps"], "gaps": _gaps(gpu)})


def _gaps(gpu: dict[str, Any]) -> float:
    """Longer than 5 us, in ms a step."""
    return sum(cause["ms"] for cause in gpu["causes"]) / len(gpu["steps"])


# ---- peers ----


class Peer:
    """transformers with PEFT, with or without Liger's kernels, or Unsloth; torch's fused AdamW."""

    def __init__(self, side: str, plan: Plan, channel: Channel) -> None:
        """Build the model and put the batches on the host where copies do not block."""
        self._plan, self._channel = plan, channel
        planned = batches(plan)
        self._rows = [self._pinned(as_rows(batch, plan)) for batch in planned]
        self._tokens = [batch.num_tokens for batch in planned]
        self._model = _BUILD[side](plan).train()
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        fused = plan.device == "cuda"
        self._optimizer = torch.optim.AdamW(self._trained, lr=plan.learning_rate, weight_decay=0.0, fused=fused)
        self._next = 0

    def run(self) -> None:
        """The first steps, then turns until told to end."""
        plan, watch = self._plan, Stopwatch(self._plan.device)
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        found, first = [self._step(checked=True)], time.perf_counter() - begun
        found += [self._step(checked=True) for _ in range(plan.checked - 1)]
        losses, norms = zip(*filter(None, found), strict=True)
        self._channel.send({"losses": losses, "norms": norms, "first_step_s": first})
        while (message := self._channel.receive())["do"] != "end":
            count = message["count"]
            for _ in range(LEAD + count):
                self._step()
                watch.point()
            tokens = self._tokens[self._next - count : self._next]
            times = watch.read()[-count:]
            self._channel.send({"ms": times, "tokens": tokens, "peak_gib": peak_gib(plan.device)})

    def _step(self, *, checked: bool = False) -> tuple[float, float] | None:
        """A step; its loss and the norm of its gradient, for which the host waits, where they are looked at."""
        tokens, labels = (rows.to(self._plan.device, non_blocking=True) for rows in self._rows[self._next])
        self._next += 1
        loss = self._model(input_ids=tokens, labels=labels).loss
        loss.backward()
        found = None
        if checked:
            norms = [parameter.grad.float().norm() for parameter in self._trained if parameter.grad is not None]
            found = float(loss.detach()), float(torch.stack(norms).norm())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def _pinned(self, rows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(part.pin_memory() for part in rows) if self._plan.device == "cuda" else rows


def as_rows(batch: PackedBatch, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels int64 [rows, row_tokens], padded on the right, which a causal model needs no mask for.

    Labels are the tokens themselves: models shift them. Rows of many documents are one to a peer, which is the
    fastest that it can do with them; else each document has a row.
    """
    spans = list(zip(batch.segments.starts, batch.segments.lengths, strict=True))
    if plan.packed:
        assert plan.rows == 1, "a packed row for peers is the whole batch"
        spans = [(0, sum(length for _, length in spans))]
    tokens = torch.zeros(plan.rows, plan.row_tokens, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, (start, length) in enumerate(spans):
        tokens[row, :length] = batch.tokens[start : start + length]
        labels[row, :length] = tokens[row, :length]
    return tokens, labels


def build_transformers(plan: Plan) -> torch.nn.Module:
    """transformers, with PEFT where adapters are trained."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plan.model, dtype=DTYPES[plan.dtype], attn_implementation="sdpa")
    model = model.to(plan.device)
    model.config.use_cache = False
    if plan.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not plan.lora:
        return model
    from peft import PeftModel

    if plan.recompute:
        model.enable_input_require_grads()
    # Its default is adapters of float32, whose products are of float32 too where nothing casts them back.
    return PeftModel.from_pretrained(model, plan.adapter, is_trainable=True, autocast_adapter_dtype=False)


def build_liger(plan: Plan) -> torch.nn.Module:
    """The same on Liger's kernels."""
    patches = importlib.import_module("liger_kernel.transformers")
    getattr(patches, f"apply_liger_kernel_to_{plan.shape['model_type']}")()
    return build_transformers(plan)


def build_unsloth(plan: Plan) -> torch.nn.Module:
    """Unsloth's FastLanguageModel, the adapter put in place of its own."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    fast = importlib.import_module("unsloth").FastLanguageModel
    model, _ = fast.from_pretrained(
        str(peer_model(plan)), max_seq_length=plan.row_tokens, load_in_4bit=False, dtype=DTYPES[plan.dtype]
    )
    model = fast.get_peft_model(
        model,
        r=R,
        target_modules=list(TARGETS),
        lora_alpha=R,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth" if plan.recompute else False,
    )
    result = set_peft_model_state_dict(model, load_file(plan.adapter / WEIGHTS_FILE))
    if result.unexpected_keys:
        raise ValueError(f"the adapter does not fit: {result.unexpected_keys[:3]}")
    fast.for_training(model, use_gradient_checkpointing=plan.recompute)  # by default it would turn it on again
    return model


_BUILD: dict[str, Callable[[Plan], torch.nn.Module]] = {
    "hf": build_transformers,
    "hf-liger": build_liger,
    "unsloth": build_unsloth,
}
