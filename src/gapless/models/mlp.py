"""The gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from gapless.batch import DropoutCounters
from gapless.kernels.activation import swiglu, swiglu_recipe
from gapless.kernels.runtime import Recipe
from gapless.models.config import DecoderConfig
from gapless.models.linear import DenseLinear, Linear, Part, plain_linear


class MLP(nn.Module):
    """The residual stream plus down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        # Cut along F, so that a piece has the same rows of gate and up.
        self.gate_up: Linear = DenseLinear(
            config.hidden,
            (2, config.ffn),
            (Part("gate_proj", 0, 0, 1), Part("up_proj", 0, 1, 1)),
            bias=config.mlp_bias,
            shard_dim=1,
            dtype=dtype,
            device=device,
        )
        self.down: Linear = plain_linear(
            "down_proj", config.ffn, config.hidden, bias=config.mlp_bias, dtype=dtype, device=device
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Apply to x [T, H] and add residual [T, H]: [T, H]; the rest as in `Linear.forward`."""
        room = self.down.spare
        gate_up = self.gate_up(x, counters=counters, spare=spare, recipe=recipe)
        active = swiglu(gate_up, spare=room)
        return self.down(active, residual, counters, spare=room, value=value, recipe=swiglu_recipe(gate_up))
