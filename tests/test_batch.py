"""The batch: labels, trained indices, counters, the one buffer, and the attention tile tables."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.batch import IGNORE, TAIL, BatchLayout, Document, TileSpec, build_batch, segments
from gapless.kernels.attention import attention_tiles

SPECS = [
    TileSpec(query_tile=4, key_tile=4),
    TileSpec(query_tile=8, key_tile=3),
    TileSpec(query_tile=2, key_tile=5, window=1),
    TileSpec(query_tile=5, key_tile=2, window=7),
    TileSpec(query_tile=16, key_tile=16, window=3),
]
LENGTHS = st.lists(st.integers(0, 23), max_size=6)


@st.composite
def batches(draw):
    """A layout, its rows of documents and what `build_batch` makes of them."""
    rows = draw(st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=3))
    seed = draw(st.integers(0, 99))
    layout = BatchLayout(
        rows=len(rows) + draw(st.integers(0, 1)),
        row_tokens=max(1, *map(sum, rows), draw(st.integers(1, 30))),
        row_documents=max(1, *map(len, rows)),
        tiles=tuple(SPECS[:2]),
    )
    rng = np.random.default_rng(seed)
    documents = [
        [Document(rng.integers(0, 1000, n).astype(np.int32), rng.random(n) < 0.6) for n in row] for row in rows
    ]
    row_ids = [int(i) for i in rng.permutation(50)[: len(rows)]]
    batch = build_batch(layout, documents, row_ids=row_ids, learning_rate=0.1, step=seed, seed=7)
    return layout, documents, row_ids, batch


@given(batches())
def test_labels_are_shifted_within_documents(built):
    """One document at a time, by the definition: predict the next token of the same document if it is trained."""
    layout, rows, _, batch = built
    expected, tokens, positions = [], [], []
    for document in (document for row in rows for document in row):
        n = len(document.tokens)
        for i in range(n):
            trained = i + 1 < n and document.trained[i + 1]
            expected.append(int(document.tokens[i + 1]) if trained else IGNORE)
        tokens += document.tokens.tolist()
        positions += range(n)
    tail = layout.tokens - len(tokens)
    assert batch.tokens.tolist() == tokens + [0] * tail
    assert batch.labels.tolist() == expected + [IGNORE] * tail
    assert batch.segments.positions.tolist() == positions + [0] * tail
    assert batch.num_tokens == len(tokens)


@given(batches())
def test_trained_indices_and_sizes(built):
    layout, rows, row_ids, batch = built
    with_label = (batch.labels != IGNORE).nonzero().flatten().tolist()
    bucket = len(batch.trained)
    assert batch.trained.tolist() == with_label + [layout.tokens] * (bucket - len(with_label))
    assert batch.num_trained == batch.step_trained == len(with_label)
    assert bucket in layout.buckets
    assert bucket == min(size for size in layout.buckets if size >= len(with_label))
    assert batch.segments.lengths == tuple(len(document.tokens) for row in rows for document in row)
    count = len(batch.segments.lengths)
    assert batch.segments.seqused.tolist() == [*batch.segments.lengths, *[0] * (layout.max_documents - count)]
    starts = np.cumsum([0, *batch.segments.lengths])[:-1].tolist()
    assert batch.segments.cu_seqlens.tolist() == starts + [layout.tokens] * (layout.max_documents + 1 - count)
    assert batch.row_ids == tuple(row_ids)


@given(batches())
def test_dropout_counters_follow_rows(built):
    _, rows, row_ids, batch = built
    places = [
        (row_id, i) for row, row_id in zip(rows, row_ids, strict=True) for i in range(sum(len(d.tokens) for d in row))
    ]
    counters = batch.segments.dropout
    assert list(zip(counters.row.tolist(), counters.column.tolist(), strict=True))[: len(places)] == places
    assert counters.key.tolist() == [7, batch.scalars.step.item()]


@given(batches())
def test_one_buffer_and_copies_of_it(built):
    """Every tensor is a view of the buffer, all of it is used, and a copy is an equal batch of its own."""
    _, _, _, batch = built
    other = batch.to("cpu")
    copied = batch._in(batch.buffer.clone())
    for mine in (batch, other, copied):
        assert sum(t.numel() for t in tensors_of(mine)) == mine.buffer.numel()
        base = mine.buffer.untyped_storage().data_ptr()
        assert all(t.untyped_storage().data_ptr() == base for t in tensors_of(mine) if t.numel())
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(batch), tensors_of(copied), strict=True))
    copied.buffer.zero_()
    assert not copied.tokens.any()
    assert batch.scalars.seed.item() == 7
    assert math.isclose(batch.scalars.learning_rate.item(), 0.1, rel_tol=1e-6)
    assert batch.scalars.num_trained.item() == batch.step_trained


def tensors_of(batch):
    where, scalars = batch.segments, batch.scalars
    tables = [table for spec in where.tiles for table in (where.tiles[spec].forward, where.tiles[spec].backward)]
    return [
        batch.tokens,
        batch.labels,
        batch.trained,
        where.cu_seqlens,
        where.seqused,
        where.offset,
        where.positions,
        where.dropout.key,
        where.dropout.row,
        where.dropout.column,
        scalars.num_trained,
        scalars.learning_rate,
        scalars.step,
        scalars.seed,
        *tables,
    ]


def seen_pairs(lengths, starts, window):
    """(query, key) pairs of causal attention, from the definition."""
    pairs = set()
    for start, length in zip(starts, lengths, strict=True):
        for i in range(length):
            for j in range(i + 1):
                if window is None or i - j < window:
                    pairs.add((start + i, start + j))
    return pairs


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(lengths=LENGTHS, tail=st.integers(0, 9))
def test_tables_cover_documents_and_tail(spec, lengths, tail):
    """Each token is in one tile of each table, tiles without work do not exist, and the longest come first."""
    tokens = sum(lengths) + tail
    where = segments(lengths, tokens=tokens, tiles=[spec])
    tables = where.tile_tables(spec)
    pairs = seen_pairs(lengths, where.starts, spec.window)
    for table, used, tile, other, side in (
        (tables.forward, tables.forward_used, spec.query_tile, spec.key_tile, 0),
        (tables.backward, tables.backward_used, spec.key_tile, spec.query_tile, 1),
    ):
        assert table.shape == (-(-tokens // tile) + len(lengths) + 1, 2)
        covered, work = [], []
        for document, first in table.tolist():
            if document < 0:
                continue
            assert (first - where.starts[document]) % tile == 0
            mine = range(first, min(first + tile, where.starts[document] + lengths[document]))
            met = {pair[1 - side] for pair in pairs if pair[side] in mine}
            covered += mine
            work.append(-(-(max(met) - min(met) + 1) // other))
        assert sorted(covered) == list(range(sum(lengths)))
        assert work == sorted(work, reverse=True)
        cleared = table[len(work) : used]
        assert (cleared[:, 0] == TAIL).all()
        assert cleared[:, 1].tolist() == list(range(tokens - tail, tokens, tile))
        assert (table[used:, 0] == -1).all()


@given(lengths=LENGTHS, tail=st.integers(0, 9))
def test_gaps(lengths, tail):
    assert not segments(lengths, tokens=sum(lengths) + tail).has_gaps
    assert segments([1, *lengths], starts=[1, *range(2, 2 + 40 * len(lengths), 40)], tokens=2000).has_gaps
    assert segments([2, 0, 1], starts=[0, 2, 3], tokens=9).has_gaps


def test_tables_may_come_from_a_generator():
    assert tuple(segments([3], tiles=(spec for spec in SPECS)).tiles) == tuple(segments([3], tiles=SPECS).tiles)


def test_undeclared_tables_raise():
    where = segments([3], tiles=[SPECS[0]])
    with pytest.raises(KeyError, match="was not declared .declared: .TileSpec.query_tile=4"):
        where.tile_tables(SPECS[1])


def document(n):
    return Document(np.zeros(n, dtype=np.int32), np.ones(n, dtype=bool))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BatchLayout(rows=0, row_tokens=4, row_documents=1), "rows must be at least 1, not 0"),
        (lambda: BatchLayout(rows=2, row_tokens=2**30, row_documents=1), "exceed 2\\^31 - 1"),
        (
            lambda: build_batch(BatchLayout(rows=1, row_tokens=4, row_documents=2), [[document(5)]]),
            "row 0 has 5 tokens in 1 documents; the layout allows 4 tokens in 2",
        ),
        (
            lambda: build_batch(BatchLayout(rows=1, row_tokens=4, row_documents=1), [[document(1), document(1)]]),
            "row 0 has 2 tokens in 2 documents",
        ),
        (
            lambda: build_batch(BatchLayout(rows=1, row_tokens=4, row_documents=1), [[], []]),
            "2 rows exceed the layout's 1",
        ),
        (lambda: segments([3, 2], starts=[0, 2]), "overlap or exceed"),
        (lambda: segments([3, 2], tokens=4), "overlap or exceed"),
        (lambda: segments([3, 2], max_documents=1), "2 documents exceed max_documents = 1"),
        (lambda: segments([3, 2], starts=[0]), "1 starts for 2 documents"),
        (lambda: segments([3], offsets=[1, 2]), "2 offsets for 1 documents"),
        (lambda: segments([3], starts=[-1]), "starts must be at least 0, not -1"),
        (lambda: segments([3], offsets=[-2]), "offsets must be at least 0, not -2"),
        (lambda: segments([], tokens=-1), "0 to 2\\^31 - 1 tokens, not -1"),
        (lambda: segments([0], starts=[2**31]), "0 to 2\\^31 - 1 tokens, not 2147483648"),
        (lambda: segments([3], offsets=[2**30]), "positions must be below 2\\^30, not up to 1073741826"),
        (lambda: TileSpec(query_tile=4, key_tile=4, window=0), "tiles and window must be at least 1"),
        (lambda: attention_tiles(-4, 64, [None], torch.float32, "cpu"), "head dims must be at least 1, not -4 and 64"),
        (lambda: attention_tiles(64, 64, [0], torch.float32, "cpu"), "window must be at least 1, or None"),
        (lambda: attention_tiles(64, 64, [None], torch.float32, "cpu", groups=0), "groups must be at least 1"),
    ],
)
def test_refusals(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: segments(torch.tensor([3])), "lengths must be a sequence of integers on the host, not tensor"),
        (lambda: segments(3), "lengths must be a sequence of integers on the host, not 3"),
        (lambda: segments([3], offsets=[1.5]), "offsets must be a sequence of integers on the host, not \\[1.5\\]"),
        (lambda: segments([3], starts=["0"]), "starts must be a sequence of integers"),
        (lambda: attention_tiles(64, 64, [2.5], torch.float32, "cpu"), "window must be an integer, or None for none"),
        (lambda: attention_tiles(64, 64, [None], "bf16", "cpu"), "dtype must be a torch.dtype, not 'bf16'"),
        (
            lambda: attention_tiles(64, 64, None, torch.bfloat16, "cpu"),
            "windows must be those of all layers, .* not None",
        ),
    ],
)
def test_other_types_are_refused(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_integers_of_numpy():
    where = segments(np.array([3, 2]), offsets=np.array([1, 0]))
    assert (where.lengths, where.offsets) == ((3, 2), (1, 0))
    assert all(type(number) is int for number in (*where.lengths, *where.offsets))


def test_segments_of_a_cache_keep_their_spans():
    where = segments([3, 0, 2], starts=[0, 10, 20], offsets=[4, 0, 7], tokens=30)
    assert where.positions[[0, 2, 3, 20, 21, 22]].tolist() == [4, 6, 0, 7, 8, 0]
    assert where.max_seqlen == 3
    assert where.cu_seqlens.tolist() == [0, 10, 20, 30, 30]


def test_a_batch_with_room_for_fewer_documents_loses_nothing():
    """What a captured step reads of a batch is all there is of it, and holds any batch of as much room."""
    spec = TileSpec(query_tile=4, key_tile=8)
    layout = BatchLayout(rows=2, row_tokens=32, row_documents=32, tiles=(spec,))
    assert [layout.document_bucket(count) for count in (0, 2, 3, 5, 6, 17, 18, 65)] == [2, 2, 5, 5, 17, 17, 65, 65]
    for count in (1, 2, 4, 5, 17, 30):
        lengths = [1] * (count - 1) + [3]  # ragged tiles, and a tail in the second row
        batch = build_batch(layout, [[document(length) for length in lengths]])
        buffer = torch.full((layout.buffer_size,), -7, dtype=torch.int32)
        buffer[: len(batch.buffer)] = batch.buffer
        here = batch.in_buffer(buffer)
        room = here.segments.seqused.numel()
        assert room == batch.room == layout.document_bucket(count)
        assert here.segments.cu_seqlens.tolist() == batch.segments.cu_seqlens[: room + 1].tolist()
        assert here.segments.cu_seqlens.numel() == room + 1
        for name in ("forward", "backward"):
            whole, cut = (getattr(x.segments.tile_tables(spec), name) for x in (batch, here))
            used = getattr(batch.segments.tile_tables(spec), f"{name}_used")
            assert used <= len(cut) <= len(whole)
            assert torch.equal(cut, whole[: len(cut)])
            assert (whole[len(cut) :, 0] == -1).all()
        assert torch.equal(here.labels, batch.labels)
        assert here.scalars.step.data_ptr() == buffer[2].data_ptr()
