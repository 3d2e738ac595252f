"""Reference attention: a loop over documents, the softmax in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gapless.batch import Segments
from gapless.kernels.runtime import empty_rows


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: Segments,
    k_segments: Segments,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    *,
    need_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The arguments of `attention`, checked and completed. The LSE is computed only if asked for."""
    heads, kv_heads, dtype = q.shape[1], k.shape[1], q.dtype
    if dtype.itemsize < 4:
        # Exact products, and on a CPU faster: PyTorch's attention backward takes three times as long in bf16.
        q, k, v = q.float(), k.float(), v.float()
    if scale < 1e-30:
        # PyTorch's attention masks before it scales: -inf times a scale that is negative, or 0 in float32, is not -inf.
        q, scale = q * scale, 1.0
    q_pieces = _pieces(q.unflatten(1, (kv_heads, heads // kv_heads)), q_segments)
    k_pieces, v_pieces = _pieces(k, k_segments), _pieces(v, k_segments)
    plain = softcap is None and sinks is None and not need_lse
    outs = [piece.new_zeros(*piece.shape[:-1], v.shape[-1]) for piece in q_pieces]
    lses = [piece.new_full(piece.shape[:-1], -torch.inf, dtype=torch.float32) for piece in q_pieces]
    for index in range(len(q_segments.lengths)):
        at = 2 * index + 1
        view = _View(q_segments, k_segments, index, window, causal)
        if plain and view.every_query_sees_a_key():
            outs[at] = _fused(q_pieces[at], k_pieces[at], v_pieces[at], view, scale)
        elif view.queries:
            outs[at], lses[at] = _explicit(q_pieces[at], k_pieces[at], v_pieces[at], view, softcap, sinks, scale)
    if not any(q_segments.lengths):
        # A stream without documents gives zero gradients, not none, as any other.
        nothing = sum(x[:0].sum() for x in (q, k, v, *([] if sinks is None else [sinks])))
        outs[-1], lses[-1] = outs[-1] + nothing, lses[-1] + nothing
    return torch.cat(outs).flatten(1, 2).to(dtype), torch.cat(lses).flatten(1, 2) if need_lse else None


def _pieces(x: torch.Tensor, segments: Segments) -> tuple[torch.Tensor, ...]:
    """Cut the stream into gap, document 0, gap, document 1, ..., tail: document i is piece 2 i + 1.

    One split, because its backward is one concatenation; slices would each add a gradient of the whole stream's size.
    """
    sizes, end = [], 0
    for start, length in zip(segments.starts, segments.lengths, strict=True):
        sizes += [start - end, length]
        end = start + length
    return x.split([*sizes, segments.tokens - end])


class _View:
    """Which keys the queries of one document see."""

    def __init__(
        self, q_segments: Segments, k_segments: Segments, index: int, window: int | None, causal: bool
    ) -> None:
        self.queries, self.keys = q_segments.lengths[index], k_segments.lengths[index]
        self.shift = q_segments.offsets[index] - k_segments.offsets[index]
        """Position of the first query, counted from the first key."""
        self.window, self.causal = window, causal

    def every_query_sees_a_key(self) -> bool:
        if not self.queries or not self.keys:
            return False
        last = self.shift + self.queries - 1
        return not self.causal or (self.shift >= 0 and (self.window is None or last - self.window < self.keys - 1))

    def is_triangle(self) -> bool:
        """Query i sees keys 0 .. i."""
        short = self.window is None or self.window >= self.queries
        return self.causal and self.queries == self.keys and self.shift == 0 and short

    def is_full(self) -> bool:
        """Every query sees every key."""
        last = self.shift + self.queries - 1
        return not self.causal or (self.shift >= self.keys - 1 and (self.window is None or last < self.window))

    def mask(self, device: torch.device) -> torch.Tensor:
        """What each query sees, bool [queries, keys]."""
        ahead = (
            torch.arange(self.shift, self.shift + self.queries, device=device)[:, None]
            - torch.arange(self.keys, device=device)[None, :]
        )
        if not self.causal:
            return torch.ones_like(ahead, dtype=torch.bool)
        return ahead >= 0 if self.window is None else (ahead >= 0) & (ahead < self.window)


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: _View, scale: float) -> torch.Tensor:
    """PyTorch's attention, kv heads as its batch: q [t, K, G, D], k [s, K, D], v [s, K, Dv] -> [t, K, G, Dv]."""
    triangle = view.is_triangle()
    mask = None if triangle or view.is_full() else view.mask(q.device)
    groups = q.shape[2]
    out = functional.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
        v.transpose(0, 1)[:, None].expand(-1, groups, -1, -1),
        attn_mask=mask,
        is_causal=triangle,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3)


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    view: _View,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with every option, scores written out: out [t, K, G, Dv] and LSE float32 [t, K, G]."""
    scores = torch.einsum("tkgd,skd->tkgs", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~view.mask(q.device)[:, None, None], -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, extra], dim=-1)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    # A query that sees nothing has only -inf; 0 in their place gives weights of 0 and gradients of 0, not NaN.
    blind = lse == -torch.inf
    weights = torch.exp(scores - lse.masked_fill(blind, 0)[..., None])[..., : view.keys]
    return torch.einsum("tkgs,skd->tkgd", weights, v), lse


def with_spare(out: torch.Tensor, spare: int) -> torch.Tensor:
    """The same [T, N, Dv], with columns of scratch memory behind each row of `out.flatten(1)`."""
    return _Spared.apply(out, spare) if spare else out


class _Spared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, spare: int) -> torch.Tensor:
        rows = out.flatten(1)
        return empty_rows(rows, rows.shape[1], spare).copy_(rows).view(out.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        return *grads, None
