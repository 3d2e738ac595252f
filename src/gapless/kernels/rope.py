"""Rotary position embedding (Su et al. 2021, "RoFormer", section 3.4), in the half-split layout of Hugging Face.

Feature i of a head is rotated together with feature i + D/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RotaryTable:
    """The rotation of every token of one stream, computed once per forward and shared by all layers."""

    cos: torch.Tensor
    """float32 [T, D/2]."""
    sin: torch.Tensor
    """float32 [T, D/2]."""


def rotary_table(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float = 1.0) -> RotaryTable:
    """The table for a stream.

    Args:
        positions: int32 [T].
        frequencies: float32 [D/2], radians per position.
        scaling: factor on cosine and sine (YaRN's attention factor).
    """
    angles = positions[:, None].float() * frequencies
    return RotaryTable(angles.cos().mul_(scaling), angles.sin().mul_(scaling))


def apply_rope(q: torch.Tensor, k: torch.Tensor, rotary: RotaryTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys.

    Args:
        q: [T, ..., D], any strides, for instance [T, N, D] or [T, K, G, D].
        k: [T, ..., D].
        rotary: the table of the stream.

    Returns:
        The rotated q and k, contiguous, in their own dtype.
    """
    return _Rope.apply(q, rotary.cos, rotary.sin), _Rope.apply(k, rotary.cos, rotary.sin)


class _Rope(torch.autograd.Function):
    """The backward is the rotation by the opposite angle, so nothing of q or k is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    heads = (x.shape[0], *(1,) * (x.ndim - 2), cos.shape[-1])
    cos, sin = cos.view(heads), sin.view(heads)
    first, second = x.float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.copy_((first * cos).addcmul_(second, sin, value=-1))
    out_second.copy_((second * cos).addcmul_(first, sin))
    return out
