"""What runs before and after the backward's kernels, in Triton: delta and LSE to padded places, dQ from its parts."""

from __future__ import annotations

from gapless.kernels.attention.flash_forward import PER_BATCH, TAIL, clear_rows
from gapless.kernels.runtime import jit, tl


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


@jit
def in_fours(column):
    """Place of a column's number among its 16: a thread's four columns of an accumulator are next to each other.

    Thread q of four has columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9: one load of 16 bytes for two of 8.
    """
    return column // 16 * 16 + column % 8 // 2 * 4 + column // 8 % 2 * 2 + column % 2


@jit(do_not_specialize=(*PER_BATCH, "rows"))
def hopper_delta(
    out, grad, lse, grad_lse, sinks, lse_padded, delta_padded, grad_sinks, table, q_start, q_used, tokens, rows,
    stride_ot, stride_oh, stride_gt, stride_gh,
    V: tl.constexpr, VP: tl.constexpr, QT: tl.constexpr, BM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Find delta = rowsum(dO O) - dLSE of a tile of QT queries and a head, and their summand of the sink's gradient.

    -delta and the LSE go to padded places, `in_fours`. Beyond the document, and for queries that see nothing, the LSE
    becomes inf, which makes weights 0.
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
        tl.store(delta_padded + place + in_fours(query), -value)
        tl.store(lse_padded + place + in_fours(query), tl.where(log == -float("inf"), float("inf"), log))
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.44269504
            total -= tl.where(log == -float("inf"), 0.0, tl.exp2(sink - log)) * value
    if SINKS:
        tl.store(grad_sinks + tl.program_id(0) * tl.num_programs(1) + head, tl.sum(total, 0))


@jit
def _out_of_parts(x, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of 64 queries of dQ, in parts of as many columns `in_lines`, [64, PARTS COLUMNS]."""
    threads = x.reshape(PARTS, 4, COLUMNS // 8, 8, 4, 2, 2).permute(1, 5, 3, 0, 2, 4, 6)
    return threads.reshape(64, PARTS * COLUMNS)


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
        PARTS: tl.constexpr = 2 if BM == 64 else 1
        for first in range(row, tl.minimum(row + QT, count), 64):
            query = first + tl.arange(0, 64)
            here = query < count
            x = tl.load(accumulator + (place + first) * DP + tl.arange(0, 64 * DP))
            x = _out_of_parts(x, PARTS, DP // PARTS)
            token = start.to(tl.int64) + query
            target = grad_q + token[:, None] * stride_t + column[None, :]
            mask = here[:, None] & (column < D)[None, :]
            tl.store(target, (x * scale).to(grad_q.dtype.element_ty), mask=mask)
    elif document == TAIL:
        for first in range(0, QT, 64):
            clear_rows(grad_q, begin + first, stride_t, tokens, D, DP, 64)
