"""Attention on Hopper: when its kernels run, with which tiles, and how they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gapless.kernels import gluon
from gapless.kernels.attention.hopper_forward import Form, hopper_forward
from gapless.kernels.gluon import ragged_descriptor
from gapless.kernels.runtime import family, launch, next_power_of_2

ROWS = 64
"""Queries of a group of four warps: what Hopper's matrix units multiply at a time."""


class Tile(NamedTuple):
    """Tile of the forward, and how it is compiled: see `Form`."""

    keys: int
    consumers: int
    stages: int
    turns: bool

    @property
    def queries(self) -> int:
        """Of a program, all consumers together."""
        return ROWS * self.consumers


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
    """The fastest on an H200 at 16,384 tokens, causal."""
    d, v = sum(chunks(head_dim)), sum(chunks(v_head_dim))
    if max(d, v) <= 64:
        return Tile(128, 3, 2, True)
    # Beyond these, registers of a consumer, or shared memory, do not hold 128 keys.
    return Tile(128 if v <= 128 and d <= 192 else 64, 2, 2, False)


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
        grid: heads of a section, rows of the table, sections.
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
    d, width = chunks(q.shape[2]), chunks(v.shape[2])
    launch(
        hopper_forward,
        grid,
        q.device,
        *(*_descriptors(q, ROWS, d), *_descriptors(k, tile.keys, d)),
        *(*_descriptors(v, tile.keys, width), *_descriptors(out, ROWS, width)),
        *(lse if sinks is None else sinks, lse, table),
        *documents,
        *numbers,
        *(q.shape[0], q.shape[1] // k.shape[1]),
        F=Form(
            ROWS, tile.keys, tile.consumers, tile.stages, tile.turns, *d, *width,
            SINKS=sinks is not None, REGISTERS=_REGISTERS[tile.consumers][0],
            FEW_REGISTERS=_REGISTERS[tile.consumers][1], **masks,
        ),
        num_warps=4,
    )  # fmt: skip


def _descriptors(x: torch.Tensor, rows: int, columns: tuple[int, int]) -> list[object]:
    """Of both chunks of columns; None in place of a second that is empty, which costs a launch nothing."""
    if not x.shape[0]:
        x = x.new_zeros(1, *x.shape[1:])  # never read: TMA wants an address
    return [ragged_descriptor(x, rows, count) if count else None for count in columns]
