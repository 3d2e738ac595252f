"""Counter-based dropout: the mask is a function of where a value stands, not of how many were drawn before.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3",
section 3.3). Key and counter are

    key     = (seed, step)
    counter = (channel // 4, column, row, layer << 8 | site)

and word `channel % 4` of the output decides. The same bits come out in any layout of rows over micro-batches and ranks,
on recompute, and after a resume, with no state to save.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gapless.batch import DropoutCounters
from gapless.kernels.runtime import cdiv, jit, launch, tl, use_triton

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in units of 2^-32
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def _masked(x: torch.Tensor, p: float, counters: DropoutCounters, place: tuple[int, int, int]) -> torch.Tensor:
    kept = keep_mask(x.shape[1], p, counters, *place)
    return torch.where(kept, x * (1 / (1 - p)), 0)


def keep_mask(
    channels: int, p: float, counters: DropoutCounters, layer: int, site: int, first_channel: int = 0
) -> torch.Tensor:
    """Which values `dropout` keeps, bool [T, channels]."""
    skipped = first_channel % 4  # words of the first group that belong to channels before x's
    row, column = counters.row.long() & _MASK, counters.column.long() & _MASK
    group = torch.arange(first_channel // 4, -(-(first_channel + channels) // 4), device=row.device)
    place = torch.full_like(row, layer << 8 | site)
    key = counters.key.long() & _MASK
    words = philox((group[None, :], column[:, None], row[:, None], place[:, None]), (key[0], key[1]))
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, skipped : skipped + channels]
    return bits >= round(p * 2**32)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        # The products wrap modulo 2^64, so all their bits are right; masking undoes the sign of the shift.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
    return c0, c1, c2, c3


# ---- Triton ----


CHANGING = ("tokens", "place", "first_group")
"""Integers that differ between batches and layers and stand in no address: kernels are not compiled again for them."""


@jit
def philox_words(c0, c1, c2, c3, k0, k1):
    """`philox` on uint32 tensors, all of one shape but k0 and k1, which are scalars."""
    for _ in tl.static_range(10):
        high, low = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        other_high, other_low = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = other_high ^ c1 ^ k0, other_low, high ^ c3 ^ k1, low
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@jit
def keep_tile(key_ptr, row, column, place, first_group, CHANNELS: tl.constexpr, LIMIT: tl.constexpr):
    """Which values of a tile dropout keeps: bool [tokens, CHANNELS].

    Args:
        key_ptr: seed and step, int32.
        row: of the tile's tokens, int32 [tokens]; likewise column.
        column: see row.
        place: layer << 8 | site.
        first_group: first channel of the tile / 4; the tile begins with a group of four, also where the tensor's first
            channel does not.
        CHANNELS: of the tile, a power of two, at least 4.
        LIMIT: what is greater is kept, see `keep_limit`.
    """
    groups: tl.constexpr = CHANNELS // 4
    shape: tl.constexpr = (row.shape[0], groups)
    # Typed scalars: Triton hands over an argument of value 1 as a Python number.
    k0, k1 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    group = tl.full((groups,), first_group, tl.uint32) + tl.arange(0, groups).to(tl.uint32)
    c0 = tl.broadcast_to(group[None, :], shape)
    c1 = tl.broadcast_to(column.to(tl.uint32)[:, None], shape)
    c2 = tl.broadcast_to(row.to(tl.uint32)[:, None], shape)
    w0, w1, w2, w3 = philox_words(c0, c1, c2, tl.full(shape, place, tl.uint32), k0, k1)
    # join appends an axis: [.., 2] of (w0, w2) and of (w1, w3), then [.., 2, 2] whose rows are (w0, w1) and (w2, w3).
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (row.shape[0], CHANNELS)) > LIMIT


@jit(do_not_specialize=CHANGING)
def _dropout_kernel(
    x_ptr,
    out_ptr,
    key_ptr,
    row_ptr,
    column_ptr,
    x_stride,
    out_stride,
    tokens,
    channels,
    place,
    first_group,
    skipped,
    scale,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    row = tl.load(row_ptr + token, mask=inside, other=0)
    column = tl.load(column_ptr + token, mask=inside, other=0)
    start = tl.program_id(1) * CHANNELS
    kept = keep_tile(key_ptr, row, column, place, first_group + start // 4, CHANNELS, LIMIT)
    channel = start + tl.arange(0, CHANNELS) - skipped
    mask = inside[:, None] & ((channel >= 0) & (channel < channels))[None, :]
    token = token.to(tl.int64)
    x = tl.load(x_ptr + token[:, None] * x_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    out = tl.where(kept, x * scale, 0.0)
    tl.store(out_ptr + token[:, None] * out_stride + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def keep_limit(p: float) -> int:
    """Bits greater than this are kept; for p that `is_identity` does not take."""
    return round(p * 2**32) - 1


def is_identity(p: float) -> bool:
    """Whether no value is ever dropped."""
    return round(p * 2**32) == 0


def _launch_dropout(x: torch.Tensor, p: float, counters: DropoutCounters, place: tuple[int, int, int]) -> torch.Tensor:
    layer, site, first_channel = place
    tokens, channels = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = x.new_empty(tokens, channels)
    skipped = first_channel % 4
    tile = (16, 256)
    grid = (cdiv(tokens, tile[0]), cdiv(skipped + channels, tile[1]))
    launch(
        _dropout_kernel,
        grid,
        x.device,
        x,
        out,
        *(counter.contiguous() for counter in (counters.key, counters.row, counters.column)),
        x.stride(0),
        out.stride(0),
        tokens,
        channels,
        layer << 8 | site,
        first_channel // 4,
        skipped,
        1 / (1 - p),
        LIMIT=keep_limit(p),
        TOKENS=tile[0],
        CHANNELS=tile[1],
        num_warps=4,
    )
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, counters: DropoutCounters, place: tuple[int, int, int], masked: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(counters.key, counters.row, counters.column)
        ctx.p, ctx.place, ctx.masked = p, place, masked
        return masked(x, p, counters, place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        return ctx.masked(grad, ctx.p, DropoutCounters(*ctx.saved_tensors), ctx.place), None, None, None, None


def check_dropout(
    x: torch.Tensor, p: float, counters: DropoutCounters, layer: int, site: int, first_channel: int
) -> None:
    """Raise ValueError for what `dropout` does not take."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x has shape {list(x.shape)} and dtype {x.dtype}, not [T, C] of floating point")
    found = (counters.key, counters.row, counters.column)
    if [counter.shape for counter in found] != [(2,), (len(x),), (len(x),)]:
        shapes = ", ".join(str(list(counter.shape)) for counter in found)
        raise ValueError(f"key [2], row [T] and column [T] have shapes {shapes}: x has {len(x)} tokens")
    if any(counter.dtype != torch.int32 for counter in found):
        dtypes = ", ".join(str(counter.dtype) for counter in found)
        raise ValueError(f"key, row and column have dtypes {dtypes}, not torch.int32")
    if any(counter.device != x.device for counter in found):
        raise ValueError(f"key, row and column are on {', '.join(str(c.device) for c in found)}, x is on {x.device}")
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}: a value is dropped with a probability of at least 0 and below 1")
    if not (0 <= layer < 2**23 and 0 <= site < 256 and first_channel >= 0):
        numbers = f"layer {layer}, site {site} and first channel {first_channel}"
        raise ValueError(f"{numbers} must be at least 0, the layer below 2^23 and the site below 256")


def dropout(
    x: torch.Tensor, p: float, counters: DropoutCounters, layer: int, site: int, first_channel: int = 0
) -> torch.Tensor:
    """Zero each value with probability p and scale the others by 1 / (1 - p).

    Only the counters are kept for the backward, which computes the mask again.

    Args:
        x: [T, C], of a floating dtype.
        p: in [0, 1).
        counters: of the batch.
        layer: from 0, below 2^23.
        site: which dropout in the layer, from 0, below 256.
        first_channel: channel of the layer's whole input that x begins with, where x is a range of its channels.

    Returns:
        [T, C] in x's dtype; x itself where p is 0.

    Raises:
        ValueError: shapes, dtypes or devices do not go together, or a number is out of its range.
    """
    check_dropout(x, p, counters, layer, site, first_channel)
    if is_identity(p):
        return x
    place = (layer, site, first_channel)
    return _Dropout.apply(x, p, counters, place, _launch_dropout if use_triton(x) else _masked)
