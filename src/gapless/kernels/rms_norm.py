"""RMS normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 4)."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once.

    Args:
        x: [..., C], any floating dtype.
        weight: [C].
        eps: added to the mean square.

    Returns:
        [..., C] in x's dtype, contiguous.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Saves the input and one float per row, and recomputes the normalised values in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        rstd = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            # d(x rstd)/dx is rstd (I - n n^T / C) with n = x rstd.
            grad_normed = grad32 * weight
            inner = torch.linalg.vecdot(grad_normed, normed).unsqueeze_(-1).div_(x.shape[-1])
            grad_x = grad_normed.addcmul_(normed, inner, value=-1).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, None
