"""Hooks into a run, and what they get to see of it."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gapless.config import RunConfig
from gapless.data.tokenizer import Tokenizer
from gapless.models.decoder import Decoder
from gapless.training.metrics import Metrics


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    """Optimizer steps finished, those before a resume included."""
    finished: bool
    """Whether all steps are done; if not, the same command goes on."""
    train_loss: float | None
    """Mean loss of all trained tokens of the run, each at its step; None if there was none."""
    eval_loss: float | None
    """Of the last evaluation."""
    output_dir: Path
    """The run folder."""
    result_dir: Path | None
    """The adapter or the model; None if a signal stopped the run."""
    stopped_by: str | None
    """Name of the signal that stopped the run: SIGINT (Ctrl-C), SIGTERM or SIGHUP (closed terminal)."""

    rank: int = 0
    """Of the process; of a job's many ranks 0 is the main one."""

    @property
    def exit_code(self) -> int:
        """0, or as shells count a process that a signal ended: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + signal.Signals[self.stopped_by] if self.stopped_by else 0


class Run(Protocol):
    """What a callback may use of the trainer."""

    config: RunConfig
    model: Decoder
    """In a job of many ranks what this one has: a shard or piece of every layer, or some of the layers."""
    tokenizer: Tokenizer
    rank: int
    """Of this process; 0 is the main one."""
    step: int
    """Optimizer steps launched."""
    total_steps: int

    def stop(self) -> None:
        """End the run after the current step; of many ranks, up to two steps later."""


class Callback:
    """Override what you need.

    Metrics are read one step late, so that the device never waits: `on_step_end` may find `trainer.step` one ahead of
    `metrics["step"]`. In a job of many ranks all of them call the same methods at the same steps (`on_save` perhaps at
    others where training.async_save is on).
    """

    def on_train_begin(self, trainer: Run) -> None:
        """Model, data and optimizer are ready; a resumed run stands at its step."""

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        """The metrics of a step (see `gapless.training.metrics`) were read."""

    def on_evaluate(self, trainer: Run, metrics: Metrics) -> None:
        """An evaluation is done: step and eval_loss."""

    def on_save(self, trainer: Run, folder: Path) -> None:
        """A checkpoint is on the disk."""

    def on_train_end(self, trainer: Run, result: TrainResult) -> None:
        """The run is over and its result written; not called when a signal stopped it."""


def check_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks of a list.

    Raises:
        ValueError: not a list of `Callback` objects.
    """
    if not isinstance(callbacks, Iterable):
        raise ValueError(f"callbacks must be a list, not {type(callbacks).__name__}; write callbacks=[...]")
    checked = tuple(callbacks)
    for callback in checked:
        if not isinstance(callback, Callback):
            raise ValueError(
                f"{callback!r} is no callback; it must be an object of a class derived from "
                "gapless.training.callbacks.Callback"
            )
    return checked
