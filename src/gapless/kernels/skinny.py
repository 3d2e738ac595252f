"""Products with a skinny matrix: what adapters need, near the limit of the bytes they read.

`project` is x w^T with few rows in w, `spread` inner w with few rows in w, `outer` inner^T x with few columns in inner;
in each the large operand is read or written once. Dropout falls on the side of the large one, by its counters, without
a copy in memory. Sums that are cut into pieces, so that all of a GPU has work, are added up in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gapless.batch import DropoutCounters
from gapless.kernels.dropout import CHANGING, keep_limit, keep_tile
from gapless.kernels.runtime import cdiv, family, jit, launch, multiprocessors, next_power_of_2, tl

# ---- Triton ----


@jit
def _channels(start, skipped, channels, CHANNELS: tl.constexpr, LIMIT: tl.constexpr):
    """The channels from `start` on, and which there are; with dropout a row begins `skipped` channels early."""
    channel = start + tl.arange(0, CHANNELS)
    if LIMIT is None:
        valid = channel < channels
    else:
        channel -= skipped
        valid = (channel >= 0) & (channel < channels)
    return channel, valid


@jit
def _drop(x, key_ptr, row_ptr, column_ptr, token, inside, place, first_group, LIMIT: tl.constexpr):
    """A tile [tokens, channels] with zeros where dropout has them."""
    row = tl.load(row_ptr + token, mask=inside, other=0)
    column = tl.load(column_ptr + token, mask=inside, other=0)
    kept = keep_tile(key_ptr, row, column, place, first_group, x.shape[1], LIMIT)
    return tl.where(kept, x, 0.0)


@jit
def _store_inner(out_ptr, copy_ptr, inner, token, inside, block, rank, out_stride, out_columns):
    """Write a tile [tokens, RANK], its columns from `rank` on as zeros; the last block of ranks also all behind it."""
    RANK: tl.constexpr = inner.shape[1]
    r = block * RANK + tl.arange(0, RANK)
    # What is behind the rank is zero also where x is not finite.
    inner = tl.where((r < rank)[None, :], inner, 0.0).to(out_ptr.dtype.element_ty)
    out = out_ptr + token.to(tl.int64)[:, None] * out_stride
    tl.store(out + r[None, :], inner, mask=inside[:, None] & (r < out_columns)[None, :])
    if copy_ptr is not None:
        copy = copy_ptr + token.to(tl.int64)[:, None] * rank + r[None, :]
        tl.store(copy, inner, mask=inside[:, None] & (r < rank)[None, :])
    if (block + 1) * RANK >= rank:
        for start in range((block + 1) * RANK, out_columns, RANK):
            c = start + tl.arange(0, RANK)
            tl.store(out + c[None, :], tl.zeros_like(inner), mask=inside[:, None] & (c < out_columns)[None, :])


@jit(do_not_specialize=CHANGING)
def _project_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    copy_ptr,
    key_ptr,
    row_ptr,
    column_ptr,
    tokens,
    channels,
    rank,
    x_stride,
    w_rank_stride,
    w_channel_stride,
    out_stride,
    out_columns,
    scale,
    place,
    first_group,
    skipped,
    LIMIT: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The sum scale * dropout(x) w^T; with several SPLITS [tokens, SPLITS, ranks], each over its channels."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    split, block = tl.program_id(1), tl.program_id(2)
    r = block * RANK + tl.arange(0, RANK)
    x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + r[None, :] * w_rank_stride
    end = skipped + channels
    length = tl.cdiv(end, SPLITS * CHANNELS) * CHANNELS
    inner = tl.zeros((TOKENS, RANK), tl.float32)
    for start in range(split * length, tl.minimum(split * length + length, end), CHANNELS):
        channel, valid = _channels(start, skipped, channels, CHANNELS, LIMIT)
        x = tl.load(x_rows + channel[None, :], mask=inside[:, None] & valid[None, :], other=0.0)
        if LIMIT is not None:
            x = _drop(x, key_ptr, row_ptr, column_ptr, token, inside, place, first_group + start // 4, LIMIT)
        w_mask = valid[:, None] & (r < rank)[None, :]
        w = tl.load(w_rows + channel[:, None] * w_channel_stride, mask=w_mask, other=0.0)
        inner = tl.dot(x, w, inner, input_precision="ieee")
    if SPLITS == 1:
        _store_inner(out_ptr, copy_ptr, inner * scale, token, inside, block, rank, out_stride, out_columns)
    else:
        line = (token.to(tl.int64) * SPLITS + split)[:, None] * out_stride
        tl.store(out_ptr + line + r[None, :], inner, mask=inside[:, None])


@jit(do_not_specialize=CHANGING)
def _add_splits_kernel(
    partial_ptr,
    out_ptr,
    copy_ptr,
    tokens,
    rank,
    partial_stride,
    out_stride,
    out_columns,
    scale,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
):
    """What `_project_kernel` leaves where it has several SPLITS: added up in their order, scaled, rounded."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    block = tl.program_id(1)
    r = block * RANK + tl.arange(0, RANK)
    inner = tl.zeros((TOKENS, RANK), tl.float32)
    for split in tl.static_range(SPLITS):
        line = (token.to(tl.int64) * SPLITS + split)[:, None] * partial_stride
        inner += tl.load(partial_ptr + line + r[None, :], mask=inside[:, None], other=0.0)
    _store_inner(out_ptr, copy_ptr, inner * scale, token, inside, block, rank, out_stride, out_columns)


@jit(do_not_specialize=CHANGING)
def _spread_kernel(
    inner_ptr,
    w_ptr,
    residual_ptr,
    bias_ptr,
    out_ptr,
    key_ptr,
    row_ptr,
    column_ptr,
    tokens,
    channels,
    rank,
    w_rank_stride,
    w_channel_stride,
    residual_stride,
    place,
    first_group,
    skipped,
    LIMIT: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """A tile of inner w, zero where LIMIT drops, (+ residual) (+ bias)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    start = tl.program_id(1) * CHANNELS
    channel, valid = _channels(start, skipped, channels, CHANNELS, LIMIT)
    mask = inside[:, None] & valid[None, :]
    line = token.to(tl.int64)[:, None]
    out = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for first in range(0, rank, RANK):
        r = first + tl.arange(0, RANK)
        inner = tl.load(inner_ptr + line * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        w = w_ptr + r[:, None] * w_rank_stride + channel[None, :] * w_channel_stride
        w = tl.load(w, mask=(r < rank)[:, None] & valid[None, :], other=0.0)
        out = tl.dot(inner, w, out, input_precision="ieee")
    if LIMIT is not None:
        out = _drop(out, key_ptr, row_ptr, column_ptr, token, inside, place, first_group + start // 4, LIMIT)
    if residual_ptr is not None:
        residual = residual_ptr + line * residual_stride + channel[None, :]
        out += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + line * channels + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=CHANGING)
def _outer_kernel(
    inner_ptr,
    x_ptr,
    out_ptr,
    key_ptr,
    row_ptr,
    column_ptr,
    tokens,
    channels,
    rank,
    x_stride,
    out_channel_stride,
    out_rank_stride,
    place,
    first_group,
    skipped,
    LIMIT: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Sums over the tokens of a split: dropout(x)^T inner, float32 [SPLITS, channels, rank] by its strides."""
    start = tl.program_id(0) * CHANNELS
    split, block = tl.program_id(1), tl.program_id(2)
    channel, valid = _channels(start, skipped, channels, CHANNELS, LIMIT)
    r = block * RANK + tl.arange(0, RANK)
    length = tl.cdiv(tokens, SPLITS * TOKENS) * TOKENS
    total = tl.zeros((CHANNELS, RANK), tl.float32)
    for first in range(split * length, tl.minimum(split * length + length, tokens), TOKENS):
        token = first + tl.arange(0, TOKENS)
        inside = token < tokens
        line = token.to(tl.int64)[:, None]
        x = tl.load(x_ptr + line * x_stride + channel[None, :], mask=inside[:, None] & valid[None, :], other=0.0)
        if LIMIT is not None:
            x = _drop(x, key_ptr, row_ptr, column_ptr, token, inside, place, first_group + start // 4, LIMIT)
        inner = tl.load(inner_ptr + line * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), inner, total, input_precision="ieee")
    out = out_ptr + split.to(tl.int64) * channels * rank
    out += channel[:, None] * out_channel_stride + r[None, :] * out_rank_stride
    tl.store(out, total, mask=valid[:, None] & (r < rank)[None, :])


# ---- launchers ----


class InputDropout(NamedTuple):
    """The dropout on the update's input; see `kernels.dropout.dropout`."""

    p: float
    counters: DropoutCounters
    layer: int
    site: int
    first_channel: int = 0


class _Tiles(NamedTuple):
    """Of a launch: tile of tokens and channels, pieces that the sum is cut into, and how it is compiled."""

    tokens: int
    channels: int
    splits: int
    num_warps: int
    num_stages: int


_MOST_RANK = 64
"""Ranks of a tile; more take several programs, or steps."""


def _tiles(kind: str, device: torch.device, tokens: int, channels: int, element_size: int) -> _Tiles:
    """Tiles of `_project_kernel` ("project"), `_spread_kernel` ("spread") and `_outer_kernel` ("outer").

    A sum is cut into pieces where there are too few programs for a multiprocessor's share of the reads to be in flight.
    """
    chip = family(device)
    roomy = chip in (80, 90, 100)
    programs, warps = 2 * multiprocessors(device), 4
    if element_size > 2:
        tile, stages = (32, 64) if kind == "spread" else (32, 32), 2
    elif kind == "project" and channels > 16384:
        # Each program reads all of w: with as many channels as that is much, fewer programs of more tokens are faster.
        tile, stages = (64, 64), 5 if roomy else 4
    elif kind == "project" and roomy:
        # One of them fills the shared memory of a multiprocessor: 19.9 us for 8,192 x 4,096 on an H200, where two of
        # 32 tokens take 25.8.
        tile, stages = (64, 128), 4
        programs //= 2
        warps = 8 if chip == 100 else 4  # four would spill there
    elif kind == "project":
        tile, stages = (32, 128), 3
    elif kind == "outer":
        tile, stages = (64, 64 if cdiv(channels, 64) > programs else 128), 4
    else:
        tile, stages = (64, 128), 2
    splits = 1
    if kind == "project":
        splits = min(programs // max(cdiv(tokens, tile[0]), 1), channels // 512, 32)
    elif kind == "outer":
        splits = min(programs // cdiv(channels, tile[1]), tokens // 256, 32)
    # A power of two, so that prompts of all lengths share few kernels.
    return _Tiles(*tile, 1 << max(splits, 1).bit_length() - 1, warps, stages)


def _rank_tile(rank: int) -> int:
    return min(max(next_power_of_2(rank), 16), _MOST_RANK)


def _dropout_arguments(drop: InputDropout | None, x: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """The kernels' tensors, place and limit; without dropout no tensors, and None."""
    if drop is None:
        return (None, None, None), (0, 0, 0), None
    counters = drop.counters
    tensors = (counters.key.contiguous(), counters.row.contiguous(), counters.column.contiguous())
    place = (drop.layer << 8 | drop.site, drop.first_channel // 4, drop.first_channel % 4)
    return tensors, place, keep_limit(drop.p)


def project(
    x: torch.Tensor, w: torch.Tensor, scale: float, drop: InputDropout | None, *, spare: int = 0, copy: bool = True
) -> torch.Tensor | None:
    """The product scale * dropout(x) w^T in x's dtype, as [T, R], or in the columns behind x's rows, or both.

    Args:
        x: [T, C].
        w: [R, C], any strides.
        scale: dropout's own included.
        drop: the dropout.
        spare: columns behind x's rows to fill, zeros from R on.
        copy: whether to return [T, R].
    """
    (tokens, channels), rank = x.shape, w.shape[0]
    copied = x.new_empty(tokens, rank) if copy else None
    if spare:
        # By its address: to autograd x itself does not change.
        out = x.as_strided((tokens, spare), x.stride(), x.storage_offset() + channels)
    else:
        assert copied is not None
        out = copied
    other = None if copied is out else copied
    tiles, rank_tile = _tiles("project", x.device, tokens, channels, x.element_size()), _rank_tile(rank)
    blocks, splits = cdiv(rank, rank_tile), tiles.splits
    target, copies = (out, other) if splits == 1 else (_partial(x, tokens, splits, blocks * rank_tile), None)
    tensors, place, limit = _dropout_arguments(drop, x)
    strides = (x.stride(0), w.stride(0), w.stride(1), target.stride(-2))
    arguments = (x, w, target, copies, *tensors, tokens, channels, rank, *strides, out.shape[1], scale, *place)
    launch(
        _project_kernel,
        (cdiv(tokens, tiles.tokens), splits, blocks),
        x.device,
        *arguments,
        LIMIT=limit,
        SPLITS=splits,
        TOKENS=tiles.tokens,
        RANK=rank_tile,
        CHANNELS=tiles.channels,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        arguments = (target, out, other, tokens, rank, target.stride(-2), out.stride(0), out.shape[1], scale)
        settings = {"SPLITS": splits, "TOKENS": 16, "RANK": rank_tile}
        launch(_add_splits_kernel, (cdiv(tokens, 16), blocks), x.device, *arguments, **settings, num_warps=4)
    return copied


def _partial(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory for sums that are not whole yet."""
    return x.new_empty(*shape, dtype=torch.float32)


def spread(
    inner: torch.Tensor,
    w: torch.Tensor,
    drop: InputDropout | None = None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Inner [T, R] times w [R, C] (any strides), zero where `drop` drops, (+ residual) (+ bias): [T, C]."""
    (tokens, rank), channels = inner.shape, w.shape[1]
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = inner.new_empty(tokens, channels)
    tiles = _tiles("spread", inner.device, tokens, channels, inner.element_size())
    tensors, place, limit = _dropout_arguments(drop, inner)
    strides = (w.stride(0), w.stride(1), channels if residual is None else residual.stride(0))
    launch(
        _spread_kernel,
        (cdiv(tokens, tiles.tokens), cdiv(place[2] + channels, tiles.channels)),
        inner.device,
        *(inner, w, residual, bias, out, *tensors, tokens, channels, rank, *strides, *place),
        LIMIT=limit,
        TOKENS=tiles.tokens,
        RANK=_rank_tile(rank),
        CHANNELS=tiles.channels,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def outer(inner: torch.Tensor, x: torch.Tensor, drop: InputDropout | None, *, rank_first: bool) -> torch.Tensor:
    """The sum over tokens of inner [T, R] times dropout(x) [T, C]: float32 [R, C] if `rank_first`, else [C, R]."""
    (tokens, rank), channels = inner.shape, x.shape[1]
    tiles, rank_tile = _tiles("outer", x.device, tokens, channels, x.element_size()), _rank_tile(rank)
    out = _partial(x, tiles.splits, *((rank, channels) if rank_first else (channels, rank)))
    tensors, place, limit = _dropout_arguments(drop, x)
    strides = (x.stride(0), *((1, channels) if rank_first else (rank, 1)))
    launch(
        _outer_kernel,
        (cdiv(place[2] + channels, tiles.channels), tiles.splits, cdiv(rank, rank_tile)),
        x.device,
        *(inner, x, out, *tensors, tokens, channels, rank, *strides, *place),
        LIMIT=limit,
        SPLITS=tiles.splits,
        TOKENS=tiles.tokens,
        RANK=rank_tile,
        CHANNELS=tiles.channels,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out[0] if tiles.splits == 1 else out.sum(0)
