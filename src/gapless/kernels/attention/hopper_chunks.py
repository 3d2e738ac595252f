"""Heads on Hopper in two chunks of columns, powers of two each, so that none is padded to the next power: 96 = 64 + 32.

Each chunk has descriptors, shared memory and accumulators of its own; a second chunk may be empty, of 0 columns.
"""

from __future__ import annotations

from gapless.kernels.attention.hopper_shared import accumulator, load_tile, shared
from gapless.kernels.gluon import (
    constexpr_function,
    gl,
    gluon_jit,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@constexpr_function
def parts(second):
    """Products that one with both chunks is made of."""
    return 2 if second > 0 else 1


# ---- shared memory ----


@gluon_jit
def new_tiles(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr):
    """Room for COUNT tiles in two chunks; the first stands in for a second of no columns."""
    first = gl.allocate_shared_memory(dtype, [COUNT, ROWS, C0], shared(ROWS, C0, dtype))
    second = gl.allocate_shared_memory(dtype, [COUNT, ROWS, C1], shared(ROWS, C1, dtype)) if C1 > 0 else first
    return first, second


@gluon_jit
def at(tiles, index):
    """Both chunks of a tile."""
    return tiles[0].index(index), tiles[1].index(index)


@constexpr_function
def tile_bytes(rows, first, second):
    """Of a tile of 16-bit numbers."""
    return 2 * rows * (first + second)


@gluon_jit
def load_chunks(descs, document, row, head, barrier, room, SECOND: gl.constexpr):
    """Start to copy a tile of a document's rows: zeros beyond its end. The barrier expects it already."""
    load_tile(descs[0], document, row, head, barrier, room[0])
    if SECOND > 0:
        COLUMNS: gl.constexpr = descs[0].block_type.shape[4]
        load_tile(descs[1], document, row, head, barrier, room[1], COLUMNS)


@gluon_jit
def load(descs, document, row, head, barrier, room, SECOND: gl.constexpr):
    """The same where a barrier is for this tile alone."""
    if SECOND > 0:
        mbarrier.expect(barrier, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    else:
        mbarrier.expect(barrier, descs[0].block_type.nbytes)
    load_chunks(descs, document, row, head, barrier, room, SECOND)


# ---- products ----


@gluon_jit
def start_scores(left, right, SECOND: gl.constexpr):
    """Start the product of rows with rows, which sums over both chunks."""
    ROWS: gl.constexpr = left[0].shape[0]
    COLUMNS: gl.constexpr = right[0].shape[0]
    zeros = gl.full([ROWS, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    scores = warpgroup_mma(left[0], right[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if SECOND > 0:
        scores = warpgroup_mma(left[1], right[1].permute((1, 0)), scores, is_async=True)
    return scores


@gluon_jit
def no_sums(ROWS: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr):
    """Zeros to begin with; of a second chunk that is empty 16 columns, which nothing reads."""
    second: gl.constexpr = C1 if C1 > 0 else 16
    sums0 = gl.full([ROWS, C0], 0.0, gl.float32, accumulator(C0))
    sums1 = gl.full([ROWS, second], 0.0, gl.float32, accumulator(second))
    return sums0, sums1


@gluon_jit
def start_sums(left, right, sums0, sums1, SECOND: gl.constexpr):
    """Start to add the product of weights, in registers, with both chunks of a tile."""
    sums0 = warpgroup_mma(left, right[0], sums0, is_async=True)
    if SECOND > 0:
        sums1 = warpgroup_mma(left, right[1], sums1, is_async=True)
    return sums0, sums1


@gluon_jit
def wait_for_sums(left, sums0, sums1, SECOND: gl.constexpr):
    """Until then the matrix units read the weights, too, whose registers must stay as they are."""
    if SECOND > 0:
        sums0, sums1, _ = warpgroup_mma_wait(0, deps=[sums0, sums1, left])
    else:
        sums0, _ = warpgroup_mma_wait(0, deps=[sums0, left])
    return sums0, sums1
