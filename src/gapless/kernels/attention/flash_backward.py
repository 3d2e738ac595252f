"""The backward kernels of `gapless.kernels.attention.flash`.

FlashAttention-2's backward (Dao 2023, algorithm 2) in two kernels that each recompute the weights: keys and values,
where a tile of keys stays and queries stream by, and queries, where it is the other way round. Seven products instead
of five, but every gradient is added up by one program in one order: the same bits every time, and no atomics.
"""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import (
    PER_BATCH,
    TAIL,
    capped,
    clear_rows,
    key_ranges,
    load_rows,
    places,
    product,
    store_rows,
    visible,
    work,
)
from gapless.kernels.runtime import jit, tl


@jit(do_not_specialize=PER_BATCH)
def flash_delta(
    out_ptr, grad_ptr, lse, grad_lse, sinks, delta, grad_sinks, tokens, stride_ot, stride_oh, stride_gt, stride_gh,
    V: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Find delta = rowsum(dO O) - dLSE of some tokens of a head, and their summand of the sink's gradient."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, VP)
    here = token < tokens
    mask = here[:, None] & (column < V)[None, :]
    out = tl.load(out_ptr + token[:, None] * stride_ot + head * stride_oh + column[None, :], mask=mask, other=0.0)
    grad = tl.load(grad_ptr + token[:, None] * stride_gt + head * stride_gh + column[None, :], mask=mask, other=0.0)
    value = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    place = head * tokens + token
    if LSE:
        value -= tl.load(grad_lse + place, mask=here, other=0.0)
    tl.store(delta + place, value, mask=here)
    if SINKS:
        total = tl.load(lse + place, mask=here, other=-float("inf"))
        sink = tl.load(sinks + head).to(tl.float32) * 1.44269504
        # -inf marks tokens of no document, which have no sink either.
        weight = tl.where(total == -float("inf"), 0.0, tl.exp2(sink - total))
        tl.store(grad_sinks + tl.program_id(0) * tl.num_programs(1) + head, -tl.sum(weight * value, 0))


@jit
def _weights(
    scores, lse, query, key, span, settings,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The softmax's weights again, and the slope of the softcap; `query` counts from the first query."""
    query_count, key_count, shift = span
    scale2, softcap, window = settings
    scores, bent = capped(scores, scale2, softcap, SOFTCAP)
    weights = tl.exp2(scores - lse)
    if MASKED:
        seen = visible(query + shift, key, key_count, window, CAUSAL, WINDOW) & (query < query_count)
        weights = tl.where(seen, weights, 0.0)
    slope = 1 - bent * bent if SOFTCAP else bent
    return weights, slope


@jit
def _key_range(
    start, stop, resident, streams, span, state, settings,
    D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries from start to stop for a tile of keys: transposed scores, so that weights are left factors as they are.

    `state` is (gradient of keys, of values); STAGES of the loop, None for the kernel's.
    """
    k, v, key = resident
    q_rows, grad_rows, lse, delta, stride_q, stride_g, columns, v_columns = streams
    query_count, key_count, shift = span
    grad_k, grad_v = state
    for i in tl.range(start, stop, BM, num_stages=STAGES):
        query = i + tl.arange(0, BM)
        offset = tl.cast(i, tl.int64)
        q = load_rows(q_rows + offset * stride_q, query, query_count, columns, D, MASKED)
        if MASKED:
            # Queries beyond the document get weights of exp2(0 - inf) = 0.
            total = tl.load(lse + query, mask=query < query_count, other=float("inf"))
            centre = tl.load(delta + query, mask=query < query_count, other=0.0)
        else:
            total = tl.load(lse + query)
            centre = tl.load(delta + query)
        scores = product(k, tl.trans(q), None)
        weights, slope = _weights(
            scores, total[None, :], query[None, :], key[:, None], span, settings, MASKED, CAUSAL, WINDOW, SOFTCAP
        )
        grad = load_rows(grad_rows + offset * stride_g, query, query_count, v_columns, V, MASKED)
        grad_v = product(weights.to(grad.dtype), grad, grad_v)
        grad_scores = weights * (product(v, tl.trans(grad), None) - centre[None, :])
        if SOFTCAP:
            grad_scores = grad_scores * slope
        grad_k = product(grad_scores.to(q.dtype), q, grad_k)
    return grad_k, grad_v


@jit
def _query_ranges(
    first, last, query_count, shift, window, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Queries that see keys `first` to `last`: masked from low, seeing all from full, masked again up to high."""
    low = 0
    full = 0
    high = query_count
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - shift, 0), query_count)
        full = low + tl.cdiv(tl.maximum(last - shift - low, 0), BM) * BM
    if WINDOW:
        high = tl.maximum(tl.minimum(query_count, last + window - shift), low)
    full = tl.minimum(full, high)
    see_all = query_count
    if WINDOW:
        see_all = tl.minimum(query_count, first + window - shift)
    ragged = full + tl.maximum(see_all - full, 0) // BM * BM
    return low, full, ragged, high


@jit
def _key_loops(
    ranges, resident, streams, span, state, settings,
    D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """All queries of one head."""
    low, full, ragged, high = ranges
    if D > 128 or V > 128:
        # Registers do not do for several loops: they would spill 648 bytes at 256 on sm_90.
        return _key_range(
            low, high, resident, streams, span, state, settings, D, V, BM, True, CAUSAL, WINDOW, SOFTCAP, None
        )
    if CAUSAL:
        state = _key_range(
            low, full, resident, streams, span, state, settings, D, V, BM, True, CAUSAL, WINDOW, SOFTCAP, None
        )
    # No masks here: masked loads cost a third of the speed at head dim 64 on an H200 (428 and 301 TFLOP/s).
    state = _key_range(
        full, ragged, resident, streams, span, state, settings, D, V, BM, False, CAUSAL, WINDOW, SOFTCAP, None
    )
    return _key_range(
        ragged, high, resident, streams, span, state, settings, D, V, BM, True, CAUSAL, WINDOW, SOFTCAP, 1
    )


@jit
def _key_tile(
    pointers, results, begin, place, scale, settings, strides, heads_apart, together,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and values `begin` and after, from `together` query heads; pointers are of the first."""
    q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta = pointers
    grad_k_ptr, grad_v_ptr = results
    next_q, next_grad, next_lse = heads_apart
    queries, query_count, keys, key_count, shift = place
    _, _, window = settings
    stride_qt, stride_kt, stride_vt, stride_gt, stride_gk, stride_gv = strides
    columns, v_columns = tl.arange(0, DP), tl.arange(0, VP)
    key = begin - keys + tl.arange(0, BN)
    token = (keys + key).to(tl.int64)
    k = load_rows(k_ptr + token[:, None] * stride_kt + columns[None, :], key, key_count, columns, D, True)
    v = load_rows(v_ptr + token[:, None] * stride_vt + v_columns[None, :], key, key_count, v_columns, V, True)
    first = begin - keys
    last = tl.minimum(first + BN, key_count) - 1
    ranges = _query_ranges(first, last, query_count, shift, window, BM, CAUSAL, WINDOW)
    row = queries.to(tl.int64) + tl.arange(0, BM)
    q_rows = q_ptr + row[:, None] * stride_qt + columns[None, :]
    grad_rows = grad_ptr + row[:, None] * stride_gt + v_columns[None, :]
    grad_k = tl.zeros([BN, DP], tl.float32)
    grad_v = tl.zeros([BN, VP], tl.float32)
    for _ in tl.range(0, together, disable_licm=True):
        streams = (q_rows, grad_rows, lse + queries, delta + queries, stride_qt, stride_gt, columns, v_columns)
        grad_k, grad_v = _key_loops(
            ranges, (k, v, key), streams, (query_count, key_count, shift), (grad_k, grad_v), settings,
            D, V, BM, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
        q_rows += next_q
        grad_rows += next_grad
        lse += next_lse
        delta += next_lse
    grad_k_rows = grad_k_ptr + token[:, None] * stride_gk + columns[None, :]
    grad_v_rows = grad_v_ptr + token[:, None] * stride_gv + v_columns[None, :]
    store_rows(grad_k_rows, grad_k * scale, key, key_count, columns, D)
    store_rows(grad_v_rows, grad_v, key, key_count, v_columns, V)


@jit(do_not_specialize=PER_BATCH)
def flash_keys(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta, grad_k_ptr, grad_v_ptr, table, q_start, q_used, q_offset, k_start,
    k_used, k_offset, scale, scale2, softcap, window, tokens, k_tokens, heads, groups, together,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values from some query heads, [k tokens, heads, D or V]; clears as the forward.

    `together` is 1, or as many as share a kv head; `heads` counts those of the results. What the compiler would hoist
    out of the loop over heads spills: 440 bytes of stack at head dim 64 on sm_90, 0 where it may not.
    """
    document, begin, head = work(table)
    query_head = head * together
    q_ptr += query_head * stride_qh
    k_ptr += query_head // groups * stride_kh
    v_ptr += query_head // groups * stride_vh
    grad_ptr += query_head * stride_gh
    lse += query_head * tokens
    delta += query_head * tokens
    grad_k_ptr += head * D
    grad_v_ptr += head * V
    if document >= 0:
        place = places(document, q_start, q_used, q_offset, k_start, k_used, k_offset)
        _key_tile(
            (q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta), (grad_k_ptr, grad_v_ptr), begin, place, scale,
            (scale2, softcap, window), (stride_qt, stride_kt, stride_vt, stride_gt, heads * D, heads * V),
            (stride_qh, stride_gh, tokens), together, D, V, DP, VP, BM, BN, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
    elif document == TAIL:
        clear_rows(grad_k_ptr, begin, heads * D, k_tokens, D, DP, BN)
        clear_rows(grad_v_ptr, begin, heads * V, k_tokens, V, VP, BN)


@jit
def _query_range(
    start, stop, resident, streams, span, grad_q, settings,
    D: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Keys from start to stop for a tile of queries."""
    q, grad, total, centre, query = resident
    k_rows, v_rows, stride_k, stride_v, columns, v_columns = streams
    _, key_count, _ = span
    for j in tl.range(start, stop, BN):
        key = j + tl.arange(0, BN)
        offset = tl.cast(j, tl.int64)
        k = load_rows(k_rows + offset * stride_k, key, key_count, columns, D, MASKED)
        v = load_rows(v_rows + offset * stride_v, key, key_count, v_columns, V, MASKED)
        scores = product(q, tl.trans(k), None)
        weights, slope = _weights(
            scores, total[:, None], query[:, None], key[None, :], span, settings, MASKED, CAUSAL, WINDOW, SOFTCAP
        )
        grad_scores = weights * (product(grad, tl.trans(v), None) - centre[:, None])
        if SOFTCAP:
            grad_scores = grad_scores * slope
        grad_q = product(grad_scores.to(k.dtype), k, grad_q)
    return grad_q


@jit
def _query_tile(
    pointers, grad_q_ptr, begin, place, scale, settings, strides,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries `begin` and after; pointers are those of the heads."""
    q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta = pointers
    queries, query_count, keys, key_count, shift = place
    _, _, window = settings
    stride_qt, stride_kt, stride_vt, stride_gt, stride_gq = strides
    columns, v_columns = tl.arange(0, DP), tl.arange(0, VP)
    query = begin - queries + tl.arange(0, BM)
    token = (queries + query).to(tl.int64)
    here = query < query_count
    q_rows = q_ptr + token[:, None] * stride_qt + columns[None, :]
    grad_rows = grad_ptr + token[:, None] * stride_gt + v_columns[None, :]
    q = load_rows(q_rows, query, query_count, columns, D, True)
    grad = load_rows(grad_rows, query, query_count, v_columns, V, True)
    total = tl.load(lse + token, mask=here, other=0.0)
    centre = tl.load(delta + token, mask=here, other=0.0)
    key_row = keys.to(tl.int64) + tl.arange(0, BN)
    k_rows = k_ptr + key_row[:, None] * stride_kt + columns[None, :]
    v_rows = v_ptr + key_row[:, None] * stride_vt + v_columns[None, :]
    first = begin - queries + shift
    last = tl.minimum(begin - queries + BM, query_count) - 1 + shift
    low, full, ragged, high = key_ranges(first, last, key_count, window, BN, CAUSAL, WINDOW)
    resident = (q, grad, total, centre, query)
    streams = (k_rows, v_rows, stride_kt, stride_vt, columns, v_columns)
    span = (query_count, key_count, shift)
    grad_q = tl.zeros([BM, DP], tl.float32)
    if WINDOW:
        grad_q = _query_range(
            low, full, resident, streams, span, grad_q, settings, D, V, BN, True, CAUSAL, WINDOW, SOFTCAP
        )
    grad_q = _query_range(
        full, ragged, resident, streams, span, grad_q, settings, D, V, BN, False, CAUSAL, WINDOW, SOFTCAP
    )
    grad_q = _query_range(
        ragged, high, resident, streams, span, grad_q, settings, D, V, BN, True, CAUSAL, WINDOW, SOFTCAP
    )
    rows = grad_q_ptr + token[:, None] * stride_gq + columns[None, :]
    store_rows(rows, grad_q * scale, query, query_count, columns, D)


@jit(do_not_specialize=PER_BATCH)
def flash_queries(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta, grad_q_ptr, table, q_start, q_used, q_offset, k_start, k_used,
    k_offset, scale, scale2, softcap, window, tokens, heads, groups,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries of a head; clears as the forward does."""
    document, begin, head = work(table)
    q_ptr += head * stride_qh
    k_ptr += head // groups * stride_kh
    v_ptr += head // groups * stride_vh
    grad_ptr += head * stride_gh
    lse += head * tokens
    delta += head * tokens
    grad_q_ptr += head * D
    if document >= 0:
        place = places(document, q_start, q_used, q_offset, k_start, k_used, k_offset)
        _query_tile(
            (q_ptr, k_ptr, v_ptr, grad_ptr, lse, delta), grad_q_ptr, begin, place, scale,
            (scale2, softcap, window), (stride_qt, stride_kt, stride_vt, stride_gt, heads * D),
            D, V, DP, VP, BM, BN, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
    elif document == TAIL:
        clear_rows(grad_q_ptr, begin, heads * D, tokens, D, DP, BM)
