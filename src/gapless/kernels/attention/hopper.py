"""Attention on Hopper: when its kernels run, with which tiles, and how they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gapless.kernels import gluon
from gapless.kernels.attention import hopper_backward as back
from gapless.kernels.attention import hopper_shared, hopper_sums
from gapless.kernels.attention import hopper_wide as wide_back
from gapless.kernels.attention.hopper_forward import Form, hopper_forward
from gapless.kernels.gluon import plain_descriptor, ragged_descriptor
from gapless.kernels.runtime import SHARED_MEMORY, family, launch, multiprocessors, next_power_of_2

ROWS = 64
"""Queries of a group of four warps: what Hopper's matrix units multiply at a time."""


class Tile(NamedTuple):
    """Tile of the forward, and how it is compiled: see `Form`."""

    keys: int
    consumers: int
    stages: int
    turns: bool
    persistent: bool = False
    """Both as in `Form`."""
    group: int = 1
    """Query heads that share a tile."""

    @property
    def queries(self) -> int:
        """Tokens of a program, all consumers together."""
        return ROWS // self.group * self.consumers

    def packed(self, groups: int) -> Tile:
        """The tile that heads share where a key head has `groups`: the largest power of two that divides these.

        At most 16, with which a consumer has 4 tokens, and tables are 16 times as long.
        """
        return self._replace(group=min(groups & -groups, 16))


class BackTile(NamedTuple):
    """Tile of the backward: `hopper_backward`'s, or, of 64 keys, `hopper_wide`'s."""

    queries: int
    keys: int
    stages: int = 2
    value_stages: int = 1
    """`hopper_wide.Form.VALUE_STAGES`."""

    @property
    def wide(self) -> bool:
        """Whether two kernels run, for heads above 128."""
        return self.keys == ROWS


_REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Of a consumer's and of the producer's threads, by consumers: all that a multiprocessor has."""


def applies(head_dim: int, v_head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels run: on Hopper, where Gluon fits, for 16 bits and heads of multiples of 8 up to 256."""
    dims = all(dim % 8 == 0 and dim <= 256 for dim in (head_dim, v_head_dim))
    return dims and dtype in (torch.bfloat16, torch.float16) and gluon.FITS and family(device) == 90


def chunks(dim: int) -> tuple[int, int]:
    """Cut a head dim in a power of two and another that holds the rest: 96 is 64 + 32, 128 and 112 are 128 + 0."""
    first = max(16, next_power_of_2(dim + 1) // 2)
    rest = max(16, next_power_of_2(dim - first)) if dim > first else 0
    return (2 * first, 0) if rest == first else (first, rest)


def forward_tile(head_dim: int, v_head_dim: int) -> Tile:
    """The fastest on an H200 at 16,384 tokens, causal, of those timed: 64, 96, 128, 192 and 256 features."""
    d, v = sum(chunks(head_dim)), sum(chunks(v_head_dim))
    if max(d, v) <= 64:
        return Tile(128, 3, 2, turns=True, persistent=True)
    # Beyond these, registers of a consumer, or shared memory, do not hold 128 keys.
    keys = 128 if v <= 128 and d <= 192 else 64
    # Packed documents, 128 features: 608 TFLOP/s for 569. 96 features, in two chunks, lost 3 to 6 %, and 256 5 to 8 %.
    persistent = max(d, v) <= 128 and not (chunks(head_dim)[1] or chunks(v_head_dim)[1])
    return Tile(keys, 2, 2, turns=False, persistent=persistent)


def back_tile(head_dim: int, v_head_dim: int) -> BackTile:
    """The fastest likewise. Gradients of 128 keys above 128 features do not fit the registers of two consumers."""
    dim = max(head_dim, v_head_dim)
    if dim <= 128:
        return BackTile(64 if dim > 64 else 128, back.KEYS)
    d, v = sum(chunks(head_dim)), sum(chunks(v_head_dim))
    tiles = (BackTile(ROWS, ROWS, *stages) for stages in ((3, 2), (2, 2), (2, 1)))
    return next(tile for tile in tiles if _wide_bytes(d, v, tile) <= SHARED_MEMORY[90])


def _wide_bytes(d: int, v: int, tile: BackTile) -> int:
    """Shared memory that the larger of `hopper_wide`'s kernels takes, barriers and Triton's own rounded up."""
    of_keys = (d + v) * (tile.keys + tile.stages * tile.queries) + 4 * tile.keys * tile.queries
    of_queries = (d + v) * 2 * ROWS + ROWS * (tile.stages * d + tile.value_stages * v)
    return 2 * max(of_keys, of_queries) + 4 * 2 * tile.stages * tile.queries + 1024


def launch_forward(
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    lse: torch.Tensor,
    table: torch.Tensor,
    documents: Sequence[torch.Tensor],
    numbers: tuple[float, float, int],
    tile: Tile,
    **masks: bool,
) -> None:
    """Run the forward.

    Args:
        grid: groups of `tile.group` heads of a section, rows of the table, sections.
        tensors: q [Tq, N, D], k [Tk, K, D], v [Tk, K, V] and out [Tq, N, V], each `gluon.is_aligned`.
        sinks: [N], or None.
        lse: float32 [N, Tq], in units of log2 e.
        table: of tiles of queries.
        documents: start, tokens and offset of every document, of queries and of keys.
        numbers: scale in units of log2 e, softcap, window.
        tile: of the program.
        masks: CAUSAL, WINDOW, SOFTCAP.
    """
    if 0 in grid:
        return
    q, k, v, out = tensors
    d, width, rows = chunks(q.shape[2]), chunks(v.shape[2]), ROWS // tile.group
    section, used, sections = grid
    total = section * used * sections
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if tile.persistent else None
    launch(
        hopper_forward,
        (min(total, multiprocessors(q.device)) if tile.persistent else total,),
        q.device,
        *(*_descriptors(q, rows, d, tile.group), *_descriptors(k, tile.keys, d)),
        *(*_descriptors(v, tile.keys, width), *_descriptors(out, rows, width, tile.group)),
        *(lse if sinks is None else sinks, lse, counter, table),
        *documents,
        *numbers,
        *(q.shape[0], q.shape[1] // k.shape[1], used, section, total),
        F=Form(
            ROWS, tile.group, tile.keys, tile.consumers, tile.stages, tile.turns, tile.persistent, *d, *width,
            SINKS=sinks is not None, REGISTERS=_REGISTERS[tile.consumers][0],
            FEW_REGISTERS=_REGISTERS[tile.consumers][1], **masks,
        ),
        num_warps=4,
    )  # fmt: skip


def _descriptors(x: torch.Tensor, rows: int, columns: tuple[int, int], heads: int = 1) -> list[object]:
    """Of both chunks of columns; None in place of a second that is empty, which costs a launch nothing."""
    return [ragged_descriptor(x, rows, count, heads) if count else None for count in columns]


class Backward(NamedTuple):
    """What the kernels of a backward share; in `numbers` are scale, scale log2 e, softcap and window."""

    q_table: torch.Tensor
    """Of tiles of `tile_queries` queries; `q_rows` of its rows get programs."""
    q_rows: int
    tile_queries: int
    k_table: torch.Tensor
    count: int
    """Documents that may have places; while a graph is captured, the most there may be in any batch."""
    documents: Sequence[torch.Tensor]
    numbers: tuple[float, float, float, int]
    masks: dict[str, bool]
    tile: BackTile

    def padded_rows(self, tokens: int) -> int:
        """Queries per head in tiles of their own: documents begin at multiples of a tile."""
        return (tokens // self.tile.queries + self.count + 1) * self.tile.queries

    def form(self, q: torch.Tensor, v: torch.Tensor, *, float32: bool, ordered: bool = False) -> hopper_shared.Form:
        """For q [Tq, N, D] and v [Tk, K, V]; `float32`: gradients of keys and values in float32."""
        d, width = (max(64, next_power_of_2(x.shape[2])) for x in (q, v))
        tile, (registers, few) = self.tile, _REGISTERS[2]
        return hopper_shared.Form(
            tile.queries, tile.keys, d, width, q.shape[2], v.shape[2], tile.stages, **self.masks,
            ORDERED=ordered, FLOAT32=float32, REGISTERS=registers, FEW_REGISTERS=few,
        )  # fmt: skip

    def wide_form(self, q: torch.Tensor, v: torch.Tensor, *, float32: bool) -> wide_back.Form:
        """Likewise, for the kernels of heads above 128."""
        d, width = chunks(q.shape[2]), chunks(v.shape[2])
        tile, (registers, few) = self.tile, _REGISTERS[2]
        return wide_back.Form(
            tile.queries, tile.keys, *d, *width, q.shape[2], v.shape[2], tile.stages, tile.value_stages, **self.masks,
            FLOAT32=float32, REGISTERS=registers, FEW_REGISTERS=few,
        )  # fmt: skip

    def wide_descriptors(self, tensors: Sequence[torch.Tensor], form: wide_back.Form) -> list[object]:
        """Of both chunks of q, k, v and the output's gradient."""
        q, k, v, grad = tensors
        d, width, tile = (form.D0, form.D1), (form.V0, form.V1), self.tile
        return [
            *(*_descriptors(q, tile.queries, d), *_descriptors(k, tile.keys, d)),
            *(*_descriptors(v, tile.keys, width), *_descriptors(grad, tile.queries, width)),
        ]

    def descriptors(self, tensors: Sequence[torch.Tensor], form: hopper_shared.Form) -> list[object]:
        """Of q, k, v, the output's gradient, and of LSE and delta in padded places."""
        q, k, v, grad, lse, delta = tensors
        tile = self.tile
        return [
            ragged_descriptor(q, tile.queries, form.D),
            ragged_descriptor(k, tile.keys, form.D),
            ragged_descriptor(v, tile.keys, form.V),
            ragged_descriptor(grad, tile.queries, form.V),
            *(plain_descriptor(x, (1, tile.queries)) for x in (lse, delta)),
        ]


def launch_delta(
    b: Backward,
    out: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Find LSE and -delta in padded places, float32 [N, rows], see `hopper_delta`, and the sinks' gradient [N]."""
    tokens, heads, width = out.shape
    rows = b.padded_rows(tokens)
    lse_padded, delta = lse.new_empty(heads, rows), lse.new_empty(heads, rows)
    partial = lse.new_empty(b.q_rows, heads) if sinks is not None else None
    launch(
        hopper_sums.hopper_delta,
        (b.q_rows, heads),
        out.device,
        *(out, grad, lse, lse if grad_lse is None else grad_lse.t().contiguous(), lse if sinks is None else sinks),
        *(lse_padded, delta, delta if partial is None else partial, b.q_table, *b.documents[:2], tokens, rows),
        *(*out.stride()[:2], *grad.stride()[:2]),
        V=width,
        VP=max(16, next_power_of_2(width)),
        QT=b.tile_queries,
        BM=b.tile.queries,
        SINKS=sinks is not None,
        LSE=grad_lse is not None,
    )
    if sinks is None or partial is None:
        return lse_padded, delta, None
    return lse_padded, delta, partial.sum(0).to(sinks.dtype)


def launch_backward(
    b: Backward,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    together: int,
    *,
    ordered: bool,
) -> torch.Tensor:
    """Run the backward but for its first and last kernels.

    Args:
        b: see there.
        grid: heads of a section of `results`, rows of the table, sections.
        tensors: q, k, v and the output's gradient, each `gluon.is_aligned`; LSE and delta of `launch_delta`.
        results: gradients of keys and values, dense [Tk, N / together, D or V]; float32 if they are to be added up.
        together: query heads that a program goes through.
        ordered: have tiles of keys add in turn, for the same bits every time.

    Returns:
        Parts of the queries' gradient before the scale, float32 [N, rows, columns].
    """
    q, k, v, _, lse, _ = tensors
    (heads, rows), tile = lse.shape, b.tile
    form = b.form(q, v, float32=results[0].dtype == torch.float32, ordered=ordered)
    sums = torch.zeros(heads, rows, form.D, dtype=torch.float32, device=q.device)
    turns = torch.zeros(1 + (heads * rows // tile.queries if ordered else 0), dtype=torch.int32, device=q.device)
    section, used, sections = grid
    total = section * used * sections
    launch(
        back.hopper_backward,
        (min(total, multiprocessors(q.device)),),
        q.device,
        *(*b.descriptors(tensors, form), plain_descriptor(sums.view(-1, 32), (tile.queries * form.D // 64, 32))),
        *(*_results(results, form), turns, b.k_table, *b.documents, *b.numbers),
        *(k.shape[0], heads // k.shape[1], together, rows // tile.queries, used, section, total),
        F=form,
        num_warps=4,
    )
    return sums


def _results(results: Sequence[torch.Tensor], form: hopper_shared.Form) -> list[object]:
    """Descriptors of the gradients of keys and values, or None where they are written without, and these."""
    columns = (form.D, form.V)
    descs = [None if form.FLOAT32 else ragged_descriptor(x, ROWS, n) for x, n in zip(results, columns, strict=True)]
    return [*descs, *results]


def launch_wide_keys(
    b: Backward,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    together: int,
) -> None:
    """Write the gradients of keys and values of heads above 128; arguments as for `launch_backward`."""
    q, k, v, _, lse, delta = tensors
    grad_k, grad_v = results
    form = b.wide_form(q, v, float32=grad_k.dtype == torch.float32)
    columns = ((form.D0, form.D1), (form.V0, form.V1))
    by_tma = [] if form.FLOAT32 else [*_descriptors(grad_k, ROWS, columns[0]), *_descriptors(grad_v, ROWS, columns[1])]
    launch(
        wide_back.hopper_wide_keys,
        grid,
        q.device,
        *b.wide_descriptors(tensors[:4], form),
        *(plain_descriptor(x, (1, b.tile.queries)) for x in (lse, delta)),
        *(by_tma or [None] * 4),
        *(*results, b.k_table, *b.documents, *b.numbers),
        *(k.shape[0], q.shape[1] // k.shape[1], together),
        F=form,
        num_warps=4,
    )


def launch_wide_queries(
    b: Backward, grid: tuple[int, ...], tensors: Sequence[torch.Tensor], grad_q: torch.Tensor
) -> None:
    """Write the gradient of queries, dense [Tq, N, D], of heads above 128; `grid` of tiles of 128 queries."""
    q, k, v, _, lse, delta = tensors
    assert b.tile_queries == 2 * ROWS, f"tables of {b.tile_queries} queries for programs of {2 * ROWS}"
    form = b.wide_form(q, v, float32=False)
    launch(
        wide_back.hopper_wide_queries,
        grid,
        q.device,
        *(*b.wide_descriptors(tensors[:4], form), *_descriptors(grad_q, ROWS, (form.D0, form.D1)), lse, delta),
        *(b.q_table, *b.documents, *b.numbers, q.shape[0], q.shape[1] // k.shape[1], lse.shape[1]),
        F=form,
        num_warps=4,
    )


def launch_queries(b: Backward, sums: torch.Tensor, grad_q: torch.Tensor) -> None:
    """Write the queries' gradient, dense [Tq, N, D], from its parts."""
    tokens, heads, dim = grad_q.shape
    launch(
        hopper_sums.hopper_queries,
        (b.q_rows, heads),
        sums.device,
        *(sums, grad_q, b.q_table, *b.documents[:2], tokens, sums.shape[1], b.numbers[0]),
        *grad_q.stride()[:2],
        D=dim,
        DP=sums.shape[2],
        QT=b.tile_queries,
        BM=b.tile.queries,
    )
