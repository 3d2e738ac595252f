import json
import threading

import numpy as np
import pytest
import torch

from gapless.batch import BatchLayout
from gapless.config import DataConfig
from gapless.data.loader import Loader, eval_batches
from gapless.data.store import tokenize
from gapless.data.tokenizer import Tokenizer
from tiny_tokenizer import write_tiny_tokenizer

ROW_TOKENS = 48


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def store(tokenizer):
    random = np.random.default_rng(3)
    rows = [
        {"prompt": "ab" * random.integers(0, 9) + str(index), "completion": "z" * random.integers(1, 20)}
        for index in range(101)
    ]
    return tokenize(rows, tokenizer, DataConfig(train=(), max_length=ROW_TOKENS))


def make(store, rows=2, accumulation=2, rank=0, world_size=1, **options):
    layout = BatchLayout(rows=rows, row_tokens=ROW_TOKENS, row_documents=5)
    options = {"seed": 7, "learning_rate": lambda step: 0.5**step, **options}
    return Loader(store, layout, gradient_accumulation_steps=accumulation, rank=rank, world_size=world_size, **options)


def take(loader, count):
    steps = [loader.next_step() for _ in range(count)]
    loader.close()
    return steps


def documents_of(batch):
    tokens = batch.tokens.tolist()
    return [tokens[start : start + n] for start, n in zip(batch.segments.starts, batch.segments.lengths, strict=True)]


def rows_of(steps):
    """Per step {row id: (tokens, labels)}, from the counters that are in the batches."""
    found = []
    for step in steps:
        rows = {}
        for batch in step.micro_batches:
            row, column = batch.segments.dropout.row, batch.segments.dropout.column
            for row_id in batch.row_ids:
                held = (row[: batch.num_tokens] == row_id).nonzero().flatten()
                assert column[held].tolist() == list(range(len(held)))
                assert row_id not in rows
                rows[row_id] = (batch.tokens[held].tolist(), batch.labels[held].tolist())
        found.append(rows)
    return found


def bits(steps):
    return [[batch.buffer.tolist() for batch in step.micro_batches] for step in steps]


def test_an_epoch_holds_every_document_once(store):
    for packing in (True, False):
        loader = make(store, packing=packing)
        per_epoch = [loader.steps_per_epoch(epoch) for epoch in (0, 1, 2)]
        want = sorted(store.document(index).tokens.tolist() for index in range(len(store)))
        orders = []
        for epoch, count in enumerate(per_epoch):
            steps = [loader.next_step() for _ in range(count)]
            seen = [document for step in steps for batch in step.micro_batches for document in documents_of(batch)]
            assert sorted(seen) == want
            orders.append(seen)
            assert steps[-1].epoch == epoch + 1
            assert sum(step.num_trained for step in steps) == store.trained.sum()
        loader.close()
        assert orders[0] != orders[1] != orders[2]
        rows = loader.rows_per_epoch(0)
        assert rows == len(store) if not packing else rows < len(store) / 1.5
        assert per_epoch[0] == -(-rows // 4)


def test_order_of_the_store_without_shuffle(store):
    loader = make(store, shuffle=False, packing=False)
    seen = [document for step in take(loader, 26) for batch in step.micro_batches for document in documents_of(batch)]
    assert seen == [store.document(index).tokens.tolist() for index in range(len(store))]


def test_steps_do_not_depend_on_how_rows_are_cut(store):
    steps = make(store, rows=8, accumulation=1).steps_per_epoch(0) + 3
    whole = take(make(store, rows=8, accumulation=1), steps)
    assert len(rows_of(whole)[0]) == 8
    last = make(store, rows=8, accumulation=1).steps_per_epoch(0) - 1
    assert len(rows_of(whole)[last]) < 8, "the last step of the epoch should be a short one"
    for rows, accumulation, world_size in [(4, 2, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (8, 1, 1)]:
        ranks = [
            take(make(store, rows, accumulation, rank, world_size), steps) for rank in range(world_size)
        ]  # fmt: skip
        for number, want in enumerate(rows_of(whole)):
            union = {}
            for rank in ranks:
                mine = rows_of(rank)[number]
                assert not union.keys() & mine.keys()
                union |= mine
                assert len(rank[number].micro_batches) == accumulation
                assert rank[number].num_trained == whole[number].num_trained
            assert union == want
            total = sum(batch.num_trained for rank in ranks for batch in rank[number].micro_batches)
            assert total == whole[number].num_trained


def test_micro_batches_take_turns_among_ranks(store):
    for rank in range(3):
        step = take(make(store, rows=2, accumulation=2, rank=rank, world_size=3), 2)[1]
        ids = [batch.row_ids for batch in step.micro_batches]
        assert ids == [(12 + 2 * rank, 13 + 2 * rank), (18 + 2 * rank, 19 + 2 * rank)]


def test_scalars_of_a_step(store):
    for number, step in enumerate(take(make(store), 40)):
        assert step.step == number
        for batch in step.micro_batches:
            scalars = batch.scalars
            assert (int(scalars.step), int(scalars.seed)) == (number, 7)
            assert int(scalars.num_trained) == step.num_trained == batch.step_trained
            assert float(scalars.learning_rate) == np.float32(0.5**number)


def test_labels_are_the_trained_tokens(store):
    step = take(make(store), 1)[0]
    place = 0
    for batch in step.micro_batches:
        for start, length in zip(batch.segments.starts, batch.segments.lengths, strict=True):
            document = store.document(int(step.documents[place]))
            want = np.append(np.where(document.trained[1:], document.tokens[1:], -100), -100)
            assert batch.labels[start : start + length].tolist() == want.tolist()
            place += 1
    assert place == len(step.documents) == len(step.where())
    assert step.where()[0] == store.where(int(step.documents[0]))


@pytest.mark.parametrize("stop", [0, 1, 5, "end", "end + 1"])
def test_resume_is_exact(store, stop):
    end = make(store).steps_per_epoch(0)
    stop = {"end": end, "end + 1": end + 1}.get(stop, stop)
    straight = take(make(store), stop + end + 3)
    built = threading.Semaphore(0)

    def learning_rate(step):
        built.release()
        return 0.5**step

    first = make(store, prefetch=3, learning_rate=learning_rate)
    for number in range(stop):
        first.next_step()
        # Steps are built ahead by now; they are not part of the state.
        assert all(built.acquire(timeout=10) for _ in range(1 if number else 4))
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    second = make(store, prefetch=4)
    second.load_state_dict(state)
    resumed = take(second, end + 3)
    assert bits(resumed) == bits(straight[stop:])
    assert [step.where() for step in resumed] == [step.where() for step in straight[stop:]]
    assert [step.epoch for step in resumed] == [step.epoch for step in straight[stop:]]


def test_resume_on_another_number_of_ranks(store):
    straight = take(make(store, rows=2, accumulation=4), 9)
    first = make(store, rows=2, accumulation=4)
    for _ in range(4):
        first.next_step()
    state = first.state_dict()
    first.close()
    ranks = []
    for rank in range(2):
        loader = make(store, rows=1, accumulation=4, rank=rank, world_size=2)
        loader.load_state_dict(state)
        ranks.append(take(loader, 5))
    for number, want in enumerate(rows_of(straight[4:])):
        assert rows_of(ranks[0])[number] | rows_of(ranks[1])[number] == want


def test_a_loader_goes_on_after_close_and_can_be_set_back(store):
    straight = take(make(store), 8)
    loader = make(store)
    steps = take(loader, 3) + take(loader, 2)
    assert bits(steps) == bits(straight[:5])
    state = loader.state_dict()
    take(loader, 1)
    loader.load_state_dict(state)
    assert bits(take(loader, 3)) == bits(straight[5:])
    loader.close()


def test_states_of_other_runs_are_refused(store, tokenizer):
    state = make(store).state_dict()
    other = tokenize([{"text": "other"}], tokenizer, DataConfig(train=(), max_length=ROW_TOKENS))
    with pytest.raises(ValueError, match="other training data"):
        make(other).load_state_dict(state)
    for options, name in (
        ({"seed": 8}, "seed 7 -> 8"),
        ({"packing": False}, "packing True -> False"),
        ({"accumulation": 4}, "rows_per_step 4 -> 8"),
        ({"packing_window": 10}, "packing_window 4096 -> 10"),
    ):
        with pytest.raises(ValueError, match=name):
            make(store, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="format_version 2, known: 1; resume with the gapless that wrote it"):
        make(store).load_state_dict({**state, "format_version": 2})


def test_errors_of_the_worker_reach_the_caller(store):
    def learning_rate(step):
        if step == 3:
            raise ArithmeticError("no rate")
        return 0.0

    loader = make(store, learning_rate=learning_rate)
    for _ in range(3):
        loader.next_step()
    with pytest.raises(ArithmeticError, match="no rate"):
        loader.next_step()
    loader.close()


def test_an_interrupted_wait_skips_no_step(store, monkeypatch):
    loader = make(store)
    loader.next_step()

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(loader._ahead[0], "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.next_step()
    assert [step.step for step in take(loader, 2)] == [1, 2]


def test_steps_are_built_ahead_by_a_worker_that_close_ends(store):
    built = threading.Semaphore(0)
    threads = set()

    def learning_rate(step):
        threads.add(threading.current_thread())
        built.release()
        return 0.0

    loader = make(store, accumulation=1, prefetch=3, learning_rate=learning_rate)
    loader.next_step()
    # Three more than what was asked for.
    assert all(built.acquire(timeout=10) for _ in range(4))
    assert not built.acquire(timeout=0.05)
    loader.close()
    assert threading.current_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)


def test_bad_settings(store):
    for options, message in (
        ({"accumulation": 0}, "gradient_accumulation_steps must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not among 2 ranks"),
        ({"seed": 2**31}, "seed must be in"),
        ({"prefetch": 0}, "prefetch must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make(store, **options)
    longest = int(store.lengths.max())
    with pytest.raises(ValueError, match=rf"row \d+ has {longest} tokens, a row has {longest - 1}"):
        Loader(
            store, BatchLayout(rows=1, row_tokens=longest - 1, row_documents=2), seed=0, learning_rate=lambda step: 0.0
        )


@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_sees_all_documents_once_in_a_fixed_order(store, world_size):
    layout = BatchLayout(rows=3, row_tokens=ROW_TOKENS, row_documents=5)
    ranks = [list(eval_batches(store, layout, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [document for batches in ranks for batch in batches for document in documents_of(batch)]
    assert sorted(seen) == sorted(store.document(index).tokens.tolist() for index in range(len(store)))
    assert sum(batch.num_trained for batches in ranks for batch in batches) == store.trained.sum()
    again = list(eval_batches(store, layout, rank=0, world_size=world_size))
    assert all(torch.equal(left.buffer, right.buffer) for left, right in zip(ranks[0], again, strict=True))
