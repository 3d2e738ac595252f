"""One optimizer step over its micro-batches.

The loss is L = (sum of the token losses of all micro-batches) / N, where N, the trained tokens of the whole step, is
known before the first backward. Every micro-batch runs backward on its own sum / N, so the gradients are those of one
large batch however its rows are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.batch import PackedBatch
from gapless.data.loader import TrainStep
from gapless.models.decoder import Decoder
from gapless.training.optim import AdamW

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [M, V], labels int64 [M]) of M trained tokens -> the SUM of their losses, 0-d."""


@dataclass(frozen=True)
class StepMetrics:
    """What a step yields, as 0-d tensors on the device: reading them waits for the step."""

    loss: Tensor
    """L, the mean loss of the step's trained tokens."""
    grad_norm: Tensor
    """Global norm of the gradient of L, before the clip."""
    finite: Tensor
    """Whether both are finite; if not, the step changed nothing."""


class PendingMetrics:
    """A step's metrics, being copied to the host.

    The copy is queued behind the step. Reading waits for the copy alone: `Tensor.item` would be queued behind the steps
    launched since, and wait for them too.
    """

    def __init__(self, metrics: StepMetrics) -> None:
        """Queue the copy; returns at once."""
        values = torch.stack([metrics.loss, metrics.grad_norm, metrics.finite.float()])
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def read(self) -> tuple[float, float, bool]:
        """Loss, gradient norm and whether they are finite, as soon as the step is done."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, grad_norm, finite = self._values.tolist()
        return loss, grad_norm, bool(finite)


def train_step(
    model: Decoder, optimizer: AdamW, data: TrainStep, loss_fn: LossFunction | None = None
) -> StepMetrics | None:
    """Forward, backward, clip and update, with no copy from the device to the host.

    Args:
        model: the decoder; its trained parameters are the optimizer's.
        optimizer: holds the gradients; they must be clear.
        data: the micro-batches and N.
        loss_fn: a loss of the user's; cross-entropy otherwise.

    Returns:
        The metrics, or None where the step has nothing to train (N = 0) and was skipped.
    """
    if data.num_trained == 0:
        return None
    total = accumulate(model, data, loss_fn)
    grad_norm, finite = optimizer.step(total, data.micro_batches[0].scalars.learning_rate)
    return StepMetrics(total, grad_norm, finite)


def accumulate(model: Decoder, data: TrainStep, loss_fn: LossFunction | None = None) -> Tensor:
    """Add the gradients of L over the micro-batches; returns L, 0-d float32."""
    losses = []
    for batch in data.micro_batches:
        loss = batch_loss(model, batch, loss_fn)
        if loss is not None:
            loss = loss / batch.scalars.num_trained
            loss.backward()
            losses.append(loss.detach().float())
    return torch.stack(losses).sum()


def batch_loss(model: Decoder, batch: PackedBatch, loss_fn: LossFunction | None = None) -> Tensor | None:
    """The sum of a micro-batch's token losses, 0-d; None if it has no trained token.

    Raises:
        ValueError: the user's loss is not one number, or has no gradient where one is needed.
    """
    if batch.num_trained == 0:
        return None
    if loss_fn is None:
        return model.loss(batch)
    hidden, labels = model.trained_hidden(batch)
    # The rows beyond are the bucket's padding: a user's loss sees trained tokens only.
    loss = loss_fn(model.logits(hidden[: batch.num_trained]), labels[: batch.num_trained].long())
    if not isinstance(loss, Tensor) or loss.shape != ():
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return the sum of the token losses as a 0-d tensor, not {found}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient; compute it from the logits with torch, without detach, item "
            "or no_grad"
        )
    return loss


@torch.no_grad()
def mean_loss(model: Decoder, batches: Iterable[PackedBatch], loss_fn: LossFunction | None = None) -> float | None:
    """The mean loss of all trained tokens of `batches`, each counted once whatever its batch; None if there is none."""
    losses, num_trained = [], 0
    training = model.training
    model.eval()
    try:
        for batch in batches:
            loss = batch_loss(model, batch, loss_fn)
            if loss is not None:
                losses.append(loss.double())
                num_trained += batch.num_trained
    finally:
        model.train(training)
    return torch.stack(losses).sum().item() / num_trained if num_trained else None
