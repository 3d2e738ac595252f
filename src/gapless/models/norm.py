"""RMS norm as a module."""

from __future__ import annotations

import torch
from torch import nn

from gapless.kernels.rms_norm import rms_norm, rms_norm_recipe
from gapless.kernels.runtime import Recipe


class RMSNorm(nn.Module):
    """`rms_norm` over the last dimension with a weight of its own."""

    def __init__(
        self, features: int, eps: float, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype, device=device))

    def forward(self, x: torch.Tensor, spare: int = 0) -> torch.Tensor:
        """Normalise x [..., C]; `spare` as in `rms_norm`."""
        return rms_norm(x, self.weight, self.eps, spare=spare)

    def recipe(self, x: torch.Tensor) -> Recipe:
        """How the result for x is made again."""
        return rms_norm_recipe(x, self.weight, self.eps)
