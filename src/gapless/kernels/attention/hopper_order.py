"""The order in which programs of attention's kernels for Hopper take tiles, and how their warps learn of them."""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import places
from gapless.kernels.attention.hopper_shared import new_barriers
from gapless.kernels.gluon import constant, gl, gluon_jit, mbarrier

END = constant(-3)
"""In place of a document: there are no more tiles."""
_FIELDS = constant(8)
_WARP = constant(32)


@gluon_jit
def look_up(number, order, documents):
    """A tile: document, first token, head, start and count of the queries, of the keys, and their offset.

    Numbers go through the heads of a section, the rows of the table, and sections. Without a document the last are 0.
    """
    table, rows, section = order
    size = section * rows
    rest = number % size
    row = rest // section
    head = number // size * section + rest % section
    document = gl.load(table + 2 * row)
    begin = gl.load(table + 2 * row + 1)
    start, query_count, key_start, key_count, shift = 0, 0, 0, 0, 0
    if document >= 0:
        start, query_count, key_start, key_count, shift = places(document, *documents)
    return document, begin, head, start, query_count, key_start, key_count, shift


@gluon_jit
def next_number(counter):
    """Take a number from a counter in memory, for a warp.

    All threads add, 1 or 0: of one thread's atomic under a predicate ptxas 12.8 made a branch, which in a kernel ended
    nowhere, so that 31 threads went on without the first, and all waited for ever.
    """
    lane = gl.arange(0, _WARP, layout=gl.BlockedLayout([1], [32], [1], [0]))
    number = gl.inline_asm_elementwise(
        """{
        .reg .b32 found;
        atom.global.add.u32 found, [$1], $2;
        shfl.sync.idx.b32 $0, found, 0, 31, 0xffffffff;
        }""",
        "=r,l,r", [counter + lane * 0, (lane == 0).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.max(number, 0)


@gluon_jit
def new_news(HEARERS: gl.constexpr):
    """Room for two tiles, of which a producer tells HEARERS groups of warps."""
    room = gl.allocate_shared_memory(gl.int32, [2 * _FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return room, new_barriers(2, 1), new_barriers(2, HEARERS)


@gluon_jit
def tell(tile, n, news):
    """The producer, of one warp, tells the n-th tile, so that nobody else waits for memory to look it up."""
    room, full, empty = news
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(empty.index(n % 2), (n // 2 & 1) ^ 1)
    for field in gl.static_range(_FIELDS):
        room.index(n % 2 * _FIELDS + field).store(gl.full([1], 0, gl.int32, layout) + tile[field])
    mbarrier.arrive(full.index(n % 2))


@gluon_jit
def tell_end(n, news):
    """There is no n-th tile."""
    tell((END, 0, 0, 0, 0, 0, 0, 0), n, news)


@gluon_jit
def _read(room, place, WARPS: gl.constexpr):
    return gl.max(room.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon_jit
def hear(n, news, WARPS: gl.constexpr):
    """A group of WARPS warps learns the n-th tile."""
    room, full, empty = news
    first = n % 2 * _FIELDS
    mbarrier.wait(full.index(n % 2), n // 2 & 1)
    tile = (
        _read(room, first, WARPS), _read(room, first + 1, WARPS), _read(room, first + 2, WARPS),
        _read(room, first + 3, WARPS), _read(room, first + 4, WARPS), _read(room, first + 5, WARPS),
        _read(room, first + 6, WARPS), _read(room, first + 7, WARPS),
    )  # fmt: skip
    mbarrier.arrive(empty.index(n % 2))
    return tile
