"""Attention against a dense float64 softmax over the whole stream, masked pair by pair."""

import pytest
import torch

from gapless.batch import segments
from gapless.kernels.attention import attention
from gapless.kernels.runtime import spare_columns

LENGTHS = [5, 0, 1, 17, 7]


def pairs(q_segments, k_segments, window, causal):
    """bool [Tq, Tk] from the definition, one pair at a time."""
    seen = torch.zeros(q_segments.tokens, k_segments.tokens, dtype=torch.bool)
    for document in range(len(q_segments.lengths)):
        for i in range(q_segments.lengths[document]):
            for j in range(k_segments.lengths[document]):
                ahead = q_segments.offsets[document] + i - k_segments.offsets[document] - j
                if not causal or (ahead >= 0 and (window is None or ahead < window)):
                    seen[q_segments.starts[document] + i, k_segments.starts[document] + j] = True
    return seen


def oracle(q, k, v, q_segments, k_segments, window=None, softcap=None, sinks=None, scale=None, causal=True):
    """Out [Tq, N, Dv] and LSE [Tq, N] by one softmax over all keys of the stream."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qnd,knd->nqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    weights = scores.exp() * pairs(q_segments, k_segments, window, causal)
    total = weights.sum(-1)
    if sinks is not None:
        total = total + sinks.exp()[:, None]
    out = torch.einsum("nqk,knd->qnd", weights, v) / total.clamp(min=1e-300).t()[..., None]
    return out, total.log().t()


def tensors(q_segments, k_segments, heads=6, kv_heads=2, dim=10, v_dim=10, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    q = random(q_segments.tokens, heads, dim)
    return q, random(k_segments.tokens, kv_heads, dim), random(k_segments.tokens, kv_heads, v_dim)


PACKED = segments(LENGTHS, tokens=36)
CACHE = segments([8, 3, 4, 20, 7], starts=[0, 10, 13, 20, 40], tokens=50)
# Chunks that continue the documents of CACHE: the last query is at the last key.
CHUNK = segments([3, 1, 4, 2, 0], offsets=[5, 2, 0, 18, 7], tokens=12)
# Queries before every key of their document, and keys whose first positions are gone.
LATE = segments([8, 3, 4, 20, 7], offsets=[4, 0, 0, 1, 0], tokens=42)
EARLY = segments([6, 3, 2, 20, 7], offsets=[2, 0, 0, 0, 0], tokens=40)

CASES = {
    "packed": (PACKED, PACKED, {}),
    "window": (PACKED, PACKED, {"window": 4}),
    "window of one": (PACKED, PACKED, {"window": 1}),
    "wide window": (PACKED, PACKED, {"window": 17}),
    "scale": (PACKED, PACKED, {"scale": 0.21}),
    "bidirectional": (PACKED, PACKED, {"causal": False}),
    "softcap": (PACKED, PACKED, {"softcap": 1.5}),
    "sinks": (PACKED, PACKED, {"sinks": True}),
    "sinks, softcap, window": (PACKED, PACKED, {"sinks": True, "softcap": 2.0, "window": 3}),
    "cache": (CHUNK, CACHE, {}),
    "cache with window": (CHUNK, CACHE, {"window": 4}),
    "cross": (CHUNK, CACHE, {"causal": False}),
    "blind queries": (EARLY, LATE, {}),
    "blind queries with window": (EARLY, LATE, {"window": 2}),
    "blind queries with sinks": (EARLY, LATE, {"sinks": True}),
    "window behind the keys": (segments([3], offsets=[9]), segments([6]), {"window": 5}),
    "window just behind the keys": (segments([3], offsets=[9]), segments([6]), {"window": 6}),
    "window that leaves out the first key": (segments([1], offsets=[8]), segments([9]), {"window": 8}),
    "window as long as the keys": (segments([1], offsets=[8]), segments([9]), {"window": 9}),
    "no keys": (segments([3, 2]), segments([0, 2], tokens=5), {}),
}


@pytest.mark.parametrize("heads", [(6, 2, 10, 10), (4, 4, 8, 6), (3, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, heads):
    q_segments, k_segments, options = CASES[case]
    inputs = tensors(q_segments, k_segments, *heads)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-2, 1, heads[0])
    key_segments = None if k_segments is q_segments else k_segments
    out = attention(*inputs, q_segments, key_segments, **options)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = oracle(*doubles, q_segments, k_segments, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad((out * weight).sum(), inputs)
    exact_grads = torch.autograd.grad((exact * weight).sum(), doubles)
    for grad, expected in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)
    again, lse = attention(*inputs, q_segments, key_segments, return_lse=True, **options)
    torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-5)
    assert lse.dtype == torch.float32
    in_document = torch.zeros(q_segments.tokens, dtype=torch.bool)
    for start, length in zip(q_segments.starts, q_segments.lengths, strict=True):
        in_document[start : start + length] = True
    torch.testing.assert_close(lse[in_document].double(), exact_lse[in_document], rtol=1e-5, atol=1e-5)
    assert (lse[~in_document] == -torch.inf).all()
    assert (out[~in_document] == 0).all()


def test_gradient_of_sinks():
    q, k, v = tensors(PACKED, PACKED)
    sinks = torch.linspace(-2, 1, 6).requires_grad_()
    double_sinks = sinks.detach().double().requires_grad_()
    out = attention(q, k, v, PACKED, sinks=sinks)
    exact, _ = oracle(q.double(), k.double(), v.double(), PACKED, PACKED, sinks=double_sinks)
    (grad,) = torch.autograd.grad(out.square().sum(), sinks)
    (expected,) = torch.autograd.grad(exact.square().sum(), double_sinks)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_one_query_at_a_time_equals_all_at_once():
    """Decode: a cache that grows by a token gives the rows of the packed result."""
    q, k, v = tensors(PACKED, PACKED)
    full = attention(q, k, v, PACKED)
    start, length = PACKED.starts[3], PACKED.lengths[3]
    for i in range(length):
        at = start + i
        row = attention(
            q[at : at + 1], k[start : at + 1], v[start : at + 1], segments([1], offsets=[i]), segments([i + 1])
        )
        torch.testing.assert_close(row[0], full[at], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_documents_do_not_touch_each_other(options):
    """Poison one document and the tail: every bit of the others stays."""
    q, k, v = tensors(PACKED, PACKED)
    out = attention(q, k, v, PACKED, **options)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[PACKED.starts[3] : PACKED.starts[4]] = torch.nan
            tensor[sum(LENGTHS) :] = torch.nan
    poisoned = attention(q, k, v, PACKED, **options)
    assert poisoned[PACKED.starts[3] : PACKED.starts[4]].isnan().all()
    for part in (slice(0, 6), slice(PACKED.starts[4], sum(LENGTHS)), slice(sum(LENGTHS), None)):
        assert torch.equal(poisoned[part], out[part])


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"sinks": torch.zeros(6)}], ids=["plain", "window", "sinks"])
def test_bf16_within_twice_the_eager_error(options):
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors(PACKED, PACKED))
    exact, _ = oracle(q.double(), k.double(), v.double(), PACKED, PACKED, **options)
    eager, _ = oracle(q, k, v, PACKED, PACKED, **options)
    out = attention(q, k, v, PACKED, **options)
    assert out.dtype == torch.bfloat16
    budget = (eager[: sum(LENGTHS)].double() - exact[: sum(LENGTHS)]).square().mean().sqrt()
    assert (out.double() - exact).square().mean().sqrt() <= 2 * budget + 1e-3


def test_extreme_scores():
    q, k, v = (x.detach() for x in tensors(PACKED, PACKED))
    out, lse = attention(q * 1e4, k * 1e4, v, PACKED, return_lse=True)
    assert out.isfinite().all()
    assert lse[: sum(LENGTHS)].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(36, 4, 10), "v": torch.zeros(36, 4, 10)}, "4 key heads do not divide 6 query heads"),
        ({"k": torch.zeros(36, 2, 8)}, "attention takes q"),
        ({"q": torch.zeros(35, 6, 10)}, "do not match segments of 36"),
        ({"k_segments": segments([3], tokens=36)}, "5 documents of queries, 1 of keys"),
        ({"v": torch.zeros(36, 2, 10, dtype=torch.float64)}, "tensors of one dtype"),
        (
            {"k": torch.zeros(36, 2, 10, device="meta")},
            "of one device, not q on cpu, k on meta, v on cpu, q_segments on",
        ),
        ({"k_segments": segments(LENGTHS, tokens=36, device="meta")}, "q_segments on cpu, k_segments on meta"),
        ({"window": 0}, "window must be at least 1"),
        ({"window": 2, "causal": False}, "needs causal attention"),
        ({"softcap": 0.0}, "softcap must be above 0 and finite, not 0.0; None for none"),
        ({"softcap": -1.0}, "softcap must be above 0"),
        ({"softcap": float("inf")}, "softcap must be above 0"),
        ({"softcap": float("nan")}, "softcap must be above 0"),
        ({"spare": -1}, "spare must be at least 0, not -1"),
        ({"scale": float("inf")}, "scale must be finite, not inf"),
        ({"scale": float("nan")}, "scale must be finite, not nan"),
        ({"sinks": torch.zeros(2)}, r"sinks must be \[6\] on cpu, one per query head, not \[2\]"),
        ({"sinks": torch.zeros(6, 1)}, r"not \[6, 1\]"),
    ],
)
def test_refusals(change, message):
    q, k, v = (x.detach() for x in tensors(PACKED, PACKED))
    arguments = {"q": q, "k": k, "v": v, "q_segments": PACKED, **change}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q_segments": [5, 0, 1, 17, 7]},
            "q_segments must be Segments, as .* makes them, not list",
        ),
        ({"k_segments": (36,)}, "k_segments must be Segments"),
        ({"window": 2.5}, "window must be an integer, or None for none, not 2.5"),
        ({"window": True}, "window must be an integer, or None for none, not True"),
        ({"window": "3"}, "window must be an integer, or None for none, not '3'"),
        ({"sinks": [0.0] * 6}, "sinks must be a tensor of one number per query head, not list"),
        ({"sinks": 1.0}, "sinks must be a tensor"),
        ({"scale": torch.tensor(0.3)}, "scale must be a number, not Tensor"),
        ({"softcap": "30"}, "softcap must be a number, not str"),
    ],
)
def test_other_types_are_refused(change, message):
    q, k, v = (x.detach() for x in tensors(PACKED, PACKED))
    arguments = {"q": q, "k": k, "v": v, "q_segments": PACKED, **change}
    with pytest.raises(TypeError, match=message):
        attention(**arguments)


def test_a_stream_without_documents_has_gradients_of_zero():
    """Of sinks alone, too, and through the LSE."""
    empty = segments([], tokens=4)
    q, k, v = (x.detach() for x in tensors(empty, empty))
    sinks = torch.zeros(6, requires_grad=True)
    for x in attention(q, k, v, empty, sinks=sinks, return_lse=True):
        (grad,) = torch.autograd.grad(x.nan_to_num(neginf=0.0).sum(), sinks)
        assert torch.equal(grad, torch.zeros(6))


def test_huge_windows_are_none():
    q, k, v = tensors(PACKED, PACKED)
    assert torch.equal(attention(q, k, v, PACKED, window=2**31 - 1), attention(q, k, v, PACKED))


@pytest.mark.parametrize("case", [(PACKED, PACKED, {}), (PACKED, PACKED, {"window": 4}), (CHUNK, CACHE, {})], ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(case, scale):
    q_segments, k_segments, options = case
    inputs = tensors(q_segments, k_segments)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = attention(*inputs, q_segments, k_segments, scale=scale, **options)
    exact, _ = oracle(*doubles, q_segments, k_segments, scale=scale, **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    expected = torch.autograd.grad(exact.square().sum(), doubles)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_a_negative_scale_at_one_query_a_document():
    q_segments, k_segments = segments([1, 1], offsets=[4, 2]), segments([5, 3], starts=[0, 8], tokens=16)
    q, k, v = (x.detach() for x in tensors(q_segments, k_segments))
    exact, _ = oracle(q.double(), k.double(), v.double(), q_segments, k_segments, scale=-0.3)
    with torch.no_grad():
        out = attention(q, k, v, q_segments, k_segments, scale=-0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [1, 2])
def test_anything_may_lie_between_documents_of_a_cache(garbage, where):
    """With one query a document, where all documents are read up to the longest one's end."""
    q_segments = segments([1, 1, 1], offsets=[4, 2, 0])
    k_segments = segments([5, 3, 1], starts=[0, 8, 16], tokens=24)
    inputs = [x.detach() for x in tensors(q_segments, k_segments)]
    for options in ({}, {"window": 2}):
        with torch.no_grad():
            clean = attention(*inputs, q_segments, k_segments, **options)
        spoilt = [x.clone() for x in inputs]
        for gap in (slice(5, 8), slice(11, 16), slice(17, 24)):
            spoilt[where][gap] = garbage
        with torch.no_grad():
            out = attention(*spoilt, q_segments, k_segments, **options)
        torch.testing.assert_close(out, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_spare_columns_of_the_reference(grad):
    q_segments, k_segments = segments([1, 1], offsets=[4, 2]), segments([5, 3], starts=[0, 8], tokens=16)
    inputs = [x.detach().requires_grad_(grad) for x in tensors(q_segments, k_segments)]
    with torch.set_grad_enabled(grad):
        plain, out = (attention(*inputs, q_segments, k_segments, spare=spare) for spare in (0, 24))
    assert torch.equal(out, plain)
    assert (spare_columns(plain.flatten(1)), spare_columns(out.flatten(1))) == (0, 24)
    if grad:
        for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (out, plain)), strict=True):
            assert torch.equal(ours, theirs)
