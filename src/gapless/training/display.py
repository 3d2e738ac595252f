"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from gapless.parallel.world import World
from gapless.training.metrics import Metrics

WARMUP_STEPS = 2
"""Steps that do not count for the speed: the first ones allocate and compile."""
BAR_WIDTH, BAR_FROM_WIDTH = 24, 120
"""Columns of the bar, and of the terminal from which on it is shown: the numbers come first."""


class Clock:
    """Time spent in training steps; evaluation and saving do not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        """Start with the seconds of earlier processes of the run."""
        self.seconds = seconds
        self._steps = 0
        self._measured = 0.0
        self._mark = time.perf_counter()

    def resume(self) -> None:
        """Forget the time since the last step."""
        self._mark = time.perf_counter()

    def step(self, finished: float) -> float:
        """A step is done since `finished` (of `time.perf_counter`); returns its seconds."""
        elapsed, self._mark = finished - self._mark, finished
        self.seconds += elapsed
        self._steps += 1
        if self._steps > WARMUP_STEPS:
            self._measured += elapsed
        return elapsed

    def remaining(self, steps: int) -> float | None:
        """Seconds that `steps` more will take; None while only warm-up steps were seen."""
        counted = self._steps - WARMUP_STEPS
        return self._measured / counted * steps if counted > 0 else None


class Display(Protocol):
    """Where messages and steps are shown."""

    def message(self, text: str) -> None:
        """Show a line that stays."""

    def step(self, metrics: Metrics, total_steps: int, remaining: float | None) -> None:
        """Show the metrics of a step; `remaining` seconds until the end."""

    def close(self) -> None:
        """Leave the screen in order."""


class PlainDisplay:
    """One line a step, for log files and pipes."""

    def message(self, text: str) -> None:
        """Print the text."""
        print(text, flush=True)

    def step(self, metrics: Metrics, total_steps: int, remaining: float | None) -> None:
        """Print the step's line."""
        print(step_line(metrics, total_steps, remaining), flush=True)

    def close(self) -> None:
        """Nothing to do."""


class BarDisplay:
    """A progress bar with the newest metrics, messages above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            *([BarColumn(BAR_WIDTH)] if console.width >= BAR_FROM_WIDTH else []),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="crop")),
            console=console,
        )
        self._task = self._progress.add_task("", total=None, visible=False)
        self._progress.start()

    def message(self, text: str) -> None:
        """Print the text above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def step(self, metrics: Metrics, total_steps: int, remaining: float | None) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=int(metrics["step"]),
            total=total_steps,
            description=step_line(metrics, total_steps, remaining),
            visible=True,
        )

    def close(self) -> None:
        """Stop redrawing; the bar stays as it is."""
        self._progress.stop()


class RankDisplay:
    """The log of a rank, in a job of many; rank 0 has a screen as well."""

    def __init__(self, log: Callable[[str], None], screen: Display | None = None) -> None:
        """Write lines with `log`, and show everything on the screen, if there is one."""
        self._log, self._screen = log, screen

    def message(self, text: str) -> None:
        """Write the text."""
        self._log(text)
        if self._screen is not None:
            self._screen.message(text)

    def step(self, metrics: Metrics, total_steps: int, remaining: float | None) -> None:
        """Write the step's line."""
        self._log(step_line(metrics, total_steps, remaining))
        if self._screen is not None:
            self._screen.step(metrics, total_steps, remaining)

    def close(self) -> None:
        """Leave the screen in order."""
        if self._screen is not None:
            self._screen.close()


def make_display(world: World | None = None) -> Display:
    """A bar if standard output is a terminal, else plain lines; on ranks other than 0 only the log of the rank."""
    if world is not None and world.rank > 0:
        return RankDisplay(world.log)
    console = Console()
    screen = BarDisplay(console) if console.is_terminal else PlainDisplay()
    return screen if world is None or world.size == 1 else RankDisplay(world.log, screen)


def step_line(metrics: Metrics, total_steps: int, remaining: float | None) -> str:
    """A step in one line, what matters most first: a narrow terminal cuts the rest."""
    parts = [
        f"step {metrics['step']}/{total_steps}",
        f"loss {metrics['loss']:.4f}",
        *([] if remaining is None else [f"{duration(remaining)} left"]),
        f"{metrics['tokens_per_second']:.0f} tokens/s",
        f"grad {metrics['grad_norm']:.3g}",
        f"lr {metrics['learning_rate']:.3g}",
        f"{short(metrics['trained_tokens'])} trained",
        f"{metrics['memory_gib']:.1f} GiB",
    ]
    return "  ".join(parts)


def short(count: float) -> str:
    """A count in at most four digits: 950, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 999.5 * size else f"{count / size:.0f}{unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
