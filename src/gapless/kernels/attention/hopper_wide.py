"""Attention's backward on Hopper for heads above 128 in Gluon, in two kernels of which none adds to another's.

The gradients of 64 keys and 64 values with 256 features each fill the registers of two groups of four warps: one group,
the consumer of values, finds weights P^T and dV += P^T dO, the other takes these weights, in float32, and finds dS^T
and dK += dS^T Q. A second kernel has 64 queries a consumer and finds dQ += dS K as keys stream by. That is 7 products
for 5, but they need no sums in global memory, and have the same bits every time.

Consumers overlap as the forward's do: products of the tile before run beside the softmax of this one. Heads are in two
chunks as there, 192 = 128 + 64, see `hopper_chunks`: each product above is of one or two parts.
"""

from __future__ import annotations

from typing import NamedTuple

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL, capped, places
from gapless.kernels.attention.hopper_chunks import (
    at,
    load,
    load_chunks,
    new_tiles,
    no_sums,
    parts,
    start_scores,
    start_sums,
    tile_bytes,
    wait_for_sums,
)
from gapless.kernels.attention.hopper_shared import (
    LINE,
    accumulator,
    clear_keys,
    flat,
    in_lines,
    key_tiles,
    load_columns,
    load_numbers,
    new_barriers,
    out_of_lines,
    query_tiles,
    seen_keys,
    shared,
    targets,
    weights_again,
)
from gapless.kernels.attention.hopper_sums import in_fours
from gapless.kernels.gluon import (
    constant,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    named_barrier_wait,
    ragged_place,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)


class Form(NamedTuple):
    """What the kernels are compiled for."""

    BM: int
    """Queries of a tile."""
    KEYS: int
    """Keys of a program, or of a tile."""
    D0: int
    """Columns of queries and keys in the first chunk, and in the second, 0 if there is none."""
    D1: int
    V0: int
    """Likewise of values."""
    V1: int
    D_HEAD: int
    """The head dim of queries and keys; columns beyond it are zero."""
    V_HEAD: int
    STAGES: int
    """Tiles in shared memory of what streams by.

    A tile is read in two steps, its own and the next: with 3 there is room for the one after meanwhile.
    """
    VALUE_STAGES: int
    """Tiles of values where these stream by; they are read in one step."""
    CAUSAL: bool
    WINDOW: bool
    SOFTCAP: bool
    FLOAT32: bool
    """Whether the gradients of keys and values are written in float32, to be added up."""
    REGISTERS: int
    """Of a consumer's thread; the first consumer gets what is left."""
    FEW_REGISTERS: int
    """Of a producer's thread."""


_ROWS = constant(64)
_MEETING = constant(9)
_INF = constant(float("inf"))


@gluon_jit
def _operand(x, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """A left factor from registers."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, accumulator(COLUMNS), 2))


# ---- gradients of keys and values ----


@gluon_jit
def _feed_keys(fed, F: gl.constexpr):
    """Copy in keys and values, then tiles of queries and gradients, head after head."""
    descs, rooms, barriers, queries, keys, padded, row, heads, tiles = fed
    q_descs, k_descs, v_descs, grad_descs, lse_desc, delta_desc = descs
    q, k, v, grad, lse, delta = rooms
    k_full, q_full, q_empty, grad_full, grad_empty = barriers
    head, kv_head, together = heads
    low, high = tiles
    mbarrier.expect(k_full, tile_bytes(F.KEYS, F.D0, F.D1) + tile_bytes(F.KEYS, F.V0, F.V1))
    load_chunks(k_descs, keys, row, kv_head, k_full, k, F.D1)
    load_chunks(v_descs, keys, row, kv_head, k_full, v, F.V1)
    n = 0
    for other in range(together):
        for i in range(low, high):
            slot = n % F.STAGES
            # The first round finds all slots empty: the phase before the first counts as over.
            phase = (n // F.STAGES & 1) ^ 1
            place = padded + i * F.BM
            mbarrier.wait(q_empty.index(slot), phase)
            mbarrier.expect(q_full.index(slot), tile_bytes(F.BM, F.D0, F.D1) + lse_desc.block_type.nbytes)
            load_chunks(q_descs, queries, i * F.BM, head + other, q_full.index(slot), at(q, slot), F.D1)
            load_numbers(lse_desc, head + other, place, q_full.index(slot), lse.index(slot))
            mbarrier.wait(grad_empty.index(slot), phase)
            mbarrier.expect(grad_full.index(slot), tile_bytes(F.BM, F.V0, F.V1) + delta_desc.block_type.nbytes)
            load_chunks(grad_descs, queries, i * F.BM, head + other, grad_full.index(slot), at(grad, slot), F.V1)
            load_numbers(delta_desc, head + other, place, grad_full.index(slot), delta.index(slot))
            n += 1


@gluon_jit
def _value_step(state, n, i, rooms, barriers, keys, full, settings, FIRST: gl.constexpr, F: gl.constexpr):
    """Weights of the n-th tile of queries, the i-th of its head, beside the product of those before.

    Handed to the other consumer, times the slope of the softcap.
    """
    grad_v0, grad_v1, weights = state
    q, k, grad, lse, shared_weights = rooms
    q_full, q_empty, grad_full, grad_empty, p_full, p_empty = barriers
    dtype: gl.constexpr = q[0].dtype
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(q_full.index(slot), n // F.STAGES & 1)
    scores = start_scores(k, at(q, slot), F.D1)
    if FIRST:
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        p = _operand(weights, dtype, F.V0)
        mbarrier.wait(grad_full.index(before), (n - 1) // F.STAGES & 1)
        grad_v0, grad_v1 = start_sums(p, at(grad, before), grad_v0, grad_v1, F.V1)
        scores = warpgroup_mma_wait(parts(F.V1), deps=[scores])
    numbers = load_columns(lse.index(slot), F.BM)
    mbarrier.arrive(q_empty.index(slot))
    masked = (i < full[0]) | (i >= full[1])
    weights, slope = weights_again(scores, numbers, i, keys, masked, settings, F)
    mbarrier.wait(p_empty.index(n % 2), (n // 2 & 1) ^ 1)
    shared_weights.index(n % 2).store(in_lines(weights * slope if F.SOFTCAP else weights))
    mbarrier.arrive(p_full.index(n % 2))
    if not FIRST:
        grad_v0, grad_v1 = wait_for_sums(p, grad_v0, grad_v1, F.V1)  # pyrefly: ignore
        mbarrier.arrive(grad_empty.index(before))
    return grad_v0, grad_v1, weights


@gluon_jit
def _key_step(state, n, rooms, barriers, FIRST: gl.constexpr, F: gl.constexpr):
    """Gradients of the scores of the n-th tile, beside the product of those before with their queries."""
    grad_k0, grad_k1, grad_scores = state
    q, v, grad, minus_delta, shared_weights = rooms
    q_full, q_empty, grad_full, grad_empty, p_full, p_empty = barriers
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(grad_full.index(slot), n // F.STAGES & 1)
    products = start_scores(v, at(grad, slot), F.V1)
    if FIRST:
        products = warpgroup_mma_wait(0, deps=[products])
    else:
        ds = _operand(grad_scores, q[0].dtype, F.D0)
        mbarrier.wait(q_full.index(before), (n - 1) // F.STAGES & 1)
        grad_k0, grad_k1 = start_sums(ds, at(q, before), grad_k0, grad_k1, F.D1)
        products = warpgroup_mma_wait(parts(F.D1), deps=[products])
    products = products + load_columns(minus_delta.index(slot), F.BM)[None, :]
    mbarrier.arrive(grad_empty.index(slot))
    mbarrier.wait(p_full.index(n % 2), n // 2 & 1)
    weights = out_of_lines(shared_weights.index(n % 2), products)
    grad_scores = weights * products
    mbarrier.arrive(p_empty.index(n % 2))
    if not FIRST:
        grad_k0, grad_k1 = wait_for_sums(ds, grad_k0, grad_k1, F.D1)  # pyrefly: ignore
        mbarrier.arrive(q_empty.index(before))
    return grad_k0, grad_k1, grad_scores


@gluon_jit
def _write_chunk(
    x, desc, pointer, room, keys, row, head,
    FIRST: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Write columns from FIRST on of a program's rows of a gradient, those beyond the document left out."""
    start, count = keys
    if F.FLOAT32:
        rows = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(COLUMNS)))
        heads = gl.num_programs(0) * gl.num_programs(2)
        target, there = targets(pointer + FIRST, start + rows, head, heads, WIDTH, COLUMNS)
        if FIRST > 0:
            column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulator(COLUMNS)))
            there = (column < WIDTH - FIRST)[None, :]
        gl.store(target, x, mask=(rows < count)[:, None] & there)
    else:
        room.store(x.to(room.dtype))
        fence_async_shared()
        tma_store(desc, ragged_place(start, count, row, head, FIRST), room.reshape([1, 1, _ROWS, 1, COLUMNS]))


@gluon_jit
def _write(
    sums, result, room, keys, row, head, WIDTH: gl.constexpr, C0: gl.constexpr, C1: gl.constexpr, F: gl.constexpr
):
    """Write both chunks of a gradient."""
    descs, pointer = result
    _write_chunk(sums[0], descs[0], pointer, room[0], keys, row, head, 0, WIDTH, C0, F)
    if C1 > 0:
        _write_chunk(sums[1], descs[1], pointer, room[1], keys, row, head, C0, WIDTH, C1, F)


@gluon_jit
def _consume_for_keys(VALUES: gl.constexpr, taken, F: gl.constexpr):
    """The gradient of a program's values, or of its keys, from all queries that see them, head after head."""
    results, rooms, barriers, keys, row, shift, heads, tiles, settings = taken
    q, k, v, grad, lse, delta, shared_weights = rooms
    k_full, q_full, q_empty, grad_full, grad_empty, p_full, p_empty = barriers
    head, together = heads
    low, full_low, full_high, high = tiles
    scale, scale2, softcap, window = settings
    full, numbers = (full_low, full_high), (scale2, softcap, window)
    C0: gl.constexpr = F.V0 if VALUES else F.D0
    C1: gl.constexpr = F.V1 if VALUES else F.D1
    streams = (q_full, q_empty, grad_full, grad_empty, p_full, p_empty)
    of_keys = (row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(F.BM))), keys[1], shift)
    sums0, sums1 = no_sums(_ROWS, C0, C1)
    count = high - low
    total = together * count
    mbarrier.wait(k_full, 0)
    if total > 0:
        state = (sums0, sums1, gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM)))
        last = total - 1
        if VALUES:
            mine = (q, k, grad, lse, shared_weights)
            state = _value_step(state, 0, low, mine, streams, of_keys, full, numbers, True, F)
            for n in range(1, total):
                state = _value_step(state, n, low + n % count, mine, streams, of_keys, full, numbers, False, F)
            sums0, sums1, x = state
            mbarrier.wait(grad_full.index(last % F.STAGES), last // F.STAGES & 1)
            right = at(grad, last % F.STAGES)
        else:
            own = (q, v, grad, delta, shared_weights)
            state = _key_step(state, 0, own, streams, True, F)
            for n in range(1, total):
                state = _key_step(state, n, own, streams, False, F)
            sums0, sums1, x = state
            mbarrier.wait(q_full.index(last % F.STAGES), last // F.STAGES & 1)
            right = at(q, last % F.STAGES)
        operand = _operand(x, q[0].dtype, C0)
        sums0, sums1 = start_sums(operand, right, sums0, sums1, C1)
        sums0, sums1 = wait_for_sums(operand, sums0, sums1, C1)
    named_barrier_wait(_MEETING, 256)  # nobody reads keys and values any more: gradients take their place
    if VALUES:
        _write((sums0, sums1), results[1], v, keys, row, head, F.V_HEAD, C0, C1, F)
    else:
        _write((sums0 * scale, sums1 * scale), results[0], k, keys, row, head, F.D_HEAD, C0, C1, F)
    tma_store_wait(0)


@gluon_jit
def _gather_for_keys(descs, results, queries, keys, padded, row, shift, heads, numbers, F: gl.constexpr):
    """Set up shared memory, and let the warps go their ways."""
    dtype: gl.constexpr = descs[0][0].dtype
    head, kv_head, result, together = heads
    q = new_tiles(dtype, F.STAGES, F.BM, F.D0, F.D1)
    grad = new_tiles(dtype, F.STAGES, F.BM, F.V0, F.V1)
    k = at(new_tiles(dtype, 1, _ROWS, F.D0, F.D1), 0)
    v = at(new_tiles(dtype, 1, _ROWS, F.V0, F.V1), 0)
    shared_weights = gl.allocate_shared_memory(gl.float32, [2, 2 * F.BM, LINE], shared(2 * F.BM, LINE, gl.float32))
    lse = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    delta = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    k_full = new_barriers(1, 1).index(0)
    q_full, q_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    grad_full, grad_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    p_full, p_empty = new_barriers(2, 1), new_barriers(2, 1)
    scale, scale2, softcap, window = numbers
    tiles = query_tiles(row, queries[1], keys[1], shift, window, F)
    low, _, _, high = tiles
    barriers, rooms = (k_full, q_full, q_empty, grad_full, grad_empty), (q, k, v, grad, lse, delta)
    own_rooms = (q, k, v, grad, lse, delta, shared_weights)
    own_barriers = (k_full, q_full, q_empty, grad_full, grad_empty, p_full, p_empty)
    taken = (results, own_rooms, own_barriers, keys, row, shift, (result, together), tiles, numbers)
    fed = (descs, rooms, barriers, queries, keys, padded, row, (head, kv_head, together), (low, high))
    gl.warp_specialize(
        [(_consume_for_keys, (True, taken, F)), (_consume_for_keys, (False, taken, F)), (_feed_keys, (fed, F))],
        [4, 1],
        [F.REGISTERS, F.FEW_REGISTERS],
    )


@gluon_jit(do_not_specialize=PER_BATCH)
def hopper_wide_keys(
    q0, q1, k0, k1, v0, v1, grad0, grad1, lse, delta, grad_k0, grad_k1, grad_v0, grad_v1, grad_k, grad_v,
    table, q_start, q_used, q_offset, k_start, k_used, k_offset, scale, scale2, softcap, window,
    k_tokens, groups, together, F: gl.constexpr,
):  # fmt: skip
    """A tile of the backward table, for `together` query heads of one kv head; tiles of the tail are cleared.

    Programs are (result head of a section, row of the table, section). Descriptors, for two chunks of columns, None
    where there is no second: of q, k, v, grad, and of grad_k and grad_v unless F.FLOAT32, ragged; lse and delta
    [N, rows].
    """
    result = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    head = result * together
    document = gl.load(table + 2 * gl.program_id(1))
    begin = gl.load(table + 2 * gl.program_id(1) + 1)
    if document >= 0:
        start, query_count, key_start, key_count, shift = places(
            document, q_start, q_used, q_offset, k_start, k_used, k_offset
        )
        _gather_for_keys(
            ((q0, q1), (k0, k1), (v0, v1), (grad0, grad1), lse, delta),
            (((grad_k0, grad_k1), grad_k), ((grad_v0, grad_v1), grad_v)),
            (start, query_count), (key_start, key_count), (start // F.BM + document) * F.BM, begin - key_start, shift,
            (head, head // groups, result, together), (scale, scale2, softcap, window), F,
        )  # fmt: skip
    elif document == TAIL:
        heads = gl.num_programs(0) * gl.num_programs(2)
        clear_keys(grad_k, begin, k_tokens, result, heads, F.D_HEAD, F.D0 * parts(F.D1), F)
        clear_keys(grad_v, begin, k_tokens, result, heads, F.V_HEAD, F.V0 * parts(F.V1), F)


# ---- gradients of queries ----


@gluon_jit
def _feed_queries(fed, F: gl.constexpr):
    """Copy in both consumers' queries and gradients, then tiles of keys and values."""
    descs, rooms, barriers, queries, keys, row, heads, tiles = fed
    q_descs, k_descs, v_descs, grad_descs = descs
    q, k, v, grad = rooms
    q_full, k_full, k_empty, v_full, v_empty = barriers
    head, kv_head = heads
    low, high = tiles
    for consumer in gl.static_range(2):
        full = q_full.index(consumer)
        mbarrier.expect(full, tile_bytes(_ROWS, F.D0, F.D1) + tile_bytes(_ROWS, F.V0, F.V1))
        load_chunks(q_descs, queries, row + consumer * _ROWS, head, full, at(q, consumer), F.D1)
        load_chunks(grad_descs, queries, row + consumer * _ROWS, head, full, at(grad, consumer), F.V1)
    for n in range(0, high - low):
        slot = n % F.STAGES
        mbarrier.wait(k_empty.index(slot), (n // F.STAGES & 1) ^ 1)
        load(k_descs, keys, (low + n) * _ROWS, kv_head, k_full.index(slot), at(k, slot), F.D1)
        slot = n % F.VALUE_STAGES
        mbarrier.wait(v_empty.index(slot), (n // F.VALUE_STAGES & 1) ^ 1)
        load(v_descs, keys, (low + n) * _ROWS, kv_head, v_full.index(slot), at(v, slot), F.V1)


@gluon_jit
def _query_step(
    state, n, j, rooms, barriers, rows, full, settings,
    CONSUMER: gl.constexpr, FIRST: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Gradients of the scores of the j-th tile of keys, the n-th in all, beside the product of those before."""
    grad_q0, grad_q1, grad_scores = state
    q, k, v, grad = rooms
    k_full, k_empty, v_full, v_empty = barriers
    query, lse, minus_delta, key_count = rows
    # An index that the compiler does not know: descriptors are found anew in every step, in uniform registers.
    zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    own = CONSUMER + zero
    q, grad = at(q, own), at(grad, own)
    scale2, softcap, window = settings
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(k_full.index(slot), n // F.STAGES & 1)
    scores = start_scores(q, at(k, slot), F.D1)
    value = n % F.VALUE_STAGES
    mbarrier.wait(v_full.index(value), n // F.VALUE_STAGES & 1)
    products = start_scores(grad, at(v, value), F.V1)
    if FIRST:
        scores = warpgroup_mma_wait(parts(F.V1), deps=[scores])
    else:
        ds = _operand(grad_scores, q[0].dtype, F.D0)
        grad_q0, grad_q1 = start_sums(ds, at(k, before), grad_q0, grad_q1, F.D1)
        scores = warpgroup_mma_wait(parts(F.V1) + parts(F.D1), deps=[scores])
    scores, bent = capped(scores, scale2, softcap, F.SOFTCAP)
    weights = gl.exp2(scores - lse[:, None])
    if (j < full[0]) | (j >= full[1]):
        seen = seen_keys(query, key_count, j * _ROWS, window, _ROWS, F.CAUSAL, F.WINDOW)
        weights = gl.where(seen, weights, 0.0)
    products = warpgroup_mma_wait(0 if FIRST else parts(F.D1), deps=[products])
    mbarrier.arrive(v_empty.index(value))
    grad_scores = weights * (products + minus_delta[:, None])
    if F.SOFTCAP:
        grad_scores = grad_scores * (1 - bent * bent)
    if not FIRST:
        grad_q0, grad_q1 = wait_for_sums(ds, grad_q0, grad_q1, F.D1)  # pyrefly: ignore
        mbarrier.arrive(k_empty.index(before))
    return grad_q0, grad_q1, grad_scores


@gluon_jit
def _put_queries(x0, x1, room, F: gl.constexpr):
    """Both chunks into shared memory, for TMA to take."""
    room[0].store(x0.to(room[0].dtype))
    if F.D1 > 0:
        room[1].store(x1.to(room[0].dtype))
    fence_async_shared()


@gluon_jit
def _send_queries(descs, room, queries, row, head, F: gl.constexpr):
    """Start to write 64 rows of the queries' gradient, those beyond the document left out."""
    start, count = queries
    tma_store(descs[0], ragged_place(start, count, row, head, 0), room[0].reshape([1, 1, _ROWS, 1, F.D0]))
    if F.D1 > 0:
        tma_store(descs[1], ragged_place(start, count, row, head, F.D0), room[1].reshape([1, 1, _ROWS, 1, F.D1]))


@gluon_jit
def _consume_for_queries(CONSUMER: gl.constexpr, taken, F: gl.constexpr):
    """The gradient of a consumer's 64 queries from all keys that they see."""
    descs, lse, delta, rooms, barriers, queries, key_count, padded, row, shift, head, tiles, numbers = taken
    q, k, v, grad = rooms
    q_full, k_full, k_empty, v_full, v_empty = barriers
    start, count = queries
    low, full_low, full_high, high = tiles
    scale, scale2, softcap, window = numbers
    full, settings = (full_low, full_high), (scale2, softcap, window)
    row += CONSUMER * _ROWS
    rows = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(_ROWS)))
    there = rows < count
    of_rows = (
        rows + shift,
        gl.load(lse + padded + in_fours(rows), mask=there, other=_INF),
        gl.load(delta + padded + in_fours(rows), mask=there, other=0.0),
        key_count,
    )
    mine, own = (q, k, v, grad), (k_full, k_empty, v_full, v_empty)
    mbarrier.wait(q_full.index(CONSUMER), 0)
    grad_q0, grad_q1 = no_sums(_ROWS, F.D0, F.D1)
    state = (grad_q0, grad_q1, gl.full([_ROWS, _ROWS], 0.0, gl.float32, accumulator(_ROWS)))
    state = _query_step(state, 0, low, mine, own, of_rows, full, settings, CONSUMER, True, F)
    for n in range(1, high - low):
        state = _query_step(state, n, low + n, mine, own, of_rows, full, settings, CONSUMER, False, F)
    grad_q0, grad_q1, grad_scores = state
    ds = _operand(grad_scores, q[0].dtype, F.D0)
    grad_q0, grad_q1 = start_sums(ds, at(k, (high - low - 1) % F.STAGES), grad_q0, grad_q1, F.D1)
    grad_q0, grad_q1 = wait_for_sums(ds, grad_q0, grad_q1, F.D1)
    room = at(q, CONSUMER)
    _put_queries(grad_q0 * scale, grad_q1 * scale, room, F)
    _send_queries(descs, room, queries, row, head, F)
    tma_store_wait(0)


@gluon_jit
def _gather_for_queries(descs, results, lse, delta, queries, keys, padded, row, shift, heads, numbers, F: gl.constexpr):
    """Set up shared memory, and let the warps go their ways."""
    dtype: gl.constexpr = descs[0][0].dtype
    q = new_tiles(dtype, 2, _ROWS, F.D0, F.D1)
    grad = new_tiles(dtype, 2, _ROWS, F.V0, F.V1)
    k = new_tiles(dtype, F.STAGES, _ROWS, F.D0, F.D1)
    v = new_tiles(dtype, F.VALUE_STAGES, _ROWS, F.V0, F.V1)
    q_full = new_barriers(2, 1)
    k_full, k_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    v_full, v_empty = new_barriers(F.VALUE_STAGES, 1), new_barriers(F.VALUE_STAGES, 2)
    tiles = key_tiles(row, 2 * _ROWS, queries[1], keys[1], shift, numbers[3], _ROWS, F.CAUSAL, F.WINDOW)
    low, _, _, high = tiles
    barriers, rooms = (q_full, k_full, k_empty, v_full, v_empty), (q, k, v, grad)
    taken = (results, lse, delta, rooms, barriers, queries, keys[1], padded, row, shift, heads[0], tiles, numbers)
    fed = (descs, rooms, barriers, queries, keys, row, heads, (low, high))
    gl.warp_specialize(
        [(_consume_for_queries, (0, taken, F)), (_consume_for_queries, (1, taken, F)), (_feed_queries, (fed, F))],
        [4, 1],
        [F.REGISTERS, F.FEW_REGISTERS],
    )


@gluon_jit
def _clear_queries(descs, begin, tokens, head, F: gl.constexpr):
    """Zeros for a program's queries from token `begin` on, up to the end of the stream."""
    room = at(new_tiles(descs[0].dtype, 1, _ROWS, F.D0, F.D1), 0)
    zeros0, zeros1 = no_sums(_ROWS, F.D0, F.D1)
    _put_queries(zeros0, zeros1, room, F)
    for consumer in gl.static_range(2):
        _send_queries(descs, room, (0, tokens), begin + consumer * _ROWS, head, F)
    tma_store_wait(0)


@gluon_jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_wide_queries(
    q0, q1, k0, k1, v0, v1, grad0, grad1, grad_q0, grad_q1, lse, delta, table, q_start, q_used, q_offset, k_start,
    k_used, k_offset, scale, scale2, softcap, window, tokens, groups, rows, F: gl.constexpr,
):  # fmt: skip
    """A tile of the forward table, of 128 queries, for one head; tiles of the tail are cleared.

    Programs are (head of a section, row of the table, section). Descriptors, of q, k, v, grad and grad_q, are ragged,
    for two chunks of columns, None where there is no second; lse and delta are [N, rows].
    """
    head = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    document = gl.load(table + 2 * gl.program_id(1))
    begin = gl.load(table + 2 * gl.program_id(1) + 1)
    if document >= 0:
        start, query_count, key_start, key_count, shift = places(
            document, q_start, q_used, q_offset, k_start, k_used, k_offset
        )
        padded = head.to(gl.int64) * rows + (start // F.BM + document) * F.BM
        _gather_for_queries(
            ((q0, q1), (k0, k1), (v0, v1), (grad0, grad1)), (grad_q0, grad_q1), lse, delta, (start, query_count),
            (key_start, key_count), padded, begin - start, shift, (head, head // groups),
            (scale, scale2, softcap, window), F,
        )  # fmt: skip
    elif document == TAIL:
        _clear_queries((grad_q0, grad_q1), begin, tokens, head, F)
