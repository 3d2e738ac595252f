"""The output projection and the cross-entropy in one operation that never holds the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch

from gapless.batch import IGNORE

CHUNK_TOKENS = 256
"""Tokens whose logits exist at a time; 256 rows of a vocabulary of 49,152 are 50 MB in float32."""


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden @ weight^T)[label].

    The gradients are computed chunk by chunk together with the loss, so the logits are needed once; the backward only
    multiplies them by the gradient that arrives and changes nothing saved, hence it may run again.

    Args:
        hidden: [M, H].
        weight: [V, H].
        labels: int32 [M]; -100 for a row that counts nothing.
        chunk_tokens: rows of logits held at a time.

    Returns:
        0-d float32 sum of the losses (0 if no row counts).
    """
    if hidden.device.type == "cpu":
        # Rows that count nothing are left out; on a GPU their number would have to be copied to the host first.
        rows = (labels != IGNORE).nonzero().squeeze(1)
        if len(rows) < len(labels):
            hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not needs_grad:
        losses = [_chunk_loss(*chunk, weight)[0] for chunk in _chunks(hidden, labels, chunk_tokens)]
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        loss_sum = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for rows, targets in _chunks(hidden, labels, chunk_tokens):
            loss, exponentials, total, kept = _chunk_loss(rows, targets, weight)
            loss_sum += loss
            # softmax - one_hot, in the memory of the logits; rows that count nothing give zero.
            grad_logits = exponentials.mul_((kept / total)[:, None])
            grad_logits.scatter_add_(1, _index(targets), -kept[:, None])
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
        return grad_hidden, grad_weight, None, None


def _chunks(hidden: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not len(labels):
        return []
    return list(zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True))


def _chunk_loss(
    hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss 0-d, exp(logits - maximum) float32 [M, V], their sum [M], 1 for rows that count and 0 for others [M]."""
    logits = torch.mm(hidden, weight.t()).float()
    kept = (labels != IGNORE).float()
    target = logits.gather(1, _index(labels)).squeeze(1)
    maximum = logits.amax(dim=1)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    total = exponentials.sum(dim=1)
    return ((total.log() + maximum - target) * kept).sum(), exponentials, total, kept


def _index(labels: torch.Tensor) -> torch.Tensor:
    return labels.clamp(min=0).long()[:, None]


def _add_product(total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad_logits^T @ hidden to the total, which is float32."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total += torch.mm(grad_logits.t(), hidden)
