"""The forward kernel of `gapless.kernels.attention.flash` and what all its kernels share.

FlashAttention-2 (Dao 2023, algorithm 1): a tile of queries stays, keys and values stream by, the output is divided by
the softmax's denominator once at the end. Scores are kept in units of log2 e, so that exp2 is the only exponential.
Shape letters: BM queries and BN keys of a tile; DP, VP head dims padded to powers of two.
"""

from __future__ import annotations

from gapless.batch import TAIL as _TAIL
from gapless.kernels.runtime import jit, tanh, tl

TAIL = _TAIL if tl is None else tl.constexpr(_TAIL)

# What changes from batch to batch: tokens, and the addresses of tables, which are views of one buffer; and from layer
# to layer: windows.
PER_BATCH = ("table", "q_start", "q_used", "q_offset", "k_start", "k_used", "k_offset", "tokens", "k_tokens", "window")

# ---- shared by the kernels ----


@jit
def work(table):
    """Document and first token of this program's tile, and its head: programs are (head of a section, row, section).

    Heads are done in sections whose keys and values fit the L2 cache together. In a section the longest tiles of all
    heads start first, and heads that share keys and values are neighbours.
    """
    head = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    row = table + 2 * tl.program_id(1)
    return tl.load(row), tl.load(row + 1), head.to(tl.int64)


@jit
def places(document, q_start, q_used, q_offset, k_start, k_used, k_offset):
    """Start and tokens of a document's queries, of its keys, and the position of query 0 counted from key 0."""
    queries = tl.load(q_start + document)
    query_count = tl.load(q_used + document)
    keys = tl.load(k_start + document)
    key_count = tl.load(k_used + document)
    return queries, query_count, keys, key_count, tl.load(q_offset + document) - tl.load(k_offset + document)


@jit
def clear_rows(pointer, first, stride, tokens, C: tl.constexpr, CP: tl.constexpr, B: tl.constexpr):
    """Zeros for [B, C] from token `first` on, up to the end of the stream."""
    token = first.to(tl.int64) + tl.arange(0, B)
    columns = tl.arange(0, CP)
    zeros = tl.zeros([B, CP], tl.float32)
    store_rows(pointer + token[:, None] * stride + columns[None, :], zeros, token, tokens, columns, C)


@jit
def load_rows(pointers, rows, count, columns, C: tl.constexpr, RAGGED: tl.constexpr):
    """Load a [rows, columns] tile, zeros beyond `count` rows (if RAGGED) and C columns; no masks where none can cut."""
    if RAGGED:
        if columns.shape[0] == C:
            x = tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
        else:
            x = tl.load(pointers, mask=(rows < count)[:, None] & (columns < C)[None, :], other=0.0)
    elif columns.shape[0] == C:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(columns < C)[None, :], other=0.0)
    return x


@jit
def store_rows(pointers, x, rows, count, columns, C: tl.constexpr):
    """Store a [rows, columns] tile up to `count` rows and C columns."""
    mask = (rows < count)[:, None]
    if columns.shape[0] != C:
        mask = mask & (columns < C)[None, :]
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@jit
def product(a, b, accumulator):
    """Compute accumulator + a b; float32 operands are not rounded to tf32."""
    return tl.dot(a, b, accumulator, input_precision="ieee" if a.dtype == tl.float32 else "tf32")


@jit
def capped(scores, scale2, softcap, SOFTCAP: tl.constexpr):
    """Scores in units of log2 e, and tanh of the raw ones over the cap (without one nothing of use)."""
    if SOFTCAP:
        bent = tanh(scores * (scale2 * 0.69314718 / softcap))
        scores = bent * (softcap * 1.44269504)
    else:
        bent = scores
        scores = scores * scale2
    return scores, bent


@jit
def visible(query, key, key_count, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys queries see, both counted from the document's first key; broadcast against each other."""
    mask = key < key_count
    if CAUSAL:
        mask = mask & (key <= query)
    if WINDOW:
        mask = mask & (key > query - window)
    return mask


# ---- forward ----


@jit
def _forward_range(
    start, stop, q, query, key_count, streams, state, settings,
    D: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Keys from start to stop, tile by tile: the state is (output, row maxima, row sums)."""
    k_rows, v_rows, stride_k, stride_v, columns, v_columns = streams
    accumulator, top, total = state
    scale2, softcap, window = settings
    for j in tl.range(start, stop, BN):
        key = j + tl.arange(0, BN)
        offset = tl.cast(j, tl.int64)
        k = load_rows(k_rows + offset * stride_k, key, key_count, columns, D, MASKED)
        scores = product(q, tl.trans(k), None)
        if SOFTCAP:
            scores, _ = capped(scores, scale2, softcap, SOFTCAP)
            factor = 1.0
        else:
            factor = scale2
        if MASKED:
            seen = visible(query[:, None], key[None, :], key_count, window, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        # A row that has seen no key yet keeps -inf, and subtracts 0 instead, which gives weights of 0.
        base = tl.where(new_top == -float("inf"), 0.0, new_top) if MASKED else new_top
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = load_rows(v_rows + offset * stride_v, key, key_count, v_columns, V, MASKED)
        accumulator = product(weights.to(v.dtype), v, accumulator * shrink[:, None])
        top = new_top
    return accumulator, top, total


@jit
def key_ranges(first, last, key_count, window, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Keys that queries `first` to `last` see: masked from low, all seen by all from full, masked again up to high."""
    low = 0
    full = 0
    high = key_count
    seen_by_all = key_count
    if CAUSAL:
        high = tl.minimum(key_count, last + 1)
        seen_by_all = tl.minimum(key_count, first + 1)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0)
        full = tl.minimum(low + tl.cdiv(tl.maximum(last - window + 1 - low, 0), BN) * BN, tl.maximum(high, low))
    ragged = full + tl.maximum(seen_by_all - full, 0) // BN * BN
    return low, full, ragged, high


@jit
def _forward_tile(
    pointers, sinks, lse, begin, place, settings, strides,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from the queries `begin` and after; pointers are those of the heads."""
    q_ptr, k_ptr, v_ptr, out_ptr = pointers
    queries, query_count, keys, key_count, shift = place
    _, _, window = settings
    stride_qt, stride_kt, stride_vt, stride_ot = strides
    columns, v_columns = tl.arange(0, DP), tl.arange(0, VP)
    row = begin - queries + tl.arange(0, BM)
    token = (queries + row).to(tl.int64)
    q = load_rows(q_ptr + token[:, None] * stride_qt + columns[None, :], row, query_count, columns, D, True)
    key_row = keys.to(tl.int64) + tl.arange(0, BN)
    k_rows = k_ptr + key_row[:, None] * stride_kt + columns[None, :]
    v_rows = v_ptr + key_row[:, None] * stride_vt + v_columns[None, :]
    streams = (k_rows, v_rows, stride_kt, stride_vt, columns, v_columns)
    first = begin - queries + shift
    last = tl.minimum(begin - queries + BM, query_count) - 1 + shift
    low, full, ragged, high = key_ranges(first, last, key_count, window, BN, CAUSAL, WINDOW)
    query = row + shift
    state = (tl.zeros([BM, VP], tl.float32), tl.zeros([BM], tl.float32) - float("inf"), tl.zeros([BM], tl.float32))
    if WINDOW:
        state = _forward_range(
            low, full, q, query, key_count, streams, state, settings, D, V, BN, True, CAUSAL, WINDOW, SOFTCAP
        )
    state = _forward_range(
        full, ragged, q, query, key_count, streams, state, settings, D, V, BN, False, CAUSAL, WINDOW, SOFTCAP
    )
    accumulator, top, total = _forward_range(
        ragged, high, q, query, key_count, streams, state, settings, D, V, BN, True, CAUSAL, WINDOW, SOFTCAP
    )
    if SINKS:
        sink = tl.load(sinks).to(tl.float32) * 1.44269504
        new_top = tl.maximum(top, sink)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.exp2(sink - new_top)
        accumulator = accumulator * shrink[:, None]
        top = new_top
    accumulator = accumulator * tl.where(total > 0, 1 / total, 0.0)[:, None]
    rows = out_ptr + token[:, None] * stride_ot + v_columns[None, :]
    store_rows(rows, accumulator, row, query_count, v_columns, V)
    # log2(0) is -inf: a row that sees nothing.
    tl.store(lse + token, top + tl.log2(total), mask=row < query_count)


@jit(do_not_specialize=PER_BATCH)
def flash_forward(
    q_ptr, k_ptr, v_ptr, sinks, out_ptr, lse, table, q_start, q_used, q_offset, k_start, k_used, k_offset,
    scale2, softcap, window, tokens, groups, stride_qt, stride_qh, stride_kt, stride_kh,
    stride_vt, stride_vh, stride_ot, stride_oh,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A tile of the forward table for one head; tiles of the tail are cleared."""
    document, begin, head = work(table)
    q_ptr += head * stride_qh
    k_ptr += head // groups * stride_kh
    v_ptr += head // groups * stride_vh
    out_ptr += head * stride_oh
    lse += head * tokens
    if document >= 0:
        place = places(document, q_start, q_used, q_offset, k_start, k_used, k_offset)
        _forward_tile(
            (q_ptr, k_ptr, v_ptr, out_ptr), sinks + head, lse, begin, place, (scale2, softcap, window),
            (stride_qt, stride_kt, stride_vt, stride_ot),
            D, V, DP, VP, BM, BN, CAUSAL, WINDOW, SOFTCAP, SINKS,
        )  # fmt: skip
    elif document == TAIL:
        clear_rows(out_ptr, begin, stride_ot, tokens, V, VP, BM)
        token = begin + tl.arange(0, BM)
        tl.store(lse + token, tl.zeros([BM], tl.float32) - float("inf"), mask=token < tokens)
