"""Attention's forward for Hopper in Gluon (Shah et al. 2024, "FlashAttention-3", for 16-bit tensors).

A program has one warp that feeds it, the producer, and two or three groups of four warps with 64 queries each, the
consumers. The producer copies tiles of keys and values by TMA into rings in shared memory, from the last that the
queries see to the first. A consumer starts the scores of a tile, then the weighted values of the tile before, and finds
the softmax of the first while the matrix units do the second. With turns, one consumer's products run during the
softmax of another.

Persistent programs, one per multiprocessor, take tile after tile: the producer asks a counter in memory for the next
one and tells the consumers, and feeds them its first keys while they still write the last output.

Query heads that read the same keys may share a tile: row r of a consumer is token r // GROUP of head r % GROUP, as TMA
has them where a box of the tensor is some tokens of GROUP heads. All are fed with one copy of the keys, and documents
of few tokens fill more of a tile.

Head dims are cut in two chunks, see `hopper_chunks`. Documents end in hardware: see `gluon.ragged_descriptor`.
"""

from __future__ import annotations

from typing import NamedTuple

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL, capped
from gapless.kernels.attention.hopper_chunks import (
    at,
    load,
    new_tiles,
    no_sums,
    parts,
    start_scores,
    start_sums,
    wait_for_sums,
)
from gapless.kernels.attention.hopper_order import END, hear, look_up, new_news, next_number, tell, tell_end
from gapless.kernels.attention.hopper_shared import accumulator, key_tiles, new_barriers, seen_keys
from gapless.kernels.gluon import (
    constant,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    named_barrier_arrive,
    named_barrier_wait,
    ragged_place,
    tma_store,
    tma_store_wait,
    warpgroup_mma_wait,
)


class Form(NamedTuple):
    """What a kernel is compiled for."""

    BM: int
    """Rows of a consumer; its four warps have 16 each."""
    GROUP: int
    """Query heads in a tile; a power of two, which divides the query heads of a key head."""
    BN: int
    """Keys of a tile."""
    CONSUMERS: int
    STAGES: int
    """Tiles of keys, and of values, in shared memory."""
    TURNS: bool
    """Whether consumers take turns at the matrix units."""
    PERSISTENT: bool
    """Whether a program goes on to further tiles."""
    D0: int
    """Columns of queries and keys in the first chunk, and in the second, 0 if there is none."""
    D1: int
    V0: int
    """Likewise of values."""
    V1: int
    CAUSAL: bool
    WINDOW: bool
    SOFTCAP: bool
    SINKS: bool
    REGISTERS: int
    """Of a consumer's thread; the first consumer gets what is left."""
    FEW_REGISTERS: int
    """Of a producer's thread."""


_INF = constant(float("inf"))
_LOG2_E = constant(1.4426950408889634)
_FIRST_TURN = constant(9)
_FIRST_OWN = constant(12)
"""Named barriers: of turns, and of the threads of each consumer alone."""


@constexpr_function
def _tokens(F):
    """Of a consumer's tile."""
    return F.BM // F.GROUP


# ---- the producer ----


@gluon_jit
def _feed(fed, tile, base, attended, F: gl.constexpr):
    """Copy in the queries of a tile, and tiles of keys and values from the last to the first; how many.

    `base` and `attended` count tiles of keys, and tiles that have any, that were before.
    """
    descs, rooms, barriers, groups, window = fed
    q_descs, k_descs, v_descs = descs
    q, k, v = rooms
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    document, begin, head, start, query_count, key_start, key_count, shift = tile
    head *= F.GROUP
    used = 0
    if document >= 0:
        queries, keys, row = (start, query_count), (key_start, key_count), begin - start
        CONSUMERS: gl.constexpr = F.CONSUMERS
        tokens: gl.constexpr = CONSUMERS * _tokens(F)
        tiles = key_tiles(row, tokens, query_count, key_count, shift, window, F.BN, F.CAUSAL, F.WINDOW)
        for consumer in gl.static_range(CONSUMERS):
            if F.PERSISTENT:
                mbarrier.wait(q_empty.index(consumer), (attended & 1) ^ 1)
            load(q_descs, queries, row + consumer * _tokens(F), head, q_full.index(consumer), at(q, consumer), F.D1)
        used = tiles[3] - tiles[0]
        for i in range(0, used):
            n = base + i
            slot = n % F.STAGES
            # The first round finds all slots empty: the phase before the first counts as over.
            phase = (n // F.STAGES & 1) ^ 1
            key = (tiles[3] - 1 - i) * F.BN
            mbarrier.wait(k_empty.index(slot), phase)
            load(k_descs, keys, key, head // groups, k_full.index(slot), at(k, slot), F.D1)
            mbarrier.wait(v_empty.index(slot), phase)
            load(v_descs, keys, key, head // groups, v_full.index(slot), at(v, slot), F.V1)
    return used


@gluon_jit
def _produce(fed, told, order, documents, counter, total, F: gl.constexpr):
    """Feed the consumers, tile after tile."""
    if F.PERSISTENT:
        number = next_number(counter)
        tile = look_up(number % total, order, documents)
        n, base, attended = 0, 0, 0
        while number < total:
            tell(tile, n, told)
            number = next_number(counter)
            used = _feed(fed, tile, base, attended, F)
            base += used
            attended += (used > 0).to(gl.int32)
            n += 1
            tile = look_up(number % total, order, documents)
        tell_end(n, told)
    else:
        _feed(fed, look_up(gl.program_id(0), order, documents), 0, 0, F)


# ---- the consumers ----


@gluon_jit
def _wait_for_turn(CONSUMER: gl.constexpr, F: gl.constexpr):
    if F.TURNS:
        named_barrier_wait(_FIRST_TURN + CONSUMER, 256)


@gluon_jit
def _give_turn(CONSUMER: gl.constexpr, F: gl.constexpr):
    """To the next consumer; two groups of 128 threads meet at a barrier."""
    if F.TURNS:
        named_barrier_arrive(_FIRST_TURN + (CONSUMER + 1) % F.CONSUMERS, 256)


@gluon_jit
def _times(out0, out1, factor, F: gl.constexpr):
    """Rows times a factor each."""
    out0 = out0 * gl.convert_layout(factor, gl.SliceLayout(1, accumulator(F.V0)))[:, None]
    if F.V1 > 0:
        out1 = out1 * gl.convert_layout(factor, gl.SliceLayout(1, accumulator(F.V1)))[:, None]
    return out0, out1


@gluon_jit
def _softmax(scores, top, total, tile, query, key_count, settings, MASKED: gl.constexpr, F: gl.constexpr):
    """Weights of a tile of keys, row maxima and sums with it, and what the sums before shrink by.

    In units of log2 e. The maximum is that of the scores seen so far, this tile's included, so no weight exceeds 1 by
    more than the rounding of its exponent, 2^-24 |maximum|: even fp16 holds those of scores up to 2^27.
    """
    scale2, softcap, window = settings
    if F.SOFTCAP:
        scores, _ = capped(scores, scale2, softcap, True)
        factor = 1.0
    else:
        factor = scale2
    if MASKED:
        seen = seen_keys(query, key_count, tile * F.BN, window, F.BN, F.CAUSAL, F.WINDOW)
        scores = gl.where(seen, scores, -_INF)
    new_top = gl.maximum(top, gl.max(scores, 1) * factor)
    # A row that has seen no key yet keeps -inf, and subtracts 0 instead, which gives weights of 0.
    base = gl.where(new_top == -_INF, 0.0, new_top) if MASKED else new_top
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(top - base)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon_jit
def _packed(weights, dtype: gl.constexpr):
    """[BM, BN] of float32 as [BM, BN / 2] of pairs of `dtype`, an int32 each.

    Carried through a loop by itself, every 16-bit weight has a register, and pairs are taken apart and put together
    again: 64 of 477 instructions of a step with 128 keys and 64 features.
    """
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon_jit
def _as_operand(pairs, dtype: gl.constexpr, F: gl.constexpr):
    """Packed weights as the left factor of values, which comes from registers."""
    text: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            text, "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            text, "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )  # fmt: skip
    weights = gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, accumulator(F.V0), 2))


@gluon_jit
def _step(
    state, n, base, high, q, rooms, barriers, query, key_count, settings,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, F: gl.constexpr,
):  # fmt: skip
    """Scores and weights of the n-th tile, beside the weighted values of the one before."""
    out0, out1, top, total, pairs = state
    k, v = rooms
    k_full, k_empty, v_full, v_empty = barriers
    place = base + n
    slot = place % F.STAGES
    before = (place - 1) % F.STAGES
    weights = _as_operand(pairs, k[0].dtype, F)
    mbarrier.wait(k_full.index(slot), place // F.STAGES & 1)
    _wait_for_turn(CONSUMER, F)
    scores = start_scores(q, at(k, slot), F.D1)
    mbarrier.wait(v_full.index(before), (place - 1) // F.STAGES & 1)
    out0, out1 = start_sums(weights, at(v, before), out0, out1, F.V1)
    _give_turn(CONSUMER, F)
    scores = warpgroup_mma_wait(parts(F.V1), deps=[scores])
    mbarrier.arrive(k_empty.index(slot))
    tile = high - 1 - n
    new_weights, top, total, shrink = _softmax(scores, top, total, tile, query, key_count, settings, MASKED, F)
    pairs = _packed(new_weights, k[0].dtype)
    out0, out1 = wait_for_sums(weights, out0, out1, F.V1)
    mbarrier.arrive(v_empty.index(before))
    out0, out1 = _times(out0, out1, shrink, F)
    return out0, out1, top, total, pairs


@gluon_jit
def _attend(q, rooms, barriers, query, key_count, tiles, base, settings, CONSUMER: gl.constexpr, F: gl.constexpr):
    """Output before the division, row maxima and sums; `base` tiles of keys were before."""
    low, full_low, full_high, high = tiles
    k, v = rooms
    k_full, k_empty, v_full, v_empty = barriers
    row_layout: gl.constexpr = gl.SliceLayout(1, accumulator(F.BN))
    out0, out1 = no_sums(F.BM, F.V0, F.V1)
    top = gl.full([F.BM], -_INF, gl.float32, row_layout)
    total = gl.full([F.BM], 0.0, gl.float32, row_layout)
    slot = base % F.STAGES
    mbarrier.wait(k_full.index(slot), base // F.STAGES & 1)
    _wait_for_turn(CONSUMER, F)
    scores = start_scores(q, at(k, slot), F.D1)
    _give_turn(CONSUMER, F)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_empty.index(slot))
    weights, top, total, _ = _softmax(scores, top, total, high - 1, query, key_count, settings, True, F)
    state = (out0, out1, top, total, _packed(weights, k[0].dtype))
    # Masks are for the last tiles, which end in the middle, and for the first that a window reaches.
    for n in range(1, high - full_high):
        state = _step(state, n, base, high, q, rooms, barriers, query, key_count, settings, CONSUMER, True, F)
    for n in range(gl.maximum(high - full_high, 1), high - full_low):
        state = _step(state, n, base, high, q, rooms, barriers, query, key_count, settings, CONSUMER, False, F)
    if F.WINDOW:
        for n in range(gl.maximum(high - full_low, 1), high - low):
            state = _step(state, n, base, high, q, rooms, barriers, query, key_count, settings, CONSUMER, True, F)
    out0, out1, top, total, pairs = state
    last = base + high - low - 1
    slot = last % F.STAGES
    mbarrier.wait(v_full.index(slot), last // F.STAGES & 1)
    weights = _as_operand(pairs, k[0].dtype, F)
    out0, out1 = start_sums(weights, at(v, slot), out0, out1, F.V1)
    out0, out1 = wait_for_sums(weights, out0, out1, F.V1)
    if F.PERSISTENT:
        mbarrier.arrive(v_empty.index(slot))
    return out0, out1, top, total


@gluon_jit
def _rows(row, F: gl.constexpr):
    """Query and head of a consumer's rows, from the query and the head of its first."""
    index = gl.arange(0, F.BM, layout=gl.SliceLayout(1, accumulator(F.BN)))
    return row + index // F.GROUP, index % F.GROUP


@gluon_jit
def _store_lse(lse, value, document, query, other):
    """To [N, tokens], in whose row of the first head `lse` = (pointer, tokens) begins."""
    pointer, tokens = lse
    start, count = document
    gl.store(pointer + other.to(gl.int64) * tokens + start + query, value, mask=query < count)


@gluon_jit
def _store(CONSUMER: gl.constexpr, descs, room, out0, out1, document, row, head, F: gl.constexpr):
    """Write a consumer's rows, those beyond the document left out."""
    start, count = document
    if F.PERSISTENT:
        # The copy before has left the room: one thread knows, and all wait for it. (Triton 3.6 and 3.9 have them meet
        # after the wait anyway, as code shows; nothing says that they must.)
        tma_store_wait(0)
        named_barrier_wait(_FIRST_OWN + CONSUMER, 128)
    room[0].store(out0.to(descs[0].dtype))
    if F.V1 > 0:
        room[1].store(out1.to(descs[0].dtype))
    fence_async_shared()
    tma_store(descs[0], ragged_place(start, count, row, head, 0), room[0].reshape(descs[0].block_type.shape))
    if F.V1 > 0:
        tma_store(descs[1], ragged_place(start, count, row, head, F.V0), room[1].reshape(descs[1].block_type.shape))


@gluon_jit
def _with_sink(sinks, head, out0, out1, top, total, F: gl.constexpr):
    """Sums with a further weight, which has no value."""
    sink = gl.load(sinks + head).to(gl.float32) * _LOG2_E
    new_top = gl.maximum(top, sink)
    shrink = gl.exp2(top - new_top)
    out0, out1 = _times(out0, out1, shrink, F)
    return out0, out1, new_top, total * shrink + gl.exp2(sink - new_top)


@gluon_jit
def _attend_tile(CONSUMER: gl.constexpr, taken, tile, base, attended, F: gl.constexpr):
    """Attend from a consumer's queries of a tile, and write what they get; tiles of keys it went through, as `_feed`.

    Beyond all documents there are zeros, and LSEs of -inf.
    """
    descs, lse, tokens, sinks, rooms, barriers, settings = taken
    q, k, v, out = rooms
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    document, begin, head, start, query_count, _, key_count, shift = tile
    head *= F.GROUP
    log = (lse + head.to(gl.int64) * tokens, tokens)
    room = at(out, CONSUMER)
    used = 0
    if document >= 0:
        row = begin - start
        span: gl.constexpr = F.CONSUMERS * _tokens(F)
        tiles = key_tiles(row, span, query_count, key_count, shift, settings[2], F.BN, F.CAUSAL, F.WINDOW)
        row += CONSUMER * _tokens(F)
        query, other = _rows(row, F)
        mbarrier.wait(q_full.index(CONSUMER), attended & 1)
        out0, out1, top, total = _attend(
            at(q, CONSUMER), (k, v), (k_full, k_empty, v_full, v_empty), query + shift, key_count,
            tiles, base, settings, CONSUMER, F,
        )  # fmt: skip
        if F.PERSISTENT:
            mbarrier.arrive(q_empty.index(CONSUMER))
        if F.SINKS:
            out0, out1, top, total = _with_sink(sinks, head + other, out0, out1, top, total, F)
        out0, out1 = _times(out0, out1, gl.where(total > 0, 1.0 / total, 0.0), F)
        # log2(0) is -inf: a row that sees nothing.
        _store_lse(log, top + gl.log2(total), (start, query_count), query, other)
        _store(CONSUMER, descs, room, out0, out1, (start, query_count), row, head, F)
        used = tiles[3] - tiles[0]
    elif document == TAIL:
        row = begin + CONSUMER * _tokens(F)
        query, other = _rows(row, F)
        _store_lse(log, gl.full([F.BM], -_INF, gl.float32, query.type.layout), (0, tokens), query, other)
        zeros0, zeros1 = no_sums(F.BM, F.V0, F.V1)
        _store(CONSUMER, descs, room, zeros0, zeros1, (0, tokens), row, head, F)
    return used


@gluon_jit
def _consume(CONSUMER: gl.constexpr, taken, told, order, documents, F: gl.constexpr):
    """Attend, tile after tile."""
    if CONSUMER == F.CONSUMERS - 1:
        _give_turn(CONSUMER, F)  # the first starts
    if F.PERSISTENT:
        n, base, attended = 0, 0, 0
        tile = hear(0, told, 4)
        while tile[0] != END:
            used = _attend_tile(CONSUMER, taken, tile, base, attended, F)
            base += used
            attended += (used > 0).to(gl.int32)
            n += 1
            tile = hear(n, told, 4)
    else:
        _attend_tile(CONSUMER, taken, look_up(gl.program_id(0), order, documents), 0, 0, F)
    if CONSUMER == 0:
        _wait_for_turn(CONSUMER, F)  # which the last gave, so that none is left over
    tma_store_wait(0)


# ---- the kernel ----


@gluon_jit(do_not_specialize=(*PER_BATCH, "counter", "rows", "section", "total"))
def hopper_forward(
    q0, q1, k0, k1, v0, v1, out0, out1, sinks, lse, counter, table, q_start, q_used, q_offset, k_start, k_used,
    k_offset, scale2, softcap, window, tokens, groups, rows, section, total, F: gl.constexpr,
):  # fmt: skip
    """Tiles of the forward table for GROUP heads, as `flash_forward` has them for one; tiles of the tail are cleared.

    `total` tiles: groups of heads of a section, `rows` of the table, sections. There is a program for each; persistent
    ones are fewer, and `counter` begins with 0. Descriptors are of [T, heads, D or V], for the two chunks of columns;
    None where there is no second.
    """
    dtype: gl.constexpr = q0.dtype
    if F.D1 == 0:
        q1, k1 = q0, k0
    if F.V1 == 0:
        v1, out1 = v0, out0
    q = new_tiles(dtype, F.CONSUMERS, F.BM, F.D0, F.D1)
    k = new_tiles(dtype, F.STAGES, F.BN, F.D0, F.D1)
    v = new_tiles(dtype, F.STAGES, F.BN, F.V0, F.V1)
    # Outputs take the place of the queries where they fit, if the next ones are not on their way: a consumer is done
    # with its queries when it has its output.
    alike: gl.constexpr = not F.PERSISTENT and F.V0 == F.D0 and (F.V1 == F.D1 or F.V1 == 0)
    out = q if alike else new_tiles(dtype, F.CONSUMERS, F.BM, F.V0, F.V1)
    full_q, empty_q = new_barriers(F.CONSUMERS, 1), new_barriers(F.CONSUMERS, 1)
    full_k, empty_k = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, F.CONSUMERS)
    full_v, empty_v = new_barriers(F.STAGES, 1), new_barriers(F.STAGES, F.CONSUMERS)
    barriers = (full_q, empty_q, full_k, empty_k, full_v, empty_v)
    told = new_news(F.CONSUMERS)
    order, documents = (table, rows, section), (q_start, q_used, q_offset, k_start, k_used, k_offset)
    taken = ((out0, out1), lse, tokens, sinks, (q, k, v, out), barriers, (scale2, softcap, window))
    fed = (((q0, q1), (k0, k1), (v0, v1)), (q, k, v), barriers, groups, window)
    if F.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, taken, told, order, documents, F)),
                (_consume, (1, taken, told, order, documents, F)),
                (_produce, (fed, told, order, documents, counter, total, F)),
            ],
            [4, 1],
            [F.REGISTERS, F.FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, taken, told, order, documents, F)),
                (_consume, (1, taken, told, order, documents, F)),
                (_consume, (2, taken, told, order, documents, F)),
                (_produce, (fed, told, order, documents, counter, total, F)),
            ],
            [4, 4, 1],
            [F.REGISTERS, F.REGISTERS, F.FEW_REGISTERS],
        )
