"""Attention over packed documents, one public function for training, prefill and decode."""

from __future__ import annotations

import math
from numbers import Real

import torch

from gapless.batch import Segments
from gapless.kernels.attention.decode import decode_attention, decodes
from gapless.kernels.attention.flash import (
    attention_tiles,
    effective_window,
    flash_attention,
    shared_tiles,
    supports,
)
from gapless.kernels.attention.reference import reference_attention, with_spare
from gapless.kernels.runtime import use_triton

__all__ = ["attention", "attention_tiles", "shared_tiles"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: Segments,
    k_segments: Segments | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    spare: int = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v within each document, with grouped queries (Ainslie et al. 2023, "GQA").

    Token j of a document has position `offset + j` in its segments; a query at position p sees the keys of the same
    document (same index in both segments) at positions <= p, and with a window W only those > p - W.

    On a GPU of compute capability 8.0 or more a kernel runs, for heads up to 256; its work is cut by tile tables, so
    the segments must have been made with those of `attention_tiles` (a model's `batch_layout` declares them). One new
    token per document over a KV cache is one batched product; all else, and a CPU, takes the reference.

    On Hopper, heads of multiples of 8 in 16 bits have kernels of their own. For heads up to 128 the last bits of the
    gradient of q then differ from run to run, unless torch's deterministic algorithms are on in the forward.

    Args:
        q: [Tq, N, D].
        k: [Tk, K, D]; K divides N, query head n reads key head n // (N / K).
        v: [Tk, K, Dv].
        q_segments: documents of the queries.
        k_segments: documents of the keys (a KV cache); those of the queries by default.
        window: keys a token sees, itself included; None, or 2^30 and more, for all.
        softcap: scores become softcap * tanh(score / softcap); above 0.
        sinks: [N], on q's device; one extra score per head that takes part in the softmax and has no value.
        scale: of the scores, finite; D ** -0.5 by default. 0 and negative ones take the reference.
        causal: False lets a query see all keys of its document (a window is then refused).
        return_lse: also return the log of the softmax's denominator.
        spare: columns of scratch memory behind each row of `out.flatten(1)`, for `lora_linear`.

    Returns:
        out [Tq, N, Dv] in q's dtype: zeros for queries that belong to no document or see no key. With `return_lse`
        also float32 [Tq, N]: -inf for queries of no document; for those that see no key the sink's, or -inf without
        sinks.

    Raises:
        TypeError: segments that are not `Segments`, a window that is not an integer, a softcap or scale that is not a
            number, sinks that are not a tensor.
        ValueError: shapes, dtypes, devices, segments or options that do not fit together or are out of range.
        KeyError: segments without the tile tables that the kernel needs.
    """
    k_segments = q_segments if k_segments is None else k_segments
    _check(q, k, v, q_segments, k_segments)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = effective_window(window)
    _check_options(q, window, softcap, sinks, scale, causal)
    if spare < 0:
        raise ValueError(f"spare must be at least 0, not {spare}")
    plain = causal and softcap is None and sinks is None and not return_lse and not torch.is_grad_enabled()
    if plain and scale > 0 and decodes(q_segments, k_segments):
        return with_spare(decode_attention(q, k, v, q_segments, k_segments, window, scale), spare)
    settings = (window, softcap, sinks, scale, causal)
    if use_triton(q) and supports(q, v, scale):
        out, lse = flash_attention(q, k, v, q_segments, k_segments, *settings, need_lse=return_lse, spare=spare)
    else:
        out, lse = reference_attention(q, k, v, q_segments, k_segments, *settings, need_lse=return_lse)
        out = with_spare(out, spare)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_segments: Segments,
    k_segments: Segments,
) -> None:
    for name, given in (("q_segments", q_segments), ("k_segments", k_segments)):
        if not isinstance(given, Segments):
            raise TypeError(
                f"{name} must be Segments, as gapless.batch.segments makes them, not {type(given).__name__}"
            )
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or v.shape[:-1] != k.shape[:-1] or q.shape[2] != k.shape[2]:
        raise ValueError(f"attention takes q [Tq, N, D], k [Tk, K, D], v [Tk, K, Dv], not {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention takes tensors of one dtype, not q {q.dtype}, k {k.dtype}, v {v.dtype}")
    devices = (q.device, k.device, v.device, q_segments.cu_seqlens.device, k_segments.cu_seqlens.device)
    if len(set(devices)) > 1:
        named = zip(("q", "k", "v", "q_segments", "k_segments"), devices, strict=True)
        found = ", ".join(f"{name} on {device}" for name, device in named)
        raise ValueError(f"attention takes tensors and segments of one device, not {found}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads")
    if q.shape[0] != q_segments.tokens or k.shape[0] != k_segments.tokens:
        raise ValueError(f"{shapes} do not match segments of {q_segments.tokens} and {k_segments.tokens} tokens")
    if len(q_segments.lengths) != len(k_segments.lengths):
        raise ValueError(f"{len(q_segments.lengths)} documents of queries, {len(k_segments.lengths)} of keys")


def _check_options(
    q: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> None:
    if window is not None and not causal:
        raise ValueError(f"a window needs causal attention, not window={window}, causal={causal}")
    for name, number in (("softcap", softcap), ("scale", scale)):
        if number is not None and not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, not {type(number).__name__}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be above 0 and finite, not {softcap}; None for none")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, not {scale}")
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a tensor of one number per query head, not {type(sinks).__name__}")
    if sinks.shape != q.shape[1:2] or sinks.device != q.device:
        raise ValueError(
            f"sinks must be [{q.shape[1]}] on {q.device}, one per query head, not {list(sinks.shape)} on {sinks.device}"
        )
