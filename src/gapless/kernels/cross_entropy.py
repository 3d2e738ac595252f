"""The output projection and the cross-entropy in one operation that never holds the logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from gapless.batch import IGNORE

CHUNK_TOKENS = 256
"""Tokens whose logits exist at a time; 256 rows of a vocabulary of 49,152 are 50 MB in float32."""


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the head are here, where tensor ranks hold consecutive ranges of the vocabulary."""

    start: int
    """Token of the first row."""
    group: distributed.ProcessGroup
    """The ranks that hold the whole vocabulary together."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    vocabulary: VocabularyShard | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden @ weight^T)[label].

    The gradients are computed chunk by chunk together with the loss, so the logits are needed once; the backward only
    multiplies them by the gradient that arrives and changes nothing saved, hence it may run again.

    With a `vocabulary` cut over ranks (Shoeybi et al. 2019, section 3) they exchange, of each chunk, the largest logit
    and then, together, the sum of the exponentials and the label's logit, nothing in the backward. The gradient of
    `hidden` that comes out is then this rank's summand: whoever copied `hidden` to the ranks adds them up.

    Args:
        hidden: [M, H]; the same on all ranks of a cut vocabulary.
        weight: [V, H], or the rows that are here.
        labels: int32 [M]; -100 for a row that counts nothing.
        chunk_tokens: rows of logits held at a time.
        vocabulary: which rows are here; None for all.

    Returns:
        0-d float32 sum of the losses (0 if no row counts); the same on all ranks.
    """
    if hidden.device.type == "cpu":
        # Rows that count nothing are left out; on a GPU their number would have to be copied to the host first.
        rows = (labels != IGNORE).nonzero().squeeze(1)
        if len(rows) < len(labels):
            hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not needs_grad:
        losses = [_chunk_loss(*chunk, weight, vocabulary).loss for chunk in _chunks(hidden, labels, chunk_tokens)]
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, vocabulary)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        vocabulary: VocabularyShard | None,
    ) -> torch.Tensor:
        loss_sum = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for rows, targets in _chunks(hidden, labels, chunk_tokens):
            chunk = _chunk_loss(rows, targets, weight, vocabulary)
            loss_sum += chunk.loss
            # softmax - one_hot, in the memory of the logits; rows that count nothing give zero.
            grad_logits = chunk.exponentials.mul_((chunk.kept / chunk.total)[:, None])
            grad_logits.scatter_add_(1, chunk.index, -chunk.kept_here[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + len(rows)])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, rows)
            start += len(rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def _chunks(hidden: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not len(labels):
        return []
    return list(zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True))


@dataclass(frozen=True)
class _Chunk:
    loss: torch.Tensor
    """0-d."""
    exponentials: torch.Tensor
    """exp(logits - maximum), float32 [M, V]."""
    total: torch.Tensor
    """[M]: their sum over the whole vocabulary."""
    index: torch.Tensor
    """int64 [M, 1]: row of the label here; any one where it is elsewhere or there is none."""
    kept: torch.Tensor
    """float32 [M]: 1 for rows that count, 0 for others."""
    kept_here: torch.Tensor
    """float32 [M]: the same, 0 also where the label's row is elsewhere."""


def _chunk_loss(
    hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, vocabulary: VocabularyShard | None
) -> _Chunk:
    logits = torch.mm(hidden, weight.t()).float()
    counts = labels != IGNORE
    kept = kept_here = counts.float()
    index = labels.long()
    if vocabulary is not None:
        index = index - vocabulary.start
        kept_here = ((index >= 0) & (index < len(weight)) & counts).float()
        index = index.clamp(max=len(weight) - 1)
    index = index.clamp(min=0)[:, None]
    target = logits.gather(1, index).squeeze(1)
    maximum = logits.amax(dim=1)
    if vocabulary is not None:
        distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=vocabulary.group)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    total = exponentials.sum(dim=1)
    if vocabulary is not None:
        sums = torch.stack([total, target * kept_here])
        distributed.all_reduce(sums, group=vocabulary.group)
        total, target = sums.unbind()
    loss = ((total.log() + maximum - target) * kept).sum()
    return _Chunk(loss, exponentials, total, index, kept, kept_here)


def _add_product(total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad_logits^T @ hidden to the total, which is float32."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total += torch.mm(grad_logits.t(), hidden)
