"""Varlen attention for every GPU from compute capability 8.0 on (Dao 2023, "FlashAttention-2").

Work is handed out by the tile tables of `Segments`: one program per tile of queries (or keys) and head, longest first.
A program reads its document's place in both streams from the device, so the same tables serve caches, windows and full
attention. The kernels in Triton have no atomics: the gradients of keys and values and those of queries come from two
kernels (flash_backward). Where `hopper.applies`, Hopper's own run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from gapless.batch import POSITIONS, Segments, TileSpec
from gapless.kernels import gluon
from gapless.kernels.attention import hopper
from gapless.kernels.attention.flash_backward import flash_delta, flash_keys, flash_queries
from gapless.kernels.attention.flash_forward import flash_forward
from gapless.kernels.attention.reference import with_spare
from gapless.kernels.runtime import (
    cache_bytes,
    cdiv,
    family,
    is_captured,
    launch,
    multiprocessors,
    next_power_of_2,
    runs_kernels,
)

LOG2_E = 1.4426950408889634
LARGEST_HEAD = 256
_DELTA_TOKENS = 64


class Tile(NamedTuple):
    """Tile of a kernel, and how it is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the three kernels: forward, gradient of queries, gradient of keys and values.

    Hopper's own kernels have theirs: then `keys` is the backward's, and `queries` is as `forward` without packed heads.
    """

    forward: Tile | hopper.Tile
    queries: Tile | hopper.Tile
    keys: Tile | hopper.BackTile

    def packed(self, groups: int) -> Tiles:
        """Those for `groups` query heads per key head, which share tiles of the forward where a kernel has that."""
        return self._replace(forward=self.forward.packed(groups)) if isinstance(self.forward, hopper.Tile) else self


# By padded head dim. Hopper's are the fastest of benchmarks/tiles/flash.py on an H200 at 2 x 8,192 tokens, causal; the
# others are made to fit: 16-bit tensors, and float32, whose products without matrix units take many registers.
_HOPPER = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(32, 64, 4, 3)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
_AMPERE = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(64, 32, 8, 1), Tile(32, 32, 4, 2)),
}
_SMALL = {
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
_FLOAT32 = {
    64: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    128: Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    256: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# Hopper's forward at 128 would spill 168 bytes there.
_BLACKWELL = {**_HOPPER, 128: _HOPPER[128]._replace(forward=Tile(128, 64, 8, 3))}
_TABLES = {80: _AMPERE, 86: _SMALL, 89: _SMALL, 90: _HOPPER, 100: _BLACKWELL, 120: _SMALL}


def _tiles(head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    table = _FLOAT32 if dtype == torch.float32 else _TABLES[family(device)]
    tiles = table[max(64, next_power_of_2(max(head_dim, v_head_dim)))]
    if not hopper.applies(head_dim, v_head_dim, dtype, device):
        return tiles
    forward = hopper.forward_tile(head_dim, v_head_dim)
    return Tiles(forward, forward, hopper.back_tile(head_dim, v_head_dim))


def attention_tiles(
    head_dim: int,
    v_head_dim: int,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    groups: int = 1,
) -> tuple[TileSpec, ...]:
    """The tile tables that `attention` needs, to be declared in a `BatchLayout` or given to `segments`.

    Args:
        head_dim: D of queries and keys.
        v_head_dim: of values.
        windows: of the model's layers; None for a layer without one.
        dtype: of the tensors.
        device: of the tensors.
        groups: query heads per key head. On Hopper query heads that read the same keys share tiles, which is faster,
            in calls with as many as declared; all others find tables here, too.

    Returns:
        () where the reference runs: on a CPU, for heads above 256, for dtypes other than bf16, fp16 and float32.

    Raises:
        TypeError: a dtype that is none of torch's, windows that are no sequence, a window that is not an integer.
        ValueError: head dims, groups or a window below 1.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
    if head_dim < 1 or v_head_dim < 1:
        raise ValueError(f"head dims must be at least 1, not {head_dim} and {v_head_dim}")
    if groups < 1:
        raise ValueError(f"groups must be at least 1, the query heads per key head, not {groups}")
    if not isinstance(windows, Iterable):
        raise TypeError(f"windows must be those of all layers, as in [None, 4096], not {windows!r}")
    known = dict.fromkeys(effective_window(window) for window in windows)
    device = torch.device(device)
    if not runs_kernels(device) or not _has_kernels(head_dim, v_head_dim, dtype):
        return ()
    tiles = _tiles(head_dim, v_head_dim, dtype, device)
    both = (tiles.packed(groups), tiles)
    return tuple(dict.fromkeys(spec for window in known for some in both for spec in _specs(some, window)))


def effective_window(window: int | None) -> int | None:
    """The window as kernels take it: None for 2^30 and more, which no position reaches and int32 sums could not hold.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, Integral):
        raise TypeError(f"window must be an integer, or None for none, not {window!r}")
    if window < 1:
        raise ValueError(f"window must be at least 1, or None for none, not {window}")
    return int(window) if window < POSITIONS else None


def _specs(tiles: Tiles, window: int | None) -> tuple[TileSpec, TileSpec]:
    """The tables of the forward and, of the second, both backward kernels; the same where the queries' tiles are."""
    return (
        TileSpec(query_tile=tiles.forward.queries, key_tile=tiles.keys.keys, window=window),
        TileSpec(query_tile=tiles.queries.queries, key_tile=tiles.keys.keys, window=window),
    )


@dataclass(frozen=True)
class _Call:
    """What does not change between forward and backward."""

    q_segments: Segments
    k_segments: Segments
    window: int | None
    softcap: float | None
    scale: float
    causal: bool
    ordered: bool
    """Whether gradients are to have the same bits every time, where that is slower."""
    tiles: Tiles

    def documents(self) -> tuple[torch.Tensor, ...]:
        """Start, tokens and offset of every document, of queries and of keys."""
        q, k = self.q_segments, self.k_segments
        return q.cu_seqlens, q.seqused, q.offset, k.cu_seqlens, k.seqused, k.offset

    def document_places(self) -> int:
        """Documents of queries: of this batch, or, while a graph is captured, the most in any."""
        q = self.q_segments
        return q.seqused.numel() if is_captured(q.seqused.device) else len(q.lengths)

    def numbers(self) -> tuple[float, float, int]:
        """Scale in units of log2 e, softcap and window; whatever where there is none."""
        return self.scale * LOG2_E, self.softcap or 1.0, self.window or 1

    def require_tables(self, *, queries: bool, keys: bool) -> None:
        """Raise KeyError now, not in the backward, where a table is missing for the gradient of queries or of keys."""
        spec = _specs(self.tiles, self.window)[1]
        if isinstance(self.tiles.keys, hopper.BackTile):  # one kernel finds all gradients
            queries = keys = queries or keys
        if queries:
            self.q_segments.tile_tables(spec)
        if keys:
            self.k_segments.tile_tables(spec)

    def constants(self) -> dict[str, Any]:
        """Constexprs that the kernels share."""
        masks = {"CAUSAL": self.causal, "WINDOW": self.window is not None}
        return {**masks, "SOFTCAP": self.softcap is not None}


def _grid(
    table: torch.Tensor, used: int, heads: int, sharing: int, streamed: Sequence[torch.Tensor], each: int = 1
) -> tuple[int, int, int]:
    """Programs of a kernel: heads of a section, rows of the table, sections; see `flash_forward.work`.

    Args:
        table: of the tiles that stay.
        used: rows that have a tile. All rows get programs while a graph is captured, which is for any batch.
        heads: of programs.
        sharing: of these stream the same.
        streamed: [T, heads, C] each; what a section streams is to fit two thirds of the L2 cache.
        each: heads of `streamed` that a program, or those that share, go through.
    """
    device = table.device
    size = each * sum(x.shape[0] * x.shape[2] * x.element_size() for x in streamed)
    section = _section(heads, sharing, size, cache_bytes(device))
    return section, _rows(table, used), heads // section


def _rows(table: torch.Tensor, used: int) -> int:
    return len(table) if is_captured(table.device) else used


@cache
def _section(heads: int, sharing: int, size: int, cached: int) -> int:
    """The most heads, of which there are whole sections, that stream at most two thirds of the cached bytes."""
    counts = [count for count in range(1, heads + 1) if heads % count == 0]
    return max((count for count in counts if 3 * cdiv(count, sharing) * size <= 2 * cached), default=1)


def flash_attention(
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
    spare: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The arguments of `attention`, checked and completed; where `supports` holds.

    Raises:
        KeyError: the segments lack a table of `attention_tiles`.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    sinks = None if sinks is None else sinks.contiguous()
    tiles = _tiles(q.shape[2], v.shape[2], q.dtype, q.device)
    room = spare
    if isinstance(tiles.forward, hopper.Tile):
        q, k, v = (gluon.aligned(x) for x in (q, k, v))
        room = spare if spare % 8 == 0 else 0  # rows of the output are multiples of 16 bytes
    packed = tiles.packed(q.shape[1] // k.shape[1])
    if _pays(packed, tiles, window, q_segments):
        tiles = packed
    ordered = torch.are_deterministic_algorithms_enabled()
    call = _Call(q_segments, k_segments, window, softcap, scale, causal, ordered, tiles)
    if torch.is_grad_enabled():
        call.require_tables(queries=q.requires_grad, keys=k.requires_grad or v.requires_grad)
    out, lse = _Flash.apply(q, k, v, sinks, call, need_lse, room)
    return with_spare(out, spare - room), lse


def _pays(packed: Tiles, alone: Tiles, window: int | None, segments: Segments) -> bool:
    """Whether tiles that heads share are faster: where documents fill a tenth more of them.

    On an H200 with 4 heads that share, 128 features: 1.5 times as fast for documents of 16 to 128 tokens, 1.14 times
    for 128 to 512, level at 2,048, and 0.89 at 8,192 and more. While a graph is captured the batch at hand decides
    for all that replay it: either is right for any.
    """
    its, other = (_specs(tiles, window)[0] for tiles in (packed, alone))
    if its not in segments.tiles or other not in segments.tiles:  # they may have been declared for other groups
        return False
    shared, own = (segments.tile_tables(spec).forward_used for spec in (its, other))
    return 11 * shared * its.query_tile <= 10 * own * other.query_tile


def shared_tiles(
    head_dim: int,
    v_head_dim: int,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    device: torch.device | str,
    segments: Segments,
    *,
    groups: int = 1,
) -> tuple[bool, ...]:
    """Whether heads share tiles of the forward over these segments, for each different window; () for the reference.

    The arguments are those of `attention_tiles`. The host decides it by the documents. A captured call keeps to what
    was decided when it was captured: right for any batch, but neither the bits nor the speed of a call of its own.
    """
    device = torch.device(device)
    if not runs_kernels(device) or not _has_kernels(head_dim, v_head_dim, dtype):
        return ()
    known = dict.fromkeys(effective_window(window) for window in windows)
    tiles = _tiles(head_dim, v_head_dim, dtype, device)
    return tuple(_pays(tiles.packed(groups), tiles, window, segments) for window in known)


def supports(q: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    """Whether the kernels take these tensors: heads up to 256, 16- or 32-bit, a positive scale that float32 holds."""
    return _has_kernels(q.shape[2], v.shape[2], q.dtype) and 1e-30 < scale < 1e30


def _has_kernels(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> bool:
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and max(head_dim, v_head_dim) <= LARGEST_HEAD


def _padded(q: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    """The head dims, and the powers of two that tiles have; matrix units take at least 16."""
    d, dv = q.shape[2], v.shape[2]
    return {"D": d, "V": dv, "DP": max(16, next_power_of_2(d)), "VP": max(16, next_power_of_2(dv))}


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        call: _Call,
        need_lse: bool,
        spare: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, heads, _ = q.shape
        width = heads * v.shape[2]
        shape = (tokens, heads, v.shape[2])
        # A view only where it must be: autograd does not let one be changed in place.
        out = q.new_empty(tokens, width + spare)[:, :width].view(shape) if spare else q.new_empty(shape)
        lse = q.new_empty(heads, tokens, dtype=torch.float32)
        if call.q_segments.has_gaps:  # the tables know the tail alone
            out.zero_()
            lse.fill_(-torch.inf)
        _forward(call, q, k, v, sinks, out, lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, (lse / LOG2_E).t().contiguous() if need_lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        grad, grad_lse = grads
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(out)
        if grad.stride(2) != 1:
            grad = grad.contiguous()
        if isinstance(ctx.call.tiles.keys, hopper.BackTile):
            needs = ctx.needs_input_grad[:3]
            found = _hopper_backward(ctx.call, q, k, v, sinks, out, lse, gluon.aligned(grad), grad_lse, needs)
            return *found, None, None, None
        delta, grad_sinks = _delta(out, grad, lse, grad_lse, sinks)
        saved = (q, k, v, grad, lse, delta)
        needs_q, needs_k, needs_v, *_ = ctx.needs_input_grad
        grad_k, grad_v = _keys_backward(ctx.call, *saved) if needs_k or needs_v else (None, None)
        grad_q = _queries_backward(ctx.call, *saved) if needs_q else None
        return grad_q, grad_k, grad_v, grad_sinks, None, None, None


def _forward(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    tokens, heads, _ = q.shape
    tile, spec = call.tiles.forward, _specs(call.tiles, call.window)[0]
    tables = call.q_segments.tile_tables(spec)
    groups = heads // k.shape[1]
    shared = tile.group if isinstance(tile, hopper.Tile) else 1
    grid = _grid(tables.forward, tables.forward_used, heads // shared, groups // shared, (k, v))
    if isinstance(tile, hopper.Tile):
        given = (sinks, lse, tables.forward, call.documents(), call.numbers(), tile)
        hopper.launch_forward(grid, (q, k, v, out), *given, **call.constants())
        return
    launch(
        flash_forward,
        grid,
        q.device,
        *(q, k, v, q if sinks is None else sinks, out, lse, tables.forward),
        *call.documents(),
        *call.numbers(),
        *(tokens, groups),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2]),
        **_padded(q, v),
        **call.constants(),
        SINKS=sinks is not None,
        BM=tile.queries,
        BN=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _hopper_backward(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v and the sinks; None for those that need none."""
    tile = call.tiles.keys
    assert isinstance(tile, hopper.BackTile)
    if not any(needs):
        return None, None, None, _delta(out, grad, lse, grad_lse, sinks)[1]
    q_tables, k_tables = (x.tile_tables(_specs(call.tiles, call.window)[1]) for x in (call.q_segments, call.k_segments))
    given = hopper.Backward(
        q_table=q_tables.forward,
        q_rows=_rows(q_tables.forward, q_tables.forward_used),
        tile_queries=call.tiles.queries.queries,
        k_table=k_tables.backward,
        count=call.document_places(),
        documents=call.documents(),
        numbers=(call.scale, *call.numbers()),
        masks=call.constants(),
        tile=tile,
    )
    heads, kv_heads = q.shape[1], k.shape[1]
    together = _together(k.shape[0], heads, kv_heads, tile.keys, multiprocessors(q.device))
    dtype = k.dtype if together == heads // kv_heads else torch.float32
    results = tuple(x.new_empty(x.shape[0], heads // together, x.shape[2], dtype=dtype) for x in (k, v))
    grad_q = q.new_empty(q.shape)
    if call.k_segments.has_gaps:
        for x in results:
            x.zero_()
    if call.q_segments.has_gaps:
        grad_q.zero_()
    *rows, grad_sinks = hopper.launch_delta(given, out, grad, lse, grad_lse, sinks)
    tensors = (q, k, v, grad, *rows)
    # Sums of dQ are of float32: as much as two more of q. 327 TFLOP/s for 303 at 1k tokens, 128 features, causal.
    streamed = (q, grad) if tile.wide else (q, grad, q, q)
    grid = _grid(k_tables.backward, k_tables.backward_used, heads // together, 1, streamed, together)
    if tile.wide:
        if any(needs[1:]):
            hopper.launch_wide_keys(given, grid, tensors, results, together)
        if needs[0]:
            grid = _grid(q_tables.forward, q_tables.forward_used, heads, heads // kv_heads, (k, v))
            hopper.launch_wide_queries(given, grid, tensors, grad_q)
    else:
        if call.ordered:
            # In one section the tiles that start together are of many heads and do not wait for each other: 476
            # TFLOP/s for 411 at 128 features and 8k tokens, causal, before programs were persistent.
            grid = (heads // together, grid[1], 1)
        sums = hopper.launch_backward(given, grid, tensors, results, together, ordered=call.ordered)
        hopper.launch_queries(given, sums, grad_q)
    grad_k, grad_v = (_added(x, kv_heads, k.dtype) for x in results)
    found = (grad_q, grad_k, grad_v)
    return *(grad if need else None for grad, need in zip(found, needs, strict=True)), grad_sinks


def _delta(
    out: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, heads, width = out.shape
    delta = torch.empty_like(lse)
    blocks = cdiv(tokens, _DELTA_TOKENS)
    partial = lse.new_empty(blocks, heads) if sinks is not None else None
    launch(
        flash_delta,
        (blocks, heads),
        out.device,
        *(out, grad, lse, lse if grad_lse is None else grad_lse.t().contiguous(), lse if sinks is None else sinks),
        *(delta, delta if partial is None else partial, tokens),
        *(*out.stride()[:2], *grad.stride()[:2]),
        V=width,
        VP=max(16, next_power_of_2(width)),
        BT=_DELTA_TOKENS,
        SINKS=sinks is not None,
        LSE=grad_lse is not None,
    )
    if sinks is None or partial is None:
        return delta, None
    return delta, partial.sum(0).to(sinks.dtype)


def _keys_backward(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, heads, _), (k_tokens, kv_heads, _) = q.shape, k.shape
    groups, tile = heads // kv_heads, call.tiles.keys
    assert isinstance(tile, Tile)
    together = _together(k_tokens, heads, kv_heads, tile.keys, 2 * multiprocessors(q.device))
    wide = {"dtype": k.dtype if together == groups else torch.float32}
    grad_k = k.new_empty(k_tokens, heads // together, k.shape[2], **wide)
    grad_v = v.new_empty(k_tokens, heads // together, v.shape[2], **wide)
    if call.k_segments.has_gaps:
        grad_k.zero_()
        grad_v.zero_()
    spec = _specs(call.tiles, call.window)[1]
    tables = call.k_segments.tile_tables(spec)
    launch(
        flash_keys,
        _grid(tables.backward, tables.backward_used, heads // together, 1, (q, grad), together),
        q.device,
        *(q, k, v, grad, lse, delta, grad_k, grad_v, tables.backward),
        *call.documents(),
        *(call.scale, *call.numbers()),
        *(tokens, k_tokens, heads // together, groups, together),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2]),
        **_padded(q, v),
        **call.constants(),
        BM=tile.queries,
        BN=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return _added(grad_k, kv_heads, k.dtype), _added(grad_v, kv_heads, k.dtype)


def _together(tokens: int, heads: int, kv_heads: int, tile: int, programs: int) -> int:
    """Query heads that a program for a tile of keys adds up: all of its kv head, unless that gives too few programs.

    Then each query head has its own, and they are added up afterwards, in float32 and one order.
    """
    return 1 if cdiv(tokens, tile) * kv_heads < programs else heads // kv_heads


def _added(grad: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient per kv head from that of [Tk, results, C], of query heads or kv heads."""
    if grad.shape[1] == kv_heads:
        return grad.to(dtype)
    return grad.unflatten(1, (kv_heads, -1)).sum(2).to(dtype)


def _queries_backward(
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> torch.Tensor:
    tokens, heads, _ = q.shape
    groups = heads // k.shape[1]
    grad_q = q.new_empty(q.shape)
    if call.q_segments.has_gaps:
        grad_q.zero_()
    tile, spec = call.tiles.queries, _specs(call.tiles, call.window)[1]
    assert isinstance(tile, Tile)
    tables = call.q_segments.tile_tables(spec)
    launch(
        flash_queries,
        _grid(tables.forward, tables.forward_used, heads, groups, (k, v)),
        q.device,
        *(q, k, v, grad, lse, delta, grad_q, tables.forward),
        *call.documents(),
        *(call.scale, *call.numbers()),
        *(tokens, heads, groups),
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2]),
        **_padded(q, v),
        **call.constants(),
        BM=tile.queries,
        BN=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return grad_q
