"""The loss of a step, exact over micro-batches, ranks and stages.

L = (sum of the token losses of all micro-batches of all data-parallel ranks) / N, where N, the trained tokens of the
whole step, is known on every rank before the first backward. Every micro-batch runs backward on its own sum / N, and
gradients are added up over ranks, never averaged: they are those of one large batch however its rows are cut. A
micro-batch without a trained token gives exactly 0. Losses are added up over data-parallel ranks; of ranks that have
the same rows (tensor) one counts, and earlier stages have nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.batch import PackedBatch
from gapless.models.decoder import Decoder

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(logits float32 [M, V], labels int64 [M]) of M trained tokens -> the SUM of their losses, 0-d."""


def batch_loss(model: Decoder, batch: PackedBatch, loss_fn: LossFunction | None = None) -> Tensor:
    """The sum of a micro-batch's token losses, 0-d; see `hidden_loss`."""
    return hidden_loss(model, model(batch.tokens, batch.segments), batch, loss_fn)


def hidden_loss(model: Decoder, hidden: Tensor, batch: PackedBatch, loss_fn: LossFunction | None = None) -> Tensor:
    """The sum of a micro-batch's token losses.

    Args:
        model: has the head.
        hidden: [T, H], what its forward gave.
        batch: the micro-batch; without a trained token the loss is 0, and so are its gradients.
        loss_fn: a loss of the user's; cross-entropy otherwise.

    Returns:
        0-d float32.

    Raises:
        ValueError: the user's loss is not one number, or has no gradient where one is needed.
    """
    rows, labels = model.select_trained(hidden, batch)
    if loss_fn is None or batch.num_trained == 0:
        return model.head_loss(rows, labels)
    # The rows beyond are the bucket's padding: a user's loss sees trained tokens only.
    loss = loss_fn(model.logits(rows[: batch.num_trained]), labels[: batch.num_trained].long())
    if not isinstance(loss, Tensor) or loss.shape != ():
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return the sum of the token losses as a 0-d tensor, not {found}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss without a gradient; compute it from the logits with torch, without detach, item "
            "or no_grad"
        )
    return loss
