"""The logs of a run folder: metrics.jsonl first, then what repeats it (TensorBoard, wandb, the plot)."""

from __future__ import annotations

import dataclasses
import importlib
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gapless.config import RunConfig
from gapless.training import files
from gapless.training.metrics import Metrics, MetricsLog
from gapless.training.plot import loss_plot
from gapless.training.tensorboard import EventWriter


def check_loggers(config: RunConfig) -> None:
    """Refuse loggers that are not there.

    Raises:
        ValueError: wandb is asked for and not installed.
    """
    if "wandb" in config.logging.report_to:
        _import_wandb()


class RunLog:
    """Writes each line of metrics to every place that the run file asks for."""

    def __init__(self, config: RunConfig, *, after_step: int | None = None, wandb_id: str | None = None) -> None:
        """Open the logs of a run that starts, or that goes on after a step.

        Raises:
            ValueError: a file cannot be written, or wandb is asked for and not installed.
        """
        self._folder = Path(config.training.output_dir)
        self._opened = ExitStack()
        self._events = self._wandb = None
        # First, so that a run that is refused leaves the logs as they were.
        if "wandb" in config.logging.report_to:
            self._wandb = _open_wandb(config, wandb_id)
            self._opened.callback(self._wandb.finish)
        with files.writing(self._folder):
            log = MetricsLog(self._folder / "metrics.jsonl", after_step=after_step)
            self._metrics = self._opened.enter_context(closing(log))
            if "tensorboard" in config.logging.report_to:
                first_step = 0 if after_step is None else after_step + 1
                events = EventWriter(self._folder / "tensorboard", first_step=first_step)
                self._events = self._opened.enter_context(closing(events))

    @property
    def wandb_id(self) -> str | None:
        """What a resumed run needs to go on in the same place."""
        return self._wandb.id if self._wandb else None

    def write(self, metrics: Metrics) -> None:
        """Write a training or an evaluation line.

        Raises:
            ValueError: the disk is full.
        """
        step = int(metrics["step"])
        values = {_tag(name): value for name, value in metrics.items() if name != "step"}
        with files.writing(self._folder / "metrics.jsonl"):
            self._metrics.write(metrics)
        if self._events:
            with files.writing(self._folder / "tensorboard"):
                self._events.scalars(step, values)
        if self._wandb:
            self._wandb.log(values, step=step)

    def sync(self) -> None:
        """Make the lines of metrics.jsonl durable; called before the checkpoint that counts on them is published.

        Raises:
            ValueError: the disk is full.
        """
        with files.writing(self._folder / "metrics.jsonl"):
            self._metrics.sync()

    def evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` is in the log."""
        return any(line["step"] == step and "eval_loss" in line for line in reversed(self._metrics.lines))

    def draw(self) -> None:
        """Write loss.svg."""
        path = self._folder / "loss.svg"
        with files.writing(path):
            files.write_text(path, loss_plot(self._metrics.lines, self._folder.resolve().name))

    def close(self) -> None:
        """Close all.

        Raises:
            ValueError: the disk is full.
        """
        with files.writing(self._folder):
            self._opened.close()


class NoLog(RunLog):
    """What ranks have that leave the logs to rank 0."""

    def __init__(self) -> None:
        """Open nothing."""
        self._wandb = None

    def write(self, metrics: Metrics) -> None:
        """Nothing to do."""

    def sync(self) -> None:
        """Nothing to do."""

    def evaluated(self, step: int) -> bool:
        """Nothing is known here."""
        return False

    def draw(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def _tag(name: str) -> str:
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ValueError(
            'logging.report_to names "wandb", which is not installed; pip install "gapless[wandb]" or leave it out'
        ) from error


def _open_wandb(config: RunConfig, run_id: str | None) -> Any:
    return _import_wandb().init(
        project="gapless",
        name=Path(config.training.output_dir).resolve().name,
        dir=config.training.output_dir,
        config=dataclasses.asdict(config),
        id=run_id,
        resume="allow" if run_id else None,
    )
