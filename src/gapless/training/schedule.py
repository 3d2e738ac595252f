"""Learning-rate schedules as pure functions of the step.

A schedule has no state: the rate of step s follows from the settings and s alone, so a resumed run needs nothing but
its step. Shapes and names are those of Hugging Face's `get_*_schedule` functions; `wsd` (Hu et al. 2024, "MiniCPM",
section 4) holds the peak and then falls linearly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapless.config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate of every optimizer step of a run.

    Attributes:
        shape: "constant", "linear", "cosine" or "wsd".
        peak: learning rate at the end of the warm-up.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of the linear rise from 0.
        decay_steps: steps of the fall at the end; everything after the warm-up except for wsd.
        floor: learning rate after the last step, as a share of the peak.
    """

    shape: str
    peak: float
    total_steps: int
    warmup_steps: int
    decay_steps: int
    floor: float

    def __call__(self, step: int) -> float:
        """The learning rate of the optimizer step after `step` finished ones."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - (self.total_steps - self.decay_steps)) / max(1, self.decay_steps)
        progress = min(max(progress, 0.0), 1.0)
        if self.shape == "constant":
            share = 1.0
        elif self.shape == "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            share = 1.0 - progress
        return self.peak * (self.floor + (1.0 - self.floor) * share)


def make_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """The schedule of a run of `total_steps` optimizer steps.

    Raises:
        ValueError: a warm-up and decay that exceed the run, or a floor for a schedule that does not fall.
    """
    if config.lr_scheduler_type == "constant" and config.min_lr_ratio:
        raise ValueError("optim.min_lr_ratio needs a schedule that falls; lr_scheduler_type is constant")
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    left = total_steps - warmup
    decay = left
    if config.lr_scheduler_type == "wsd":
        decay = math.ceil(config.decay_ratio * total_steps)
        if not config.warmup_steps and config.warmup_ratio + config.decay_ratio <= 1:
            decay = min(decay, left)  # the shares fit; rounded up, both need not
    if left < max(decay, 0):
        raise ValueError(
            f"{warmup} steps of warm-up and {max(decay, 0)} of decay exceed the run's {total_steps} steps; "
            "lower optim.warmup_steps, warmup_ratio or decay_ratio"
        )
    return Schedule(
        shape=config.lr_scheduler_type,
        peak=config.learning_rate,
        total_steps=total_steps,
        warmup_steps=warmup,
        decay_steps=decay,
        floor=config.min_lr_ratio,
    )
