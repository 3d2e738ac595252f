"""The cache's spans and the batched decode attention, against plain lists and the reference attention."""

import pytest
import torch

from gapless.batch import segments
from gapless.inference.generate import new_cache
from gapless.inference.kv_cache import KVCache
from gapless.kernels.attention.decode import decode_attention, decodes
from gapless.kernels.attention.reference import reference_attention
from tiny import tiny_model


def new(sequences=4, capacity=7, layers=2):
    return KVCache(
        layers=layers, kv_heads=2, head_dim=3, v_head_dim=5, sequences=sequences, capacity=capacity, dtype=torch.float32
    )


def fill(cache, spans, counts, layers=2):
    """Appends random keys and values; returns them per layer and span, and what the last append gave."""
    total = sum(counts)
    pieces, streams = [], []
    cache_queries = cache.extend(spans, counts)
    for layer in range(layers):
        k, v = torch.randn(total, 2, 3), torch.randn(total, 2, 5)
        streams.append(cache.append(layer, k, v))
        pieces.append(list(zip(k.split(counts), v.split(counts), strict=True)))
    return cache_queries, pieces, streams


def test_spans_hold_what_was_appended_through_growth_and_removal():
    torch.manual_seed(0)
    cache = new()
    expected = {}  # name -> per layer list of (k, v)
    names = []
    for name in "abc":
        names.append(name)
        assert cache.add() == len(names) - 1
    rounds = [([0, 1, 2], [3, 1, 2]), ([0, 2], [1, 2]), ([0, 1, 2], [1, 1, 1])]
    for spans, counts in rounds:
        queries, pieces, _ = fill(cache, spans, counts)
        assert queries.lengths == tuple(counts)
        for layer in range(2):
            for span, piece in zip(spans, pieces[layer], strict=True):
                expected.setdefault((names[span], layer), []).append(piece)
    assert cache.remove(0) == 2
    names = ["c", "b"]
    queries, pieces, streams = fill(cache, [0, 1], [1, 1])
    assert queries.offsets == (5, 2)
    for layer, (keys, values) in enumerate(streams):
        for index, name in enumerate(names):
            parts = [*expected[name, layer], pieces[layer][index]]
            start, length = cache.segments.starts[index], cache.segments.lengths[index]
            torch.testing.assert_close(keys[start : start + length], torch.cat([k for k, _ in parts]), rtol=0, atol=0)
            torch.testing.assert_close(values[start : start + length], torch.cat([v for _, v in parts]), rtol=0, atol=0)
    assert cache.lengths == [6, 3]


@pytest.mark.parametrize("removed", [0, 1])
def test_nothing_of_a_removed_sequence_is_left(removed):
    cache = new()
    for length in (5, 2):
        fill(cache, [cache.add()], [length])
    cache._keys[0][cache.capacity * removed + (1 if removed else 4)] = torch.nan
    cache._values[1][cache.capacity * removed] = torch.inf
    cache.remove(removed)
    kept = cache.lengths[0]
    for stream in (*cache._keys, *cache._values):
        assert stream[:kept].isfinite().all()
        assert not stream[kept:].any()


def test_a_sequence_cannot_outgrow_its_span():
    cache = new()
    cache.add()
    cache.extend([0], [6])
    with pytest.raises(ValueError, match="8 tokens exceed the cache's capacity of 7"):
        cache.extend([0], [2])


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("lengths", [[3, 1, 6, 2], [4]])
def test_decode_attention_equals_the_reference(window, lengths):
    torch.manual_seed(2)
    cache = new()
    for _ in lengths:
        cache.add()
    fill(cache, range(len(lengths)), lengths)
    queries, _, streams = fill(cache, range(len(lengths)), [1] * len(lengths))
    keys, values = streams[1]
    q = torch.randn(len(lengths), 6, 3)
    assert decodes(queries, cache.segments)
    ours = decode_attention(q, keys, values, queries, cache.segments, window, 0.7)
    reference, _ = reference_attention(
        q.double(),
        keys.double(),
        values.double(),
        queries,
        cache.segments,
        window,
        None,
        None,
        0.7,
        True,
        need_lse=False,
    )
    torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-5)


def test_only_evenly_spaced_single_queries_take_the_batched_path():
    cache = new()
    for _ in range(3):
        cache.add()
    assert not decodes(cache.extend([0, 1, 2], [2, 1, 1]), cache.segments)
    assert decodes(cache.extend([0, 1, 2], [1, 1, 1]), cache.segments)
    assert not decodes(cache.extend([1, 2], [1, 1]), cache.segments)
    assert not decodes(cache.extend([0], [1]), segments([5], tokens=28))


def test_a_model_whose_trained_embedding_is_float32_has_a_cache_of_its_activations():
    """As FSDP2 keeps it."""
    model = tiny_model(dtype="bf16")
    model.embed.weight = torch.nn.Parameter(model.embed.weight.float())
    keys, values = new_cache(model, sequences=1, capacity=2)._keys, new_cache(model, sequences=1, capacity=2)._values
    assert {stream.dtype for stream in keys + values} == {torch.bfloat16}
