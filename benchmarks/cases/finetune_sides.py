"""Sides of a comparison of training, each in a process of its own, and what they give when they take turns."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from common import one_line

from cases.finetune_plan import Plan

SCRIPT = Path(__file__).parents[1] / "finetune_gpu.py"
SECONDS = 240.0
"""That an answer may take: a model is read, kernels compile."""
LOSS, FALL, NORM, LATER_NORM = 0.02, 0.005, 0.05, 0.2
"""How far apart sides may be: the first loss and what it has fallen later (nats), the first gradient norm and later
ones (share). On a small model in bf16 ours and transformers differ by a tenth of this."""
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


class SideError(RuntimeError):
    """A side failed."""


class NotInstalled(SideError):
    """What a side needs is not here."""


class Side:
    """A process; it imports its packages at once and does nothing on the GPU before `begin`."""

    def __init__(self, name: str, plan: Plan, label: str | None = None) -> None:
        """Start it.

        Args:
            name: a key of `finetune_worker.PACKAGES`.
            plan: what it trains.
            label: of its files and in messages; `name` by default.
        """
        self.label = label or name
        self._log = Path(plan.work, f"{self.label}.log")
        command = [sys.executable, str(SCRIPT), "--side", name, str(plan.write(self.label))]
        self._errors = self._log.open("wb")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            cwd=plan.work,  # where peers may leave files
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, _paths()))},
        )
        self._ready = False

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self) -> dict[str, Any]:
        """What its first steps gave, or its profile.

        Raises:
            NotInstalled: a package is missing.
            SideError: it failed.
        """
        if not self._ready:
            self._answer()
            self._ready = True
        self._send({"do": "begin"})
        return self._answer()

    def steps(self, count: int) -> dict[str, Any]:
        """So many timed steps."""
        self._send({"do": "steps", "count": count})
        return self._answer()

    def end(self) -> None:
        """Have it end, and its memory with it."""
        if self._process.poll() is None:
            try:
                self._send({"do": "end"})
                self._process.wait(timeout=20)
            except (SideError, OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(message) + "\n").encode())
        except BrokenPipeError:
            raise SideError(f"{self.label} ended: {self._tail()}") from None

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        if not readable:
            raise SideError(f"{self.label} has not answered for {SECONDS:.0f} s: {self._tail()}")
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.label} ended: {self._tail()}")
        answer = json.loads(line)
        if "missing" in answer:
            raise NotInstalled(answer["missing"])
        if "error" in answer:
            raise SideError(f"{self.label}: {answer['error']}\n{self._tail()}")
        return answer

    def _tail(self, lines: int = 12) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@dataclass
class Measured:
    """What a side gave."""

    losses: list[float]
    norms: list[float]
    first_step_s: float
    rates: list[float] = field(default_factory=list)
    """Tokens per second of each timed step."""
    peak_gib: float = 0.0

    @property
    def rate(self) -> float:
        """The median."""
        return median(self.rates)

    def add(self, answer: Mapping[str, Any]) -> None:
        """Take in a turn."""
        self.rates += [1e3 * tokens / time for tokens, time in zip(answer["tokens"], answer["ms"], strict=True)]
        self.peak_gib = answer["peak_gib"]


@dataclass
class Comparison:
    """All sides, ours first."""

    sides: dict[str, Measured]
    left_out: dict[str, str]
    """Peers that were not measured, and why."""

    @property
    def ours(self) -> Measured:
        """Of the plan itself."""
        return self.sides["gapless"]


def compare(
    plan: Plan, peers: Sequence[str], *, alone: Sequence[str] = (), variants: Mapping[str, Plan] | None = None
) -> Comparison:
    """Our run and its peers, in turns.

    Args:
        plan: prepared.
        peers: names; those that are not installed are left out with a line.
        alone: peers for which there is no room beside ours: they come last, when ours has ended.
        variants: other settings of ours by a label; they take turns, too.

    Raises:
        SideError: ours failed.
        AssertionError: no peer that has run agrees with ours.
    """
    variants = variants or {}
    with ExitStack() as stack:

        def start(name: str, at: Plan, label: str | None = None) -> Side:
            return stack.enter_context(Side(name, at, label))

        # Packages are imported while others train: all processes start at once.
        ours = start("gapless", plan)
        others = {label: start("gapless", at, label) for label, at in variants.items()}
        others |= {name: start(name, plan) for name in peers}
        found = Comparison({"gapless": _first(ours)}, {})
        together = [label for label in others if label not in alone]
        for label in together or [None]:
            _take_turns(plan, found, ours, None if label is None else others[label])
        ours.end()
        for label in alone:
            if label in others:
                _take_turns(plan, found, None, others[label])
    for name, why in found.left_out.items():
        print(f"{plan.name}: without {name}: {why}", flush=True)
    if not any(name in found.sides for name in peers):
        why = "; ".join(f"{name}: {why}" for name, why in found.left_out.items()) or "no peer was asked for"
        raise AssertionError(f"{plan.name}: nothing says that our steps are right: {why}")
    return found


def _first(side: Side) -> Measured:
    start = time.perf_counter()
    measured = Measured(**side.begin())
    said = ", ".join(f"{loss:.4f}" for loss in measured.losses)
    norms = ", ".join(f"{norm:.4g}" for norm in measured.norms)
    seconds = time.perf_counter() - start
    print(f"  {side.label}: losses {said}; gradient norms {norms}; {seconds:.0f} s to here", flush=True)
    return measured


def _take_turns(plan: Plan, found: Comparison, ours: Side | None, other: Side | None) -> None:
    """Ours and another, either of which may be None; another that fails is left out."""
    try:
        measured = None
        if other is not None:
            measured = _first(other)
            if why := disagreement(found.ours, measured, plan.slack):
                raise AssertionError(why)
        for _ in range(plan.turns):
            if ours is not None:
                found.ours.add(ours.steps(plan.timed))
            if other is not None and measured is not None:
                measured.add(other.steps(plan.timed))
        if other is not None and measured is not None:
            found.sides[other.label] = measured
    except (SideError, AssertionError) as error:
        if other is None or (ours is not None and str(error).startswith(ours.label)):
            raise
        found.left_out[other.label] = one_line(error)
        print(f"  {other.label} is left out: {error}", flush=True)
        if ours is not None and not found.ours.rates:
            _take_turns(plan, found, ours, None)
    finally:
        if other is not None:
            other.end()


def disagreement(ours: Measured, theirs: Measured, slack: float) -> str | None:
    """Why the first steps of two sides are not the same training, or None.

    What the loss has fallen may differ by what rounding does, and by the share `slack` of it; norms by that, too.
    """
    for step, (one, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        falls = [ours.losses[0] - one, theirs.losses[0] - other]
        close = abs(one - other) <= LOSS if step == 0 else abs(falls[0] - falls[1]) <= FALL + slack * max(*falls, 0.0)
        if not close:
            return f"the loss of step {step + 1} is {one:.4f} here and {other:.4f} there"
    for step, (one, other) in enumerate(zip(ours.norms, theirs.norms, strict=True)):
        allowed = NORM if step == 0 else max(LATER_NORM, slack)
        if not abs(one - other) <= allowed * max(one, other):
            return f"the gradient norm of step {step + 1} is {one:.4g} here and {other:.4g} there"
    return None
