import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.data.packing import pack, plan_epoch

cases = st.integers(1, 40).flatmap(
    lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60), st.integers(1, 6))
)


def next_fit(lengths, row_tokens, row_documents):
    rows, left, count = 0, 0, 0
    for length in lengths:
        if length > left or count == row_documents:
            rows, left, count = rows + 1, row_tokens, 0
        left, count = left - length, count + 1
    return rows


def brute_best_fit_decreasing(lengths, row_tokens, row_documents):
    rows = []
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = [
            (row_tokens - sum(lengths[other] for other in row), index)
            for index, row in enumerate(rows)
            if len(row) < row_documents and sum(lengths[other] for other in row) + lengths[document] <= row_tokens
        ]
        if fits:
            rows[min(fits)[1]].append(document)
        else:
            rows.append([document])
    return sorted(sorted(row) for row in rows)


@given(cases)
def test_pack(case):
    row_tokens, lengths, row_documents = case
    rows = pack(lengths, row_tokens, row_documents)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= row_tokens for row in rows)
    assert all(1 <= len(row) <= row_documents for row in rows)
    assert rows == brute_best_fit_decreasing(lengths, row_tokens, row_documents)


@given(cases, st.integers(1, 70), st.booleans(), st.booleans(), st.integers(0, 3))
def test_plan(case, window, packing, shuffle, epoch):
    row_tokens, lengths, row_documents = case
    options = dict(
        row_tokens=row_tokens, row_documents=row_documents, window=window, packing=packing, shuffle=shuffle, seed=5
    )
    plan = plan_epoch(np.array(lengths, dtype=np.int32), epoch=epoch, **options)
    rows = [plan.row(index).tolist() for index in range(len(plan))]
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= row_tokens for row in rows)
    assert all(1 <= len(row) <= (row_documents if packing else 1) for row in rows)
    again = plan_epoch(np.array(lengths, dtype=np.int32), epoch=epoch, **options)
    assert [again.row(index).tolist() for index in range(len(again))] == rows
    if not shuffle and window >= len(lengths):
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@pytest.mark.parametrize("shape", ["uniform", "lognormal", "two kinds"])
def test_rows_are_filled_better_than_in_order(shape):
    random = np.random.default_rng(1)
    lengths = {
        "uniform": random.integers(1, 2049, 5000),
        "lognormal": np.clip(random.lognormal(5.5, 1.0, 5000), 1, 2048).astype(int),
        "two kinds": np.where(random.random(5000) < 0.5, 600, 1400),
    }[shape]
    rows = len(pack(lengths, 2048, 128))
    # Of the two kinds only one long document fits in a row.
    best = max(-(-int(lengths.sum()) // 2048), int((lengths > 1024).sum()))
    assert rows < next_fit(lengths.tolist(), 2048, 128)
    assert rows <= 1.02 * best


def test_epochs_and_seeds_differ_and_windows_bound_the_distance():
    lengths = np.full(1000, 10, dtype=np.int32)
    options = dict(row_tokens=40, row_documents=4, window=100, packing=True)

    def order(seed, epoch, shuffle=True):
        return plan_epoch(lengths, seed=seed, epoch=epoch, shuffle=shuffle, **options).documents.tolist()

    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert all(abs(place - document) < 100 for place, document in enumerate(order(1, 0, shuffle=False)))
    # The order of a run must outlive a change of versions: a checkpoint stores only the position in it.
    assert order(1, 0)[:4] == [986, 143, 371, 450]


def test_a_document_longer_than_a_row():
    with pytest.raises(ValueError, match="document 1 has 41 tokens, a row has 40"):
        pack([1, 41], 40, 4)


def test_many_documents_are_quick():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, 100_000), 1, 2048).astype(np.int32)
    start = time.process_time()
    plan_epoch(lengths, row_tokens=2048, row_documents=128, window=4096, packing=True, shuffle=True, seed=0, epoch=0)
    assert time.process_time() - start < 3
