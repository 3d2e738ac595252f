"""metrics.jsonl: one JSON object a line, the record of a run that everything else (plot, TensorBoard, wandb) repeats.

A training line has step, loss, grad_norm, learning_rate, epoch, trained_tokens (of the run so far) and the timing
fields; an evaluation line has step and eval_loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from gapless.training import files

TIMING_FIELDS = ("tokens_per_second", "seconds", "memory_gib")
"""Fields that differ from run to run; all others are the same bits after a resume."""

Metrics = Mapping[str, float]


class MetricsLog:
    """The metrics.jsonl of a run folder, open for appending."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open the log of a run that goes on after `after_step`, or of one that starts (None).

        Lines of later steps, and a last line that a kill cut short, are dropped: they will come again.
        """
        kept = [] if after_step is None else [line for line in read_metrics(path) if line["step"] <= after_step]
        files.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.lines: list[Metrics] = [*kept]
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        """Append one line."""
        self.lines.append(metrics)
        self._file.write(json.dumps(metrics, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make all lines durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of a metrics.jsonl; empty if there is none.

    Raises:
        ValueError: a whole line is not a JSON object with a step.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    del rest  # empty, or a line that a kill cut short
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON; delete the line to go on") from error
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise ValueError(f"{path}:{number} has no step; delete the line to go on")
        metrics.append(value)
    return metrics
