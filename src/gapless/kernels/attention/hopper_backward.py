"""Attention's backward for Hopper in Gluon (Shah et al. 2024, "FlashAttention-3", section 3 and appendix B.1).

A program keeps a tile of 128 keys and values, and the queries that see them stream by, with the output's gradient. Two
groups of four warps, the consumers, have 64 keys each and hold the gradients of their keys and values. For a tile of
queries a consumer finds transposed scores and weights P^T and the gradients dS^T of the scores, so that both are left
factors from registers, and puts dS^T into shared memory, where both consumers take it for half of dQ = dS K each: five
products in all. The scores of the next queries are started before dQ is taken out of the accumulators, so that the
matrix units have work then. One warp, the producer, copies in; two others, the senders, have the copy engine add dQ to
an accumulator in global memory.

Tiles of keys add to the same queries, in any order, or, for the same bits every time, in turn: a counter for each tile
of queries and head says how many have added. Turns go by the index of the tile of keys, the order in which programs of
a document start, so nobody waits for one that is not there. (That programs start in the order of the grid is seen on
all GPUs, and relied on by others, but not in CUDA's specification.)

The accumulator has queries in tiles of their own (`_padded`), whatever the place of their document in the stream.
"""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL, clear_rows, places
from gapless.kernels.attention.hopper_shared import (
    accumulator,
    clear_keys,
    feed_keys,
    flat,
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
from gapless.kernels.runtime import jit, tl

KEYS = 128
"""Keys of a program, of two consumers together."""

_ROWS = constant(64)
_LINE = constant(32)
"""Numbers in a row of the sums: 128 bytes."""
_MEETING = constant(9)


@constexpr_function
def _half(F):
    """Columns of a consumer's part of dQ."""
    return F.D // 2 if F.BM == 64 else F.D


@constexpr_function
def _lines(F):
    """Rows of the sums that a consumer's part of dQ takes."""
    return F.BM * F.D // 64


# ---- before and after ----


@jit
def _padded(document, start, rows, head, BM: tl.constexpr):
    """Place of a document's first query among `rows` per head, where every document begins at a multiple of BM."""
    return head * rows + (start // BM + document) * BM


@jit
def _tile(table, q_start, q_used):
    """A row of the table: document, first query, counted from the document's, start and count of these."""
    document = tl.load(table + 2 * tl.program_id(0))
    begin = tl.load(table + 2 * tl.program_id(0) + 1)
    start = tl.load(q_start + document, mask=document >= 0, other=0)
    count = tl.load(q_used + document, mask=document >= 0, other=0)
    return document, begin, start, count


@jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_delta(
    out, grad, lse, grad_lse, sinks, lse_padded, delta_padded, grad_sinks, table, q_start, q_used, tokens, rows,
    stride_ot, stride_oh, stride_gt, stride_gh,
    V: tl.constexpr, VP: tl.constexpr, QT: tl.constexpr, BM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Find delta = rowsum(dO O) - dLSE of a tile of QT queries and a head, and their summand of the sink's gradient.

    Both delta and the LSE go to padded places. Beyond the document, and for queries that see nothing, the LSE becomes
    inf, which makes weights 0.
    """
    document, begin, start, count = _tile(table, q_start, q_used)
    head = tl.program_id(1).to(tl.int64)
    row = begin - start
    stop = row + QT
    if stop >= count:
        stop = tl.cdiv(count, BM) * BM
    place = _padded(document, start, rows, head, BM)
    column = tl.arange(0, VP)
    total = tl.zeros([64], tl.float32)
    for first in range(row, tl.where(document >= 0, stop, row), 64):
        query = first + tl.arange(0, 64)
        here = query < count
        token = start.to(tl.int64) + query
        mask = here[:, None] & (column < V)[None, :]
        x = tl.load(out + token[:, None] * stride_ot + head * stride_oh + column[None, :], mask=mask, other=0.0)
        g = tl.load(grad + token[:, None] * stride_gt + head * stride_gh + column[None, :], mask=mask, other=0.0)
        value = tl.sum(x.to(tl.float32) * g.to(tl.float32), 1)
        if LSE:
            value -= tl.load(grad_lse + head * tokens + token, mask=here, other=0.0)
        log = tl.load(lse + head * tokens + token, mask=here, other=-float("inf"))
        tl.store(delta_padded + place + query, value)
        tl.store(lse_padded + place + query, tl.where(log == -float("inf"), float("inf"), log))
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.44269504
            total -= tl.where(log == -float("inf"), 0.0, tl.exp2(sink - log)) * value
    if SINKS:
        tl.store(grad_sinks + tl.program_id(0) * tl.num_programs(1) + head, tl.sum(total, 0))


@jit
def _place_in_parts(row, column, COLUMNS: tl.constexpr):
    """Where among 64 queries of dQ, in parts of as many columns, `_in_lines` put a number."""
    part, column = column // COLUMNS, column % COLUMNS
    thread = row % 8 * 4 + column % 8 // 2
    four = (row // 8 * (COLUMNS // 16) + column // 16) * 32 + thread
    return part * (64 * COLUMNS) + four * 4 + column // 8 % 2 * 2 + column % 2


@jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_queries(
    accumulator, grad_q, table, q_start, q_used, tokens, rows, scale, stride_t, stride_h,
    D: tl.constexpr, DP: tl.constexpr, QT: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of QT queries and a head, from their parts; zeros in the tail."""
    document, begin, start, count = _tile(table, q_start, q_used)
    head = tl.program_id(1).to(tl.int64)
    grad_q += head * stride_h
    if document >= 0:
        row = begin - start
        place = _padded(document, start, rows, head, BM)
        column = tl.arange(0, DP)
        inside = _place_in_parts(tl.arange(0, 64)[:, None], column[None, :], DP // 2 if BM == 64 else DP)
        for first in range(row, tl.minimum(row + QT, count), 64):
            query = first + tl.arange(0, 64)
            here = query < count
            x = tl.load(accumulator + (place + first) * DP + inside, mask=here[:, None], other=0.0)
            token = start.to(tl.int64) + query
            target = grad_q + token[:, None] * stride_t + column[None, :]
            mask = here[:, None] & (column < D)[None, :]
            tl.store(target, (x * scale).to(grad_q.dtype.element_ty), mask=mask)
    elif document == TAIL:
        for first in range(0, QT, 64):
            clear_rows(grad_q, begin + first, stride_t, tokens, D, DP, 64)


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
def _send(SENDER: gl.constexpr, sent, F: gl.constexpr):
    """Have every other part of what the consumers found of dQ added up, head after head.

    Two senders: one waits until its part has arrived, and its turn is over, while the other sends.
    """
    desc, room, barriers, turns, places_, tile, shift, window, heads, tiles = sent
    full, empty = barriers
    padded, rows = places_
    head, together = heads
    low, high = tiles
    LINES: gl.constexpr = _lines(F)
    n = 0
    for other in range(together):
        first = ((head + other) * rows + padded) // F.BM
        for i in range(low, high):
            if n % 2 == SENDER:
                turn = 0
                if F.ORDERED:
                    turn = _turn(i, tile, shift, window, F)
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
def _in_lines(part):
    """A part of dQ, [64, columns], in an order of its own, in which a thread's numbers are four in a row.

    Row by row, 4 threads write 32 bytes of each of 8 rows at once, whose places in shared memory collide two and two,
    and TMA adds up pieces of 256 bytes: in this order writes do not collide, and the sums are dense. Nothing moves:
    only the places have other names. `_place_in_parts` finds a number again.
    """
    HALVES: gl.constexpr = part.shape[1] // 16
    threads = part.reshape([4, 2, 8, HALVES, 2, 4, 2]).permute((0, 1, 3, 2, 5, 4, 6))
    return threads.reshape([part.shape[0] * part.shape[1] // _LINE, _LINE])


@constexpr_function
def _in_fours(HALF):
    """Layout of `_in_lines` in one row, with a thread's numbers in order."""
    columns = [[1], [2], *([128 << bit] for bit in range((HALF // 16).bit_length() - 1)), [8 * HALF]]
    warps = [[16 * HALF], [32 * HALF]]
    return gl.DistributedLinearLayout(columns, [[4], [8], [16], [32], [64]], warps, [], [64 * HALF])


@gluon_jit
def _add_part(part, sums, tile, CONSUMER: gl.constexpr, F: gl.constexpr):
    """Add a part of dQ to the sums from registers, four numbers at a time."""
    SIZE: gl.constexpr = _ROWS * _half(F)
    layout: gl.constexpr = _in_fours(_half(F))
    fours = gl.convert_layout(_in_lines(part).reshape([SIZE]), layout)
    place = sums + (tile.to(gl.int64) * 2 + CONSUMER) * SIZE + gl.arange(0, SIZE, layout=layout)
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f", [place.to(gl.int64), fours], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon_jit
def _send_part(part, n, tile, room, barriers, CONSUMER: gl.constexpr, F: gl.constexpr):
    """Add the n-th part of dQ to the sums, or hand it to the senders, who do it in turn."""
    room, sums = room
    out_full, out_empty = barriers
    if not F.ORDERED:
        _add_part(part, sums, tile, CONSUMER, F)
    else:
        _hand(part, n, room, out_full, out_empty, CONSUMER)


@gluon_jit
def _hand(part, n, room, out_full, out_empty, CONSUMER: gl.constexpr):
    # The senders take turns at one room: it is empty when the other has sent the part before.
    mbarrier.wait(out_empty.index((n + 1) % 2), ((n + 1) // 2 & 1) ^ 1)
    room.index(CONSUMER).store(_in_lines(part))
    fence_async_shared()
    mbarrier.arrive(out_full.index(n % 2))


@gluon_jit
def _step(state, n, i, tile, rooms, barriers, keys, full, settings, CONSUMER: gl.constexpr, FIRST: gl.constexpr, F: gl.constexpr):
    """Gradients from the i-th tile of queries, the n-th in all, whose scores are there; then the scores of the next.

    A consumer's part of dQ, from all keys, is that of the tile before: the other's half of dS has long been there.
    """
    grad_k, grad_v, scores = state
    q, k, v, grad, lse, delta, grad_scores_room, out = rooms
    q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty = barriers
    dtype: gl.constexpr = q.dtype
    columns: gl.constexpr = gl.SliceLayout(0, accumulator(F.BM))
    slot = n % F.STAGES
    after = (n + 1) % F.STAGES
    mbarrier.wait(grad_full.index(slot), n // F.STAGES & 1)
    # dP^T - delta: the accumulator begins with -delta, which saves 1 operation in 5 and the registers of delta.
    base = gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM)) - delta.index(slot).load(columns)[None, :]
    products = warpgroup_mma(own_rows(v, CONSUMER), grad.index(slot).permute((1, 0)), base, is_async=True)
    masked = (i < full[0]) | (i >= full[1])
    weights, slope = weights_again(scores, lse.index(slot).load(columns), i, keys, masked, settings, F)
    p = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, accumulator(F.V), 2))
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
    grad_k = warpgroup_mma(ds, q.index(slot), grad_k, is_async=True)
    if not FIRST:
        part = _start_part(grad_scores_room.index((n - 1) % 3), k, CONSUMER, F)
        grad_v, _ = warpgroup_mma_wait(2, deps=[grad_v, p])
        mbarrier.arrive(grad_empty.index(slot))
        grad_k, _ = warpgroup_mma_wait(1, deps=[grad_k, ds])
    else:
        grad_v, _ = warpgroup_mma_wait(1, deps=[grad_v, p])
        mbarrier.arrive(grad_empty.index(slot))
        grad_k, _ = warpgroup_mma_wait(0, deps=[grad_k, ds])
    mbarrier.arrive(q_empty.index(slot))
    mbarrier.wait(q_full.index(after), (n + 1) // F.STAGES & 1)
    scores = _start_scores(k, q.index(after), CONSUMER, F)
    if not FIRST:
        part = warpgroup_mma_wait(1, deps=[part])  # pyrefly: ignore
        _send_part(part, n - 1, tile, out, (out_full, out_empty), CONSUMER, F)
    # Not carried into the next step unfinished: ptxas then serialises all products (note C7514).
    return grad_k, grad_v, warpgroup_mma_wait(0, deps=[scores])


@gluon_jit
def _start_scores(k, q, CONSUMER: gl.constexpr, F: gl.constexpr):
    zeros = gl.full([_ROWS, F.BM], 0.0, gl.float32, accumulator(F.BM))
    return warpgroup_mma(own_rows(k, CONSUMER), q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon_jit
def _consume(CONSUMER: gl.constexpr, taken, F: gl.constexpr):
    """Gradients of the consumer's keys and values from all queries that see them, head after head."""
    results, rooms, barriers, keys, places_, row, shift, heads, tiles, settings = taken
    q, k, v, grad, lse, delta, grad_scores, out = rooms
    k_full, q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty = barriers
    head, together = heads
    low, full_low, full_high, high = tiles
    scale, scale2, softcap, window = settings
    row += CONSUMER * _ROWS
    key = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, accumulator(F.BM)))
    grad_k = gl.full([_ROWS, F.D], 0.0, gl.float32, accumulator(F.D))
    grad_v = gl.full([_ROWS, F.V], 0.0, gl.float32, accumulator(F.V))
    mbarrier.wait(k_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_start_scores(k, q.index(0), CONSUMER, F)])
    total = together * (high - low)
    if total > 0:
        streams, of_keys = (q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty), (key, keys[1], shift)
        full, numbers = (full_low, full_high), (scale2, softcap, window)
        state = (grad_k, grad_v, scores)
        tile, per_head = places_
        tile += low
        state = _step(state, 0, low, tile, rooms, streams, of_keys, full, numbers, CONSUMER, True, F)
        i = low
        for n in range(1, total):
            last = i + 1 == high
            i = gl.where(last, low, i + 1)
            state = _step(state, n, i, tile, rooms, streams, of_keys, full, numbers, CONSUMER, False, F)
            tile += gl.where(last, per_head - (high - 1 - low), 1)
        grad_k, grad_v, scores = state
        mbarrier.wait(ds_full.index((total - 1) % 3), (total - 1) // 3 & 1)
        part = _start_part(grad_scores.index((total - 1) % 3), k, CONSUMER, F)
        _send_part(warpgroup_mma_wait(0, deps=[part]), total - 1, tile, out, (out_full, out_empty), CONSUMER, F)
    named_barrier_wait(_MEETING, 256)  # both are done with all keys: gradients take their place
    write_rows(grad_k * scale, results[0], k, keys, row, head, CONSUMER, F.D_HEAD, F.D, F)
    write_rows(grad_v, results[1], v, keys, row, head, CONSUMER, F.V_HEAD, F.V, F)
    tma_store_wait(0)


# ---- the kernel ----


@gluon_jit
def _gather(descs, results, queries, keys, padded, row, shift, heads, numbers, F: gl.constexpr):
    """Set up shared memory, and let the warps go their ways."""
    dtype: gl.constexpr = descs[0].dtype
    head, kv_head, result, together = heads
    turns, document_place, rows, sums = padded
    LINES: gl.constexpr = _lines(F)
    q = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.D], shared(F.BM, F.D, dtype))
    grad = gl.allocate_shared_memory(dtype, [F.STAGES, F.BM, F.V], shared(F.BM, F.V, dtype))
    k = gl.allocate_shared_memory(dtype, [F.KEYS, F.D], shared(F.KEYS, F.D, dtype))
    v = gl.allocate_shared_memory(dtype, [F.KEYS, F.V], shared(F.KEYS, F.V, dtype))
    grad_scores = gl.allocate_shared_memory(dtype, [3, F.KEYS, F.BM], shared(F.KEYS, F.BM, dtype))
    out = gl.allocate_shared_memory(gl.float32, [2, LINES, _LINE], shared(LINES, _LINE, gl.float32))
    lse = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    delta = gl.allocate_shared_memory(gl.float32, [F.STAGES, F.BM], flat())
    k_full = new_barriers(1, 1).index(0)
    q_full, q_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    grad_full, grad_empty = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, 2)
    ds_full, out_full, out_empty = new_barriers(3, 2), new_barriers(2, 2), new_barriers(2, 1)
    scale, scale2, softcap, window = numbers
    tiles = query_tiles(row, queries[1], keys[1], shift, window, F)
    low, _, _, high = tiles
    taken = (
        results, (q, k, v, grad, lse, delta, grad_scores, (out, sums)),
        (k_full, q_full, q_empty, grad_full, grad_empty, ds_full, out_full, out_empty),
        keys, ((head * rows + document_place) // F.BM, rows // F.BM), row, shift, (result, together), tiles, numbers,
    )  # fmt: skip
    fed = (
        descs[:6], (q, k, v, grad, lse, delta), (k_full, q_full, q_empty, grad_full, grad_empty),
        queries, keys, document_place, row, (head, kv_head, together), (low, high),
    )  # fmt: skip
    sent = (
        descs[6], out, (out_full, out_empty), turns, (document_place, rows), row // F.KEYS, shift, window,
        (head, together), (low, high),
    )  # fmt: skip
    if not F.ORDERED:
        gl.warp_specialize(
            [(_consume, (0, taken, F)), (_consume, (1, taken, F)), (feed_keys, (fed, True, F))],
            [4, 1],
            [F.REGISTERS, F.FEW_REGISTERS],
        )
    else:
      gl.warp_specialize(
        [
            (_consume, (0, taken, F)),
            (_consume, (1, taken, F)),
            (feed_keys, (fed, True, F)),
            (_send, (0, sent, F)),
            (_send, (1, sent, F)),
        ],
        [4, 1, 1, 1],
        [F.REGISTERS, F.FEW_REGISTERS, F.FEW_REGISTERS, F.FEW_REGISTERS],
    )


@gluon_jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_backward(
    q, k, v, grad, lse, delta, accumulator, sums, grad_k_desc, grad_v_desc, grad_k, grad_v, turns,
    table, q_start, q_used, q_offset, k_start, k_used, k_offset, scale, scale2, softcap, window,
    k_tokens, groups, together, rows, F: gl.constexpr,
):  # fmt: skip
    """A tile of the backward table, for `together` query heads of one kv head; tiles of the tail are cleared.

    Programs are (result head of a section, row of the table, section). Descriptors: q, k, v, grad, grad_k_desc and
    grad_v_desc ragged; lse and delta [N, rows]; accumulator [N rows D / 32, 32], parts of dQ / scale `_in_lines`.
    """
    result = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    head = result * together
    document = gl.load(table + 2 * gl.program_id(1))
    begin = gl.load(table + 2 * gl.program_id(1) + 1)
    if document >= 0:
        start, query_count, key_start, key_count, shift = places(
            document, q_start, q_used, q_offset, k_start, k_used, k_offset
        )
        padded = (start // F.BM + document) * F.BM
        _gather(
            (q, k, v, grad, lse, delta, accumulator), ((grad_k_desc, grad_k), (grad_v_desc, grad_v)),
            (start, query_count), (key_start, key_count), (turns, padded, rows, sums), begin - key_start, shift,
            (head, head // groups, result, together), (scale, scale2, softcap, window), F,
        )  # fmt: skip
    elif document == TAIL:
        clear_keys(grad_k, begin, k_tokens, result, F.D_HEAD, F.D, F)
        clear_keys(grad_v, begin, k_tokens, result, F.V_HEAD, F.V, F)
