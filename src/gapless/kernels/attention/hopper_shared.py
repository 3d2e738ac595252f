"""What attention's kernels for Hopper share: layouts, masks, which tiles meet, and the backward's form and copies."""

from __future__ import annotations

from typing import NamedTuple

from gapless.kernels.attention.flash_forward import capped
from gapless.kernels.gluon import (
    constant,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    ragged_place,
    tma_load,
    tma_store,
)


class Form(NamedTuple):
    """What a kernel of the backward is compiled for."""

    BM: int
    """Queries of a tile."""
    KEYS: int
    """Keys of a program."""
    D: int
    """Columns of tiles of queries and keys, a power of two; what is beyond the head dim is zero."""
    V: int
    """Likewise of values."""
    D_HEAD: int
    """The head dim of queries and keys."""
    V_HEAD: int
    STAGES: int
    """Tiles in shared memory of what streams by."""
    CAUSAL: bool
    WINDOW: bool
    SOFTCAP: bool
    ORDERED: bool
    """Whether tiles of keys take turns at the queries' gradients."""
    FLOAT32: bool
    """Whether the gradients of keys and values are written in float32, to be added up."""
    REGISTERS: int
    """Of a consumer's thread; the first consumer gets what is left."""
    FEW_REGISTERS: int
    """Of a thread of a single warp."""


LINE = constant(32)
"""Numbers in a row of `in_lines`: 128 bytes, what TMA swizzles."""
_ROWS = constant(64)
_NEVER = constant(1 << 30)


@constexpr_function
def accumulator(columns):
    """Layout of a consumer's product: 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@constexpr_function
def shared(rows, columns, dtype):
    """Layout of a tile in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@constexpr_function
def flat():
    """Layout of numbers in a row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon_jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that open when ARRIVALS have come, and as many bytes as are expected."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), ARRIVALS)
    return barriers


@gluon_jit
def own_rows(tile, CONSUMER: gl.constexpr):
    """A consumer's 64 rows of a tile."""
    return tile.slice(CONSUMER * _ROWS, _ROWS, 0)


@gluon_jit
def load_tile(desc, document, row, head, barrier, room, column=0):
    """Start to copy a tile of a document's rows, from `column` on: zeros beyond its end."""
    place = ragged_place(document[0], document[1], row, head, column)
    tma_load(desc, place, barrier, room.reshape(desc.block_type.shape))


@gluon_jit
def load_numbers(desc, head, place, barrier, room):
    """Start to copy a number for each query of a tile."""
    tma_load(desc, [head, place], barrier, room.reshape([1, room.shape[0]]))


@constexpr_function
def _fours(COUNT):
    """Layout of a row of numbers for each column of an accumulator, in memory `in_fours`."""
    more = [[16 << bit] for bit in range((COUNT // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([[1], [2], *more], [[4], [8], [0], [0], [0]], [[0], [0]], [], [COUNT])


@gluon_jit
def load_columns(room, COUNT: gl.constexpr):
    """A number for each column of an accumulator: what lies `in_fours` in shared memory, in order."""
    numbers = room.load(_fours(COUNT)).reshape([COUNT // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([COUNT])
    return gl.convert_layout(numbers, gl.SliceLayout(0, accumulator(COUNT)))


@gluon_jit
def in_lines(x):
    """Of float32 [64, columns] rows of 32 numbers in an order of their own, in which a thread's are four in a row.

    In rows of an accumulator 4 threads write 32 bytes of each of 8 at once, whose places in shared memory collide two
    and two; in this order none do. Nothing moves: only the places have other names.
    """
    EIGHTS: gl.constexpr = x.shape[1] // 8
    threads = x.reshape([4, 2, 8, EIGHTS, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    return threads.reshape([x.shape[0] * x.shape[1] // LINE, LINE])


@gluon_jit
def out_of_lines(room, like):
    """What lies in shared memory `in_lines`, laid out as `like`."""
    EIGHTS: gl.constexpr = like.shape[1] // 8
    layout: gl.constexpr = in_lines(like).type.layout
    threads = room.load(layout).reshape([4, EIGHTS, 8, 4, 2, 2]).permute((0, 4, 2, 1, 3, 5))
    return gl.convert_layout(threads.reshape(like.shape), like.type.layout)


@gluon_jit
def weights_again(scores, lse, i, keys, masked, settings, F: gl.constexpr):
    """The softmax's weights again, [keys, queries], and the slope of the softcap."""
    key, key_count, shift = keys
    scale2, softcap, window = settings
    scores, bent = capped(scores, scale2, softcap, F.SOFTCAP)
    weights = gl.exp2(scores - lse[None, :])
    if masked:
        # Limits of a row less what changes with the tile: a comparison with a constant for each column.
        column = gl.arange(0, F.BM, layout=gl.SliceLayout(0, accumulator(F.BM)))
        fixed, of_thread = (column & ~6)[None, :], (column & 6)[None, :]
        ahead = shift + i * F.BM
        if F.CAUSAL:
            seen = fixed >= gl.where(key < key_count, key - ahead, _NEVER)[:, None] - of_thread
        else:
            seen = (key < key_count)[:, None]
        if F.WINDOW:
            seen = seen & (fixed < (key - ahead + window)[:, None] - of_thread)
        weights = gl.where(seen, weights, 0.0)
    slope = 1 - bent * bent if F.SOFTCAP else bent
    return weights, slope


@gluon_jit
def query_tiles(row, query_count, key_count, shift, window, F: gl.constexpr):
    """Tiles of queries that see a program's keys: from low masked, then full, masked again up to high."""
    last = gl.minimum(row + F.KEYS, key_count) - 1
    first_query = 0
    all_from = 0
    stop_query = query_count
    if F.CAUSAL:
        first_query = gl.maximum(row - shift, 0)
        all_from = gl.maximum(last - shift, 0)
    if F.WINDOW:
        stop_query = gl.minimum(query_count, last + window - shift)
    low = first_query // F.BM
    high = gl.maximum(gl.cdiv(gl.maximum(stop_query, 0), F.BM), low)
    full_low = gl.cdiv(all_from, F.BM)
    full_high = high
    if F.WINDOW:
        full_high = gl.maximum(row + window - shift, 0) // F.BM
    if row + F.KEYS > key_count:
        full_low = high
    return low, full_low, full_high, high


@gluon_jit
def key_tiles(
    row, queries, query_count, key_count, shift, window,
    BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Tiles of keys that a program's queries see, at least one: masked from low, then full, masked again up to high."""
    first = row + shift
    last = gl.minimum(row + queries, query_count) - 1 + shift
    key_high = key_count
    seen_by_all = key_count
    key_low = 0
    unseen_by_some = 0
    if CAUSAL:
        key_high = gl.minimum(key_count, last + 1)
        seen_by_all = gl.minimum(key_count, first + 1)
    if WINDOW:
        key_low = gl.maximum(first - window + 1, 0)
        unseen_by_some = gl.maximum(last - window + 1, 0)
    low = key_low // BN
    high = gl.maximum(gl.cdiv(gl.maximum(key_high, 0), BN), low + 1)
    full_high = gl.maximum(gl.minimum(gl.maximum(seen_by_all, 0) // BN, high), low)
    full_low = gl.minimum(gl.maximum(gl.cdiv(unseen_by_some, BN), low), full_high)
    return low, full_low, full_high, high


@gluon_jit
def seen_keys(query, key_count, first, window, BN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which of BN keys from `first` on queries see, [queries, keys]; positions counted from the document's first key.

    By limits of a row less what changes with the tile: a comparison with a constant for each column.
    """
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, accumulator(BN)))
    fixed, of_thread = (column & ~6)[None, :], (column & 6)[None, :]
    stop = gl.minimum(query + 1, key_count) - first if CAUSAL else query * 0 + key_count - first
    seen = fixed < stop[:, None] - of_thread
    if WINDOW:
        seen = seen & (fixed > (query - window - first)[:, None] - of_thread)
    return seen


@gluon_jit
def targets(pointer, token, head, heads, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """Addresses of [64, COLUMNS] in a dense [Tk, heads, WIDTH], and which columns there are."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulator(COLUMNS)))
    target = pointer + (token.to(gl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
    return target, (column < WIDTH)[None, :]


@gluon_jit
def write_rows(
    x, result, room, keys, row, head, heads,
    CONSUMER: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Write a consumer's 64 rows of a gradient, those beyond the document left out."""
    desc, pointer = result
    start, count = keys
    if F.FLOAT32:
        rows = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(COLUMNS)))
        target, there = targets(pointer, start + rows, head, heads, WIDTH, COLUMNS)
        gl.store(target, x, mask=(rows < count)[:, None] & there)
    else:
        own_rows(room, CONSUMER).store(x.to(room.dtype))
        fence_async_shared()
        source = room.reshape([1, 1, F.KEYS, 1, COLUMNS]).slice(CONSUMER * _ROWS, _ROWS, 2)
        tma_store(desc, ragged_place(start, count, row, head, 0), source)


@gluon_jit
def clear_keys(
    pointer, begin, tokens, head, heads, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """Zeros for a program's keys from token `begin` on, up to the end of the stream."""
    for first in range(begin, gl.minimum(begin + F.KEYS, tokens), _ROWS):
        token = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(COLUMNS)))
        target, there = targets(pointer, token, head, heads, WIDTH, COLUMNS)
        zeros = gl.full([_ROWS, COLUMNS], 0.0, pointer.dtype.element_ty, accumulator(COLUMNS))
        gl.store(target, zeros, mask=(token < tokens)[:, None] & there)
