"""Attention's backward on Hopper for heads above 128 in Gluon, in two kernels of which none adds to another's.

The gradients of 64 keys and 64 values with 256 features each fill the registers of two groups of four warps: one group,
the consumer of values, finds weights P^T and dV += P^T dO, the other takes these weights, in 16 bits, and finds dS^T
and dK += dS^T Q. A second kernel has 64 queries a consumer and finds dQ += dS K as keys stream by. That is 7 products
for 5, but they need no sums in global memory, and have the same bits every time.

Consumers overlap as the forward's do: products of the tile before run beside the softmax of this one.
"""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL, capped, places
from gapless.kernels.attention.hopper_shared import (
    accumulator,
    clear_keys,
    feed_keys,
    flat,
    key_tiles,
    load_tile,
    new_barriers,
    query_tiles,
    seen_keys,
    shared,
    weights_again,
    write_rows,
)
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
    warpgroup_mma,
    warpgroup_mma_wait,
)

_ROWS = constant(64)
_MEETING = constant(9)
_INF = constant(float("inf"))


@gluon_jit
def _start_scores(left, right):
    """Start the product of 64 rows with 64 rows."""
    zeros = gl.full([_ROWS, _ROWS], 0.0, gl.float32, accumulator(_ROWS))
    return warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _operand(x, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """A left factor from registers."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, accumulator(COLUMNS), 2))


# ---- gradients of keys and values ----


@gluon_jit
def _value_step(state, n, i, rooms, barriers, keys, full, settings, FIRST: gl.constexpr, F: gl.constexpr):
    """Weights of the n-th tile of queries, the i-th of its head, beside the product of those before.

    Handed to the other consumer, times the slope of the softcap.
    """
    grad_v, weights = state
    q, k, grad, lse, shared_weights = rooms
    q_full, q_empty, grad_full, grad_empty, p_full, p_empty = barriers
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(q_full.index(slot), n // F.STAGES & 1)
    scores = _start_scores(k, q.index(slot))
    if FIRST:
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        p = _operand(weights, grad.dtype, F.V)
        mbarrier.wait(grad_full.index(before), (n - 1) // F.STAGES & 1)
        grad_v = warpgroup_mma(p, grad.index(before), grad_v, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
    numbers = lse.index(slot).load(gl.SliceLayout(0, accumulator(F.BM)))
    mbarrier.arrive(q_empty.index(slot))
    masked = (i < full[0]) | (i >= full[1])
    weights, slope = weights_again(scores, numbers, i, keys, masked, settings, F)
    mbarrier.wait(p_empty.index(n % 2), (n // 2 & 1) ^ 1)
    shared_weights.index(n % 2).store((weights * slope if F.SOFTCAP else weights).to(grad.dtype))
    mbarrier.arrive(p_full.index(n % 2))
    if not FIRST:
        grad_v, _ = warpgroup_mma_wait(0, deps=[grad_v, p])  # pyrefly: ignore
        mbarrier.arrive(grad_empty.index(before))
    return grad_v, weights


@gluon_jit
def _key_step(state, n, rooms, barriers, FIRST: gl.constexpr, F: gl.constexpr):
    """Gradients of the scores of the n-th tile, beside the product of those before with their queries."""
    grad_k, grad_scores = state
    q, v, grad, delta, shared_weights = rooms
    q_full, q_empty, grad_full, grad_empty, p_full, p_empty = barriers
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(F.BM))
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(grad_full.index(slot), n // F.STAGES & 1)
    products = _start_scores(v, grad.index(slot))
    if FIRST:
        products = warpgroup_mma_wait(0, deps=[products])
    else:
        ds = _operand(grad_scores, q.dtype, F.D)
        mbarrier.wait(q_full.index(before), (n - 1) // F.STAGES & 1)
        grad_k = warpgroup_mma(ds, q.index(before), grad_k, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
    products = products - delta.index(slot).load(columns)[None, :]
    mbarrier.arrive(grad_empty.index(slot))
    mbarrier.wait(p_full.index(n % 2), n // 2 & 1)
    weights = shared_weights.index(n % 2).load(accumulator(F.BM)).to(gl.float32)
    grad_scores = weights * products
    mbarrier.arrive(p_empty.index(n % 2))
    if not FIRST:
        grad_k, _ = warpgroup_mma_wait(0, deps=[grad_k, ds])  # pyrefly: ignore
        mbarrier.arrive(q_empty.index(before))
    return grad_k, grad_scores


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
    COLUMNS: gl.constexpr = F.V if VALUES else F.D
    streams = (q_full, q_empty, grad_full, grad_empty, p_full, p_empty)
    of_keys = (row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(F.BM))), keys[1], shift)
    sums = gl.full([_ROWS, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    count = high - low
    total = together * count
    mbarrier.wait(k_full, 0)
    if total > 0:
        state = (sums, gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM)))
        last = total - 1
        if VALUES:
            mine = (q, k, grad, lse, shared_weights)
            state = _value_step(state, 0, low, mine, streams, of_keys, full, numbers, True, F)
            for n in range(1, total):
                state = _value_step(state, n, low + n % count, mine, streams, of_keys, full, numbers, False, F)
            sums, x = state
            mbarrier.wait(grad_full.index(last % F.STAGES), last // F.STAGES & 1)
            right = grad.index(last % F.STAGES)
        else:
            own = (q, v, grad, delta, shared_weights)
            state = _key_step(state, 0, own, streams, True, F)
            for n in range(1, total):
                state = _key_step(state, n, own, streams, False, F)
            sums, x = state
            mbarrier.wait(q_full.index(last % F.STAGES), last // F.STAGES & 1)
            right = q.index(last % F.STAGES)
        operand = _operand(x, q.dtype, COLUMNS)
        sums = warpgroup_mma(operand, right, sums, is_async=True)
        sums, _ = warpgroup_mma_wait(0, deps=[sums, operand])
    named_barrier_wait(_MEETING, 256)  # nobody reads keys and values any more: gradients take their place
    if VALUES:
        write_rows(sums, results[1], v, keys, row, head, 0, F.V_HEAD, F.V, F)
    else:
        write_rows(sums * scale, results[0], k, keys, row, head, 0, F.D_HEAD, F.D, F)
    tma_store_wait(0)


@gluon_jit
def _gather_for_keys(descs, results, queries, keys, padded, row, shift, heads, numbers, F: gl.constexpr):
    """Set up shared memory, and let the warps go their ways."""
    dtype: gl.constexpr = descs[0].dtype
    head, kv_head, result, together = heads
    q = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.D], shared(F.BM, F.D, dtype))
    grad = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.V], shared(F.BM, F.V, dtype))
    k = gl.allocate_shared_memory(dtype, [_ROWS, F.D], shared(_ROWS, F.D, dtype))
    v = gl.allocate_shared_memory(dtype, [_ROWS, F.V], shared(_ROWS, F.V, dtype))
    shared_weights = gl.allocate_shared_memory(dtype, [2, _ROWS, F.BM], shared(_ROWS, F.BM, dtype))
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
        [(_consume_for_keys, (True, taken, F)), (_consume_for_keys, (False, taken, F)), (feed_keys, (fed, False, F))],
        [4, 1],
        [F.REGISTERS, F.FEW_REGISTERS],
    )


@gluon_jit(do_not_specialize=PER_BATCH)
def hopper_wide_keys(
    q, k, v, grad, lse, delta, grad_k_desc, grad_v_desc, grad_k, grad_v,
    table, q_start, q_used, q_offset, k_start, k_used, k_offset, scale, scale2, softcap, window,
    k_tokens, groups, together, F: gl.constexpr,
):  # fmt: skip
    """A tile of the backward table, for `together` query heads of one kv head; tiles of the tail are cleared.

    Programs are (result head of a section, row of the table, section). Descriptors: q, k, v, grad, grad_k_desc and
    grad_v_desc ragged; lse and delta [N, rows].
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
            (q, k, v, grad, lse, delta), ((grad_k_desc, grad_k), (grad_v_desc, grad_v)),
            (start, query_count), (key_start, key_count), (start // F.BM + document) * F.BM, begin - key_start, shift,
            (head, head // groups, result, together), (scale, scale2, softcap, window), F,
        )  # fmt: skip
    elif document == TAIL:
        clear_keys(grad_k, begin, k_tokens, result, F.D_HEAD, F.D, F)
        clear_keys(grad_v, begin, k_tokens, result, F.V_HEAD, F.V, F)


# ---- gradients of queries ----


@gluon_jit
def _feed_queries(fed, F: gl.constexpr):
    """Copy in both consumers' queries and gradients, then tiles of keys and values."""
    descs, rooms, barriers, queries, keys, row, heads, tiles = fed
    q_desc, k_desc, v_desc, grad_desc = descs
    q, k, v, grad = rooms
    q_full, k_full, k_empty, v_full, v_empty = barriers
    head, kv_head = heads
    low, high = tiles
    for consumer in gl.static_range(2):
        full = q_full.index(consumer)
        mbarrier.expect(full, q_desc.block_type.nbytes + grad_desc.block_type.nbytes)
        load_tile(q_desc, queries, row + consumer * _ROWS, head, full, q.index(consumer))
        load_tile(grad_desc, queries, row + consumer * _ROWS, head, full, grad.index(consumer))
    for n in range(0, high - low):
        slot = n % F.STAGES
        mbarrier.wait(k_empty.index(slot), (n // F.STAGES & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        load_tile(k_desc, keys, (low + n) * _ROWS, kv_head, k_full.index(slot), k.index(slot))
        # There is room for one tile of values: done with once their product is.
        mbarrier.wait(v_empty, (n & 1) ^ 1)
        mbarrier.expect(v_full, v_desc.block_type.nbytes)
        load_tile(v_desc, keys, (low + n) * _ROWS, kv_head, v_full, v)


@gluon_jit
def _query_step(state, n, j, rooms, barriers, rows, full, settings, FIRST: gl.constexpr, F: gl.constexpr):
    """Gradients of the scores of the j-th tile of keys, the n-th in all, beside the product of those before."""
    grad_q, grad_scores = state
    q, k, v, grad = rooms
    k_full, k_empty, v_full, v_empty = barriers
    query, lse, delta, key_count = rows
    scale2, softcap, window = settings
    slot = n % F.STAGES
    before = (n - 1) % F.STAGES
    mbarrier.wait(k_full.index(slot), n // F.STAGES & 1)
    scores = _start_scores(q, k.index(slot))
    mbarrier.wait(v_full, n & 1)
    products = _start_scores(grad, v)
    if FIRST:
        scores = warpgroup_mma_wait(1, deps=[scores])
    else:
        ds = _operand(grad_scores, q.dtype, F.D)
        grad_q = warpgroup_mma(ds, k.index(before), grad_q, is_async=True)
        scores = warpgroup_mma_wait(2, deps=[scores])
    scores, bent = capped(scores, scale2, softcap, F.SOFTCAP)
    weights = gl.exp2(scores - lse[:, None])
    if (j < full[0]) | (j >= full[1]):
        seen = seen_keys(query, key_count, j * _ROWS, window, _ROWS, F.CAUSAL, F.WINDOW)
        weights = gl.where(seen, weights, 0.0)
    products = warpgroup_mma_wait(0 if FIRST else 1, deps=[products])
    mbarrier.arrive(v_empty)
    grad_scores = weights * (products - delta[:, None])
    if F.SOFTCAP:
        grad_scores = grad_scores * (1 - bent * bent)
    if not FIRST:
        grad_q, _ = warpgroup_mma_wait(0, deps=[grad_q, ds])  # pyrefly: ignore
        mbarrier.arrive(k_empty.index(before))
    return grad_q, grad_scores


@gluon_jit
def _consume_for_queries(CONSUMER: gl.constexpr, taken, F: gl.constexpr):
    """The gradient of a consumer's 64 queries from all keys that they see."""
    desc, lse, delta, rooms, barriers, queries, key_count, padded, row, shift, head, tiles, numbers = taken
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
        gl.load(lse + padded + rows, mask=there, other=_INF),
        gl.load(delta + padded + rows, mask=there, other=0.0),
        key_count,
    )
    mine, own = (q.index(CONSUMER), k, v, grad.index(CONSUMER)), (k_full, k_empty, v_full, v_empty)
    mbarrier.wait(q_full.index(CONSUMER), 0)
    state = (
        gl.full([_ROWS, F.D], 0.0, gl.float32, accumulator(F.D)),
        gl.full([_ROWS, _ROWS], 0.0, gl.float32, accumulator(_ROWS)),
    )
    state = _query_step(state, 0, low, mine, own, of_rows, full, settings, True, F)
    for n in range(1, high - low):
        state = _query_step(state, n, low + n, mine, own, of_rows, full, settings, False, F)
    grad_q, grad_scores = state
    ds = _operand(grad_scores, q.dtype, F.D)
    grad_q = warpgroup_mma(ds, k.index((high - low - 1) % F.STAGES), grad_q, is_async=True)
    grad_q, _ = warpgroup_mma_wait(0, deps=[grad_q, ds])
    room = q.index(CONSUMER)
    room.store((grad_q * scale).to(q.dtype))
    fence_async_shared()
    tma_store(desc, ragged_place(start, count, row, head, 0), room.reshape([1, 1, _ROWS, 1, F.D]))
    tma_store_wait(0)


@gluon_jit
def _gather_for_queries(descs, desc, lse, delta, queries, keys, padded, row, shift, heads, numbers, F: gl.constexpr):
    """Set up shared memory, and let the warps go their ways."""
    dtype: gl.constexpr = descs[0].dtype
    q = gl.allocate_shared_memory(dtype, [2, _ROWS, F.D], shared(_ROWS, F.D, dtype))
    grad = gl.allocate_shared_memory(dtype, [2, _ROWS, F.V], shared(_ROWS, F.V, dtype))
    k = gl.allocate_shared_memory(dtype, [F.STAGES, _ROWS, F.D], shared(_ROWS, F.D, dtype))
    v = gl.allocate_shared_memory(dtype, [_ROWS, F.V], shared(_ROWS, F.V, dtype))
    q_full = new_barriers(2, 1)
    k_full, k_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    v_full, v_empty = new_barriers(1, 1).index(0), new_barriers(1, 2).index(0)
    tiles = key_tiles(row, 2 * _ROWS, queries[1], keys[1], shift, numbers[3], _ROWS, F.CAUSAL, F.WINDOW)
    low, _, _, high = tiles
    barriers, rooms = (q_full, k_full, k_empty, v_full, v_empty), (q, k, v, grad)
    taken = (desc, lse, delta, rooms, barriers, queries, keys[1], padded, row, shift, heads[0], tiles, numbers)
    fed = (descs, rooms, barriers, queries, keys, row, heads, (low, high))
    gl.warp_specialize(
        [(_consume_for_queries, (0, taken, F)), (_consume_for_queries, (1, taken, F)), (_feed_queries, (fed, F))],
        [4, 1],
        [F.REGISTERS, F.FEW_REGISTERS],
    )


@gluon_jit
def _clear_queries(desc, begin, tokens, head, F: gl.constexpr):
    """Zeros for a program's queries from token `begin` on, up to the end of the stream."""
    room = gl.allocate_shared_memory(desc.dtype, [_ROWS, F.D], shared(_ROWS, F.D, desc.dtype))
    room.store(gl.full([_ROWS, F.D], 0.0, desc.dtype, accumulator(F.D)))
    fence_async_shared()
    for consumer in gl.static_range(2):
        place = ragged_place(0, tokens, begin + consumer * _ROWS, head, 0)
        tma_store(desc, place, room.reshape([1, 1, _ROWS, 1, F.D]))
    tma_store_wait(0)


@gluon_jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_wide_queries(
    q, k, v, grad, grad_q, lse, delta, table, q_start, q_used, q_offset, k_start, k_used, k_offset,
    scale, scale2, softcap, window, tokens, groups, rows, F: gl.constexpr,
):  # fmt: skip
    """A tile of the forward table, of 128 queries, for one head; tiles of the tail are cleared.

    Programs are (head of a section, row of the table, section). Descriptors are ragged; lse and delta are [N, rows].
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
            (q, k, v, grad), grad_q, lse, delta, (start, query_count), (key_start, key_count), padded,
            begin - start, shift, (head, head // groups), (scale, scale2, softcap, window), F,
        )  # fmt: skip
    elif document == TAIL:
        _clear_queries(grad_q, begin, tokens, head, F)
