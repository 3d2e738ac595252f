"""The low-rank update of a linear layer's output: y += scale (x A^T) B^T, both products skinny.

LoRA (Hu et al. 2021, section 4.1). The adapters of a fused layer's parts stand side by side in A, one block of R rows
a part, and B is zero outside its part's rows and columns, so that a fused layer takes two products, not two per part.
"""

from __future__ import annotations

from typing import Any

import torch


class _LoraUpdate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inner = x @ a.t()
        ctx.save_for_backward(x, a, b, inner)
        ctx.scale = scale
        ctx.mark_dirty(y)
        return y.addmm_(inner, b.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, a, b, inner = ctx.saved_tensors
        grad_inner = (grad @ b) * ctx.scale
        grad_x = grad_inner @ a if ctx.needs_input_grad[1] else None
        grad_b = (grad.t() @ inner) * ctx.scale if ctx.needs_input_grad[3] else None
        return grad, grad_x, grad_inner.t() @ x, grad_b, None


def lora_update(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Adds the low-rank update to `y` in place.

    Args:
        y: [T, out], the base layer's output; overwritten, so nothing else may need its old value.
        x: [T, in].
        a: [R, in], R counting all parts.
        b: [out, R].
        scale: lora_alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023).

    Returns:
        y, all tensors in its dtype.
    """
    return _LoraUpdate.apply(y, x, a, b, scale)
