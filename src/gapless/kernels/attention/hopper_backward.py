"""Attention's backward for Hopper in Gluon (Shah et al. 2024, "FlashAttention-3", section 3 and appendix B.1).

A tile is of 128 keys and values, and the queries that see them stream by, with the output's gradient. Two groups of
four warps, the consumers, have 64 keys each and hold the gradients of their keys and values. For a tile of queries a
consumer finds transposed scores and weights P^T and the gradients dS^T of the scores, so that both are left factors
from registers, and puts dS^T into shared memory, where both consumers take it for half of dQ = dS K each, when they are
at the next tile of queries: five products in all, and the consumers may be most of a tile apart, so that one multiplies
while the other finds weights. The scores of the next queries are started before dQ is taken out of the accumulators.
One warp, the producer, copies in. Programs are persistent: see `hopper_order`.

Tiles of keys add to the same queries, to sums in global memory: two further warps, the senders, have the copy engine
add what the consumers leave in shared memory. Added from registers instead, four numbers at a time, it took up to 12 %
longer. For the same bits every time they add in turn: a counter for each tile of queries and head says how many have
added. Turns go by the index of the tile of keys, the order in which running programs take those of a document, so
nobody waits for one that is not there, however many programs run at a time.

The sums have queries in tiles of their own (`hopper_sums`), whatever the place of their document in the stream.
"""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL
from gapless.kernels.attention.hopper_order import END, hear, look_up, new_news, next_number, tell, tell_end
from gapless.kernels.attention.hopper_shared import (
    LINE,
    accumulator,
    clear_keys,
    flat,
    in_lines,
    load_columns,
    load_numbers,
    load_tile,
    new_barriers,
    own_rows,
    query_tiles,
    shared,
    weights_again,
    write_rows,
)
from gapless.kernels.gluon import (
    constant,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    named_barrier_wait,
    release_after_tma,
    tma_add,
    tma_store_wait,
    wait_for_value,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = 128
"""Keys of a program, of two consumers together."""

_ROWS = constant(64)
_MEETING = constant(9)


@constexpr_function
def _half(F):
    """Columns of a consumer's part of dQ."""
    return F.D // 2 if F.BM == 64 else F.D


@constexpr_function
def _lines(F):
    """Rows of the sums that a consumer's part of dQ takes."""
    return F.BM * F.D // 64


# ---- the order of tiles ----


@gluon_jit
def _extent(tile, window, F: gl.constexpr):
    """Row of a tile's first key in its document, and which tiles of queries see its keys: see `query_tiles`."""
    _, begin, _, _, query_count, key_start, key_count, shift = tile
    row = begin - key_start
    return row, query_tiles(row, query_count, key_count, shift, window, F)


@gluon_jit
def _first_place(tile, other, per_head, together, F: gl.constexpr):
    """Number of the first tile of a document's queries among the padded places of all heads."""
    document, _, result, start, _, _, _, _ = tile
    return (result * together + other) * per_head + start // F.BM + document


# ---- the producer ----


@gluon_jit
def _feed(fed, tile, base, met, F: gl.constexpr):
    """Copy in the keys and values of a tile, and tiles of queries and gradients, head after head; how many.

    `base` and `met` count tiles of queries, and tiles that met any, that were before. Consumers start scores a tile
    ahead: a tile ends with queries whose scores nobody reads, so queries are a slot further for each that was before.
    """
    descs, rooms, barriers, groups, together, window = fed
    q_desc, k_desc, v_desc, grad_desc, lse_desc, delta_desc = descs
    q, k, v, grad, lse, delta = rooms
    k_full, k_empty, q_full, q_empty, grad_full, grad_empty = barriers
    document, _, result, start, query_count, key_start, key_count, _ = tile
    used = 0
    if document >= 0:
        row, tiles = _extent(tile, window, F)
        low, _, _, high = tiles
        head = result * together
        queries, keys = (start, query_count), (key_start, key_count)
        padded = (start // F.BM + document) * F.BM
        for other in range(together):
            for i in range(low, high):
                n = base + used + met
                slot = n % F.STAGES
                # The first round finds all slots empty: the phase before the first counts as over.
                mbarrier.wait(q_empty.index(slot), (n // F.STAGES & 1) ^ 1)
                mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
                load_tile(q_desc, queries, i * F.BM, head + other, q_full.index(slot), q.index(slot))
                load_numbers(lse_desc, head + other, padded + i * F.BM, q_full.index(slot), lse.index(slot))
                if used == 0:
                    mbarrier.wait(k_empty, (met & 1) ^ 1)
                    mbarrier.expect(k_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                    load_tile(k_desc, keys, row, head // groups, k_full, k.index(0))
                    load_tile(v_desc, keys, row, head // groups, k_full, v.index(0))
                n = base + used
                slot = n % F.STAGES
                mbarrier.wait(grad_empty.index(slot), (n // F.STAGES & 1) ^ 1)
                mbarrier.expect(grad_full.index(slot), grad_desc.block_type.nbytes + delta_desc.block_type.nbytes)
                load_tile(grad_desc, queries, i * F.BM, head + other, grad_full.index(slot), grad.index(slot))
                load_numbers(delta_desc, head + other, padded + i * F.BM, grad_full.index(slot), delta.index(slot))
                used += 1
        if used > 0:
            n = base + used + met
            slot = n % F.STAGES
            mbarrier.wait(q_empty.index(slot), (n // F.STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            load_tile(q_desc, (start, 0), 0, head, q_full.index(slot), q.index(slot))
    return used


@gluon_jit
def _produce(fed, news, order, documents, counter, total, F: gl.constexpr):
    """Feed the consumers, tile after tile."""
    number = next_number(counter)
    tile = look_up(number % total, order, documents)
    n, base, met = 0, 0, 0
    while number < total:
        tell(tile, n, news)
        used = _feed(fed, tile, base, met, F)
        base += used
        met += (used > 0).to(gl.int32)
        n += 1
        # Not before: it would wait for a program with a long tile. 440 TFLOP/s for 375 on packed documents.
        number = next_number(counter)
        tile = look_up(number % total, order, documents)
    tell_end(n, news)


# ---- the senders ----


@gluon_jit
def _turn(i, tile, shift, window, F: gl.constexpr):
    """How many tiles of keys before this one meet the i-th tile of queries: all, or those within the window's reach.

    The window's last key before query 0 of the tile is i BM + shift - window, counted from the document's first.
    """
    if F.WINDOW:
        tile -= gl.maximum(i * F.BM + shift - window + 1, 0) // F.KEYS
    return tile


@gluon_jit
def _send(SENDER: gl.constexpr, sent, news, F: gl.constexpr):
    """Have every other part of what the consumers found of dQ added up; if ORDERED, in turn.

    Two senders: one waits until its part has left, and its turn is over, while the other sends.
    """
    desc, room, barriers, turns, per_head, together, window = sent
    full, empty = barriers
    LINES: gl.constexpr = _lines(F)
    n, t = 0, 0
    tile = hear(0, news, 1)
    while tile[0] != END:
        if tile[0] >= 0:
            row, tiles = _extent(tile, window, F)
            low, _, _, high = tiles
            for other in range(together):
                first = _first_place(tile, other, per_head, together, F)
                for i in range(low, high):
                    if n % 2 == SENDER:
                        turn = 0
                        if F.ORDERED:
                            turn = _turn(i, row // F.KEYS, tile[7], window, F)
                            wait_for_value(turns + first + i, turn)
                        mbarrier.wait(full.index(SENDER), n // 2 & 1)
                        line = (first + i) * (2 * LINES)
                        tma_add(desc, [line, 0], room.index(0))
                        tma_add(desc, [line + LINES, 0], room.index(1))
                        tma_store_wait(0)
                        mbarrier.arrive(empty.index(SENDER))
                        if F.ORDERED:
                            release_after_tma(turns + first + i, turn + 1)
                    n += 1
        t += 1
        tile = hear(t, news, 1)


# ---- the consumers ----


@gluon_jit
def _start_part(grad_scores, k, CONSUMER: gl.constexpr, F: gl.constexpr):
    """Start a consumer's part of dQ: half the columns of 64 queries, or 64 of 128 queries."""
    HALF: gl.constexpr = _half(F)
    zeros = gl.full([_ROWS, HALF], 0.0, gl.float32, accumulator(HALF))
    if F.BM == 64:
        left = grad_scores.permute((1, 0))
        right = k.slice(CONSUMER * HALF, HALF, 1)
    else:
        left = grad_scores.slice(CONSUMER * _ROWS, _ROWS, 1).permute((1, 0))
        right = k
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon_jit
def _hand_over(part, n, room, barriers, CONSUMER: gl.constexpr):
    """Give the n-th part of dQ to the senders."""
    out_full, out_empty = barriers
    # The senders take turns at one room: it is empty when the other has sent the part before.
    mbarrier.wait(out_empty.index((n + 1) % 2), ((n + 1) // 2 & 1) ^ 1)
    room.index(CONSUMER).store(in_lines(part))
    fence_async_shared()
    mbarrier.arrive(out_full.index(n % 2))


@gluon_jit
def _step(
    state, n, i, ahead, rooms, barriers, keys, full, settings,
    CONSUMER: gl.constexpr, FIRST: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Gradients from the i-th tile of queries, the n-th in all, whose scores are there; then the scores of the next.

    A consumer's part of dQ, from all keys, is that of the tile before: the other's half of dS has long been there.
    Queries are in slots `ahead` further than n: see `_feed`.
    """
    grad_k, grad_v, scores = state
    q, k, v, grad, lse, delta, grad_scores_room, out = rooms
    q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty = barriers
    dtype: gl.constexpr = q.dtype
    # Index 0, which the compiler does not know: descriptors then are found anew in every step, in uniform registers.
    unknown = (n < 0).to(gl.int32)
    k, v = k.index(unknown), v.index(unknown)
    slot, q_slot, after = n % F.STAGES, (n + ahead) % F.STAGES, (n + ahead + 1) % F.STAGES
    mbarrier.wait(grad_full.index(slot), n // F.STAGES & 1)
    # dP^T - delta: the accumulator begins with -delta, which saves 1 operation in 5 and the registers of delta.
    minus_delta = load_columns(delta.index(slot), F.BM)[None, :]
    minus_delta, _ = gl.broadcast(minus_delta, gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM)))
    products = warpgroup_mma(own_rows(v, CONSUMER), grad.index(slot).permute((1, 0)), minus_delta, is_async=True)
    masked = (i < full[0]) | (i >= full[1])
    weights, slope = weights_again(scores, load_columns(lse.index(q_slot), F.BM), i, keys, masked, settings, F)
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, accumulator(F.V), 2))
    if F.BM == 64:  # 528 TFLOP/s for 510; with 128 queries registers spill
        grad_v = warpgroup_mma(p, grad.index(slot), grad_v, is_async=True)
        products = warpgroup_mma_wait(1, deps=[products])
    else:
        products = warpgroup_mma_wait(0, deps=[products])
        grad_v = warpgroup_mma(p, grad.index(slot), grad_v, is_async=True)
    weights = weights * products
    if F.SOFTCAP:
        weights = weights * slope
    if not FIRST:
        # The other has stored its half of the tile before, so it is done with the one before that.
        mbarrier.wait(ds_full.index((n - 1) % 3), (n - 1) // 3 & 1)
    own_rows(grad_scores_room.index(n % 3), CONSUMER).store(weights.to(dtype))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(n % 3))
    ds = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, accumulator(F.D), 2))
    grad_k = warpgroup_mma(ds, q.index(q_slot), grad_k, is_async=True)
    if not FIRST:
        part = _start_part(grad_scores_room.index((n - 1) % 3), k, CONSUMER, F)
        grad_v, _ = warpgroup_mma_wait(2, deps=[grad_v, p])
        mbarrier.arrive(grad_empty.index(slot))
        grad_k, _ = warpgroup_mma_wait(1, deps=[grad_k, ds])
    else:
        grad_v, _ = warpgroup_mma_wait(1, deps=[grad_v, p])
        mbarrier.arrive(grad_empty.index(slot))
        grad_k, _ = warpgroup_mma_wait(0, deps=[grad_k, ds])
    mbarrier.arrive(q_empty.index(q_slot))
    mbarrier.wait(q_full.index(after), (n + ahead + 1) // F.STAGES & 1)
    scores = _start_scores(k, q.index(after), CONSUMER, F)
    if not FIRST:
        part = warpgroup_mma_wait(1, deps=[part])  # pyrefly: ignore
        _hand_over(part, n - 1, out, (out_full, out_empty), CONSUMER)
    # Not carried into the next step unfinished: ptxas then serialises all products (note C7514).
    return grad_k, grad_v, warpgroup_mma_wait(0, deps=[scores])


@gluon_jit
def _start_scores(k, q, CONSUMER: gl.constexpr, F: gl.constexpr):
    zeros = gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM))
    return warpgroup_mma(own_rows(k, CONSUMER), q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _gradients(CONSUMER: gl.constexpr, taken, tile, base, met, F: gl.constexpr):
    """Gradients of a consumer's keys and values of a tile; how many tiles of queries they met.

    From all queries that see them, head after head. `base` and `met` as for `_feed`.
    """
    results, rooms, barriers, together, heads, tokens, settings = taken
    q, k, v, grad, _, _, grad_scores, out = rooms
    k_full, k_empty, q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty = barriers
    scale, scale2, softcap, window = settings
    document, begin, result, _, _, key_start, key_count, shift = tile
    row, tiles = _extent(tile, window, F)
    low, full_low, full_high, high = tiles
    used = 0
    if document >= 0:
        used = together * (high - low)
    if used > 0:
        first_row = row + CONSUMER * _ROWS
        key = first_row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(F.BM)))
        grad_k = gl.full([_ROWS, F.D], 0.0, gl.float32, accumulator(F.D))
        grad_v = gl.full([_ROWS, F.V], 0.0, gl.float32, accumulator(F.V))
        mbarrier.wait(k_full, met & 1)
        slot = (base + met) % F.STAGES
        mbarrier.wait(q_full.index(slot), (base + met) // F.STAGES & 1)
        scores = warpgroup_mma_wait(0, deps=[_start_scores(k.index(0), q.index(slot), CONSUMER, F)])
        streams = (q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty)
        of_keys = (key, key_count, shift)
        full, numbers = (full_low, full_high), (scale2, softcap, window)
        state = (grad_k, grad_v, scores)
        state = _step(state, base, low, met, rooms, streams, of_keys, full, numbers, CONSUMER, True, F)
        i = low
        for n in range(base + 1, base + used):
            i = gl.where(i + 1 == high, low, i + 1)
            state = _step(state, n, i, met, rooms, streams, of_keys, full, numbers, CONSUMER, False, F)
        grad_k, grad_v, scores = state
        mbarrier.arrive(q_empty.index((base + used + met) % F.STAGES))
        n = base + used - 1
        mbarrier.wait(ds_full.index(n % 3), n // 3 & 1)
        part = _start_part(grad_scores.index(n % 3), k.index(0), CONSUMER, F)
        _hand_over(warpgroup_mma_wait(0, deps=[part]), n, out, (out_full, out_empty), CONSUMER)
        named_barrier_wait(_MEETING, 256)  # both are done with all keys: gradients take their place
        keys = (key_start, key_count)
        write_rows(grad_k * scale, results[0], k.index(0), keys, first_row, result, heads, CONSUMER, F.D_HEAD, F.D, F)
        write_rows(grad_v, results[1], v.index(0), keys, first_row, result, heads, CONSUMER, F.V_HEAD, F.V, F)
        tma_store_wait(0)  # one thread waits: before it arrives all meet, which Triton sees to
        mbarrier.arrive(k_empty)
    else:
        stop = gl.where(document >= 0, key_start + key_count, gl.where(document == TAIL, tokens, 0))
        if CONSUMER == 0:
            clear_keys(results[0][1], begin, stop, result, heads, F.D_HEAD, F.D, F)
        else:
            clear_keys(results[1][1], begin, stop, result, heads, F.V_HEAD, F.V, F)
    return used


@gluon_jit
def _consume(CONSUMER: gl.constexpr, taken, news, F: gl.constexpr):
    """Find gradients, tile after tile."""
    n, base, met = 0, 0, 0
    tile = hear(0, news, 4)
    while tile[0] != END:
        used = _gradients(CONSUMER, taken, tile, base, met, F)
        base += used
        met += (used > 0).to(gl.int32)
        n += 1
        tile = hear(n, news, 4)


# ---- the kernel ----


@gluon_jit(do_not_specialize=(*PER_BATCH, "per_head", "rows", "section", "total"))
def hopper_backward(
    q, k, v, grad, lse, delta, sums, grad_k_desc, grad_v_desc, grad_k, grad_v, turns,
    table, q_start, q_used, q_offset, k_start, k_used, k_offset, scale, scale2, softcap, window,
    k_tokens, groups, together, per_head, rows, section, total, F: gl.constexpr,
):  # fmt: skip
    """Tiles of the backward table, each for `together` query heads of one kv head; tiles of the tail are cleared.

    `total` tiles: results of a section, `rows` of the table, sections; programs take one after another. `turns` begins
    with zeros: the counter of tiles and, in turn, one for each tile of queries and head. Descriptors: q, k, v, grad,
    grad_k_desc and grad_v_desc ragged; lse and delta [N, padded places];
    sums [N places D / 32, 32], parts of dQ / scale `in_lines`. A head has `per_head` tiles of padded places.
    """
    dtype: gl.constexpr = q.dtype
    LINES: gl.constexpr = _lines(F)
    queries = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.D], shared(F.BM, F.D, dtype))
    grads = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.V], shared(F.BM, F.V, dtype))
    keys = gl.allocate_shared_memory(dtype, [1, F.KEYS, F.D], shared(F.KEYS, F.D, dtype))
    values = gl.allocate_shared_memory(dtype, [1, F.KEYS, F.V], shared(F.KEYS, F.V, dtype))
    grad_scores = gl.allocate_shared_memory(dtype, [3, F.KEYS, F.BM], shared(F.KEYS, F.BM, dtype))
    out = gl.allocate_shared_memory(gl.float32, [2, LINES, LINE], shared(LINES, LINE, gl.float32))
    lses = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    deltas = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    k_full, k_empty = new_barriers(1, 1).index(0), new_barriers(1, 2).index(0)
    q_full, q_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    grad_full, grad_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    ds_full, out_full, out_empty = new_barriers(3, 2), new_barriers(2, 2), new_barriers(2, 1)
    news = new_news(4)
    order, documents = (table, rows, section), (q_start, q_used, q_offset, k_start, k_used, k_offset)
    fed = (
        (q, k, v, grad, lse, delta), (queries, keys, values, grads, lses, deltas),
        (k_full, k_empty, q_full, q_empty, grad_full, grad_empty), groups, together, window,
    )  # fmt: skip
    taken = (
        ((grad_k_desc, grad_k), (grad_v_desc, grad_v)), (queries, keys, values, grads, lses, deltas, grad_scores, out),
        (k_full, k_empty, q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty),
        together, total // rows, k_tokens, (scale, scale2, softcap, window),
    )  # fmt: skip
    sent = (sums, out, (out_full, out_empty), turns + 1, per_head, together, window)
    gl.warp_specialize(
        [
            (_consume, (0, taken, news, F)),
            (_consume, (1, taken, news, F)),
            (_produce, (fed, news, order, documents, turns, total, F)),
            (_send, (0, sent, news, F)),
            (_send, (1, sent, news, F)),
        ],
        [4, 1, 1, 1],
        [F.REGISTERS, F.FEW_REGISTERS, F.FEW_REGISTERS, F.FEW_REGISTERS],
    )
