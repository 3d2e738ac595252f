"""The gated activation of the MLP (Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up in float32, rounded once.

    Args:
        gate_up: [T, 2F], the gate's F features, then up's.

    Returns:
        [T, F] in the same dtype.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Saves its input only; the sigmoid is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        return functional.silu(gate).mul_(up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, dim=-1)
        grad32 = grad.float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        grad_up.copy_(grad32 * silu)
        # silu'(z) = s + z s (1 - s) = s + silu (1 - s)
        slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
        grad_gate.copy_(slope.mul_(up).mul_(grad32))
        return out
