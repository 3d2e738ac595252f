"""Self-attention with grouped queries, on a packed stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from gapless.batch import Segments
from gapless.kernels.attention import attention
from gapless.kernels.rope import RotaryTable, rotate_qkv
from gapless.kernels.runtime import Recipe
from gapless.models.config import DecoderConfig
from gapless.models.linear import DenseLinear, Linear, Part, plain_linear
from gapless.models.norm import RMSNorm


class KeyValueCache(Protocol):
    """What attention asks of a KV cache."""

    segments: Segments
    """The documents of the cached keys, the newest ones included, once `append` has returned."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new keys [T, K, D] and values [T, K, Dv] of a layer; return all, [Tk, K, D] and [Tk, K, Dv]."""
        ...


class Attention(nn.Module):
    """The residual stream plus out(attention(rope(q), rope(k), v))."""

    def __init__(
        self, config: DecoderConfig, layer: int, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        groups = config.heads // config.kv_heads
        self.layer, self.groups, self.window = layer, groups, config.windows[layer]
        # Grouped by kv head: a piece of the weight is whole groups of queries with their key and value.
        self.qkv: Linear = DenseLinear(
            config.hidden,
            (config.kv_heads, groups + 2, config.head_dim),
            (Part("q_proj", 1, 0, groups), Part("k_proj", 1, groups, 1), Part("v_proj", 1, groups + 1, 1)),
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        norm = {"dtype": dtype, "device": device}
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, **norm) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, **norm) if config.qk_norm else None
        self.out: Linear = plain_linear(
            "o_proj",
            config.heads * config.head_dim,
            config.hidden,
            bias=config.out_bias,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        segments: Segments,
        rotary: RotaryTable,
        cache: KeyValueCache | None = None,
        *,
        spare: int = 0,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Attend: x [T, H], residual [T, H] -> [T, H]; `spare` and `recipe` as in `Linear.forward`."""
        fused = self.qkv(x, counters=segments.dropout, spare=spare, recipe=recipe).unflatten(1, self.qkv.leading)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = rotate_qkv(fused, rotary, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        else:
            q, k, v = rotate_qkv(fused, rotary)
            if torch.is_grad_enabled():
                v = v.clone()  # attention keeps it: of the fused tensor queries and keys would be kept twice
        key_segments = segments
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
            key_segments = cache.segments
        room = self.out.spare
        out = attention(q, k, v, segments, key_segments, window=self.window, spare=room)
        assert isinstance(out, torch.Tensor)
        return self.out(out.flatten(1), residual, segments.dropout, spare=room)
