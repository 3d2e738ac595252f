"""One optimizer step over its micro-batches; see `gapless.parallel.loss` for what is exact about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gapless.batch import PackedBatch
from gapless.data.loader import TrainStep
from gapless.parallel.loss import LossFunction
from gapless.parallel.model import ParallelModel
from gapless.training.optim import AdamW

_EVALUATED_TOGETHER = 8
"""Evaluation batches that go through a pipeline at a time."""


@dataclass(frozen=True)
class StepMetrics:
    """What a step yields, on the device: reading it waits for the step."""

    values: Tensor
    """float32 [5]: what `of` takes."""

    @classmethod
    def of(cls, loss: Tensor, grad_norm: Tensor, finite: Tensor, tokens: Tensor, stops: Tensor) -> StepMetrics:
        """From 0-d tensors.

        Args:
            loss: L, the mean loss of the step's trained tokens.
            grad_norm: global norm of the gradient of L, before the clip.
            finite: whether both are finite; if not, the step changed nothing.
            tokens: of all ranks, padding left out.
            stops: ranks that asked for this step to be the last.
        """
        return cls(torch.stack([loss, grad_norm, finite.float(), tokens, stops]))

    @property
    def loss(self) -> Tensor:
        """See `of`."""
        return self.values[0]

    @property
    def grad_norm(self) -> Tensor:
        """See `of`."""
        return self.values[1]

    @property
    def finite(self) -> Tensor:
        """See `of`; 0-d bool."""
        return self.values[2] != 0


class StepNumbers(NamedTuple):
    """The same on the host."""

    loss: float
    grad_norm: float
    finite: bool
    tokens: int
    stop: bool


class PendingMetrics:
    """A step's metrics, being copied to the host.

    The copy is queued behind the step. Reading waits for the copy alone: `Tensor.item` would be queued behind the steps
    launched since, and wait for them too.
    """

    def __init__(self, metrics: StepMetrics) -> None:
        """Queue the copy; returns at once."""
        self._values = metrics.values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if metrics.values.is_cuda else None

    def read(self) -> StepNumbers:
        """The numbers, as soon as the step is done."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, grad_norm, finite, tokens, stops = self._values.tolist()
        return StepNumbers(loss, grad_norm, bool(finite), int(tokens), bool(stops))


def train_step(
    model: ParallelModel,
    optimizer: AdamW,
    data: TrainStep,
    loss_fn: LossFunction | None = None,
    *,
    counts: Callable[[nn.Parameter], bool] = lambda _: True,
    stop: bool = False,
) -> StepMetrics | None:
    """Forward, backward, clip and update, with no copy from the device to the host.

    Args:
        model: its trained parameters are the optimizer's.
        optimizer: holds the gradients; they must be clear.
        data: this rank's micro-batches and N.
        loss_fn: a loss of the user's; cross-entropy otherwise.
        counts: whether this rank counts a parameter in the gradient norm (see `Ownership`).
        stop: whether this rank asks for the step to be the last; all ranks learn of it.

    Returns:
        The metrics, the same on all ranks, or None where the step has nothing to train (N = 0) and was skipped.
    """
    if data.num_trained == 0:
        return None
    optimizer.bind_gradients()  # a callback or a script may have called zero_grad
    share = model.accumulate(data.micro_batches, loss_fn)
    model.reduce(optimizer.gradient)
    # Numbers of the host become tensors by a fill, which does not wait.
    numbers = (torch.full_like(share, own_tokens(model, data)), torch.full_like(share, stop))
    learning_rate = data.micro_batches[0].scalars.learning_rate
    return end_step(model, optimizer, share, *numbers, learning_rate, counts)


def own_tokens(model: ParallelModel, data: TrainStep) -> int:
    """Tokens of this rank's micro-batches that the step counts, padding left out."""
    return sum(batch.num_tokens for batch in data.micro_batches) if model.mesh.counts else 0


def end_step(
    model: ParallelModel,
    optimizer: AdamW,
    share: Tensor,
    tokens: Tensor,
    stops: Tensor,
    learning_rate: Tensor,
    counts: Callable[[nn.Parameter], bool],
) -> StepMetrics:
    """What follows a step's gradients: norm, clip and update.

    Args:
        model: see `train_step`, as for `optimizer` and `counts`.
        optimizer: holds the gradients of L.
        share: what this rank has of L, 0-d float32.
        tokens: `own_tokens`, 0-d float32.
        stops: whether this rank asks for the step to be the last, 0-d float32.
        learning_rate: 0-d float32.
        counts: see there.
    """
    # One collective for all that is not a gradient.
    own = torch.stack([share, optimizer.squares(counts), tokens, stops])
    loss, squares, tokens, stops = model.mesh.sum(own).unbind()
    norm, finite = optimizer.step(loss, learning_rate, squares.sqrt())
    return StepMetrics.of(loss, norm, finite, tokens, stops)


@torch.no_grad()
def mean_loss(
    model: ParallelModel, batches: Iterable[PackedBatch], loss_fn: LossFunction | None = None
) -> float | None:
    """The mean loss of all trained tokens of all ranks' batches, each counted once; None if there is none.

    Args:
        model: the model.
        batches: this rank's, of which ranks have equally many (see `eval_batches`).
        loss_fn: a loss of the user's; cross-entropy otherwise.
    """
    totals = []
    model.modes(training=False)
    try:
        rest = iter(batches)
        while some := list(islice(rest, _EVALUATED_TOGETHER)):
            loss = model.loss_sum(some, loss_fn)
            trained = sum(batch.num_trained for batch in some) if model.mesh.counts else 0
            totals.append(torch.stack([loss, torch.full_like(loss, trained)]))
    finally:
        model.modes(training=True)
    if not totals:
        return None
    loss_sum, num_trained = model.mesh.sum(torch.stack(totals).sum(dim=0)).tolist()
    return loss_sum / num_trained if num_trained else None
