"""The attention kernels against plain attention in float64, values and gradients, in tiles small enough to be many."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gapless.batch import segments
from gapless.kernels import gluon
from gapless.kernels.attention import attention, attention_tiles, flash
from kernels.attention_cases import BF16, FP16, FP32, Case, make_segments
from kernels.tools import DEVICE, kernels

TILES = flash.Tiles(flash.Tile(32, 16, 4, 1), flash.Tile(16, 32, 4, 1), flash.Tile(16, 32, 4, 2))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(flash, "_tiles", lambda *_: TILES)


DOCUMENTS = [70, 0, 1, 33, 16]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("lse", [False, True])
def test_causal(dtype, lse):
    Case(make_segments(DOCUMENTS, None), heads=(4, 2), dtype=dtype, lse=lse).check()


@pytest.mark.parametrize("window", [1, 15, 16, 40, 200])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_window(window, dtype):
    Case(make_segments([90, 1, 20], window), window=window, dtype=dtype).check()


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (40, 24), (72, 72)])
def test_head_dims(dims):
    Case(make_segments([40, 9], None), dims=dims, heads=(2, 2), lse=True).check()
    Case(make_segments([40, 9], None), dims=dims, dtype=BF16).check()


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"causal": False}])
@pytest.mark.parametrize("sinks", [False, True])
def test_softcap_and_sinks(options, sinks):
    queries = make_segments([50, 3], options.get("window"))
    Case(queries, softcap=2.0, sinks=sinks, lse=True, scale=0.7, **options).check(eps=4e-6)
    # The sinks' gradient is three numbers, of which eager may happen to hit one.
    Case(queries, sinks=sinks, dtype=BF16, heads=(3, 3), **options).check(eps=1e-3)


@pytest.mark.parametrize(
    ("queries", "offsets", "keys", "key_offsets"),
    [
        ([20, 5, 3], [20, 2, 3], [40, 0, 9], [0, 0, 0]),  # a chunk that continues; a document without keys
        ([40, 5, 2], [0, 0, 0], [17, 1, 9], [23, 4, 0]),  # more queries than keys: the first see nothing
        ([1, 1], [40, 0], [41, 1], [0, 0]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"causal": False}])
def test_other_keys_than_queries(queries, offsets, keys, key_offsets, options):
    window = options.get("window")
    q_segments = make_segments(queries, window, offsets)
    starts = [0, 50, 55][: len(keys)]  # spans of a cache
    k_segments = make_segments(keys, window, key_offsets, starts)
    for sinks in (False, True):
        Case(q_segments, k_segments, sinks=sinks, lse=True, **options).check()


def test_nothing_crosses_documents():
    """Not even what is not a number."""
    case = Case(make_segments([20, 30, 7], None), dtype=BF16)
    plain, _ = case.on_kernels()
    for x in case.inputs:
        x[20:50] = torch.nan
    spoilt, _ = case.on_kernels()
    for rows in (slice(0, 20), slice(50, 57)):
        assert torch.equal(plain[0][rows], spoilt[0][rows])


def test_tokens_of_no_document_are_zero():
    case = Case(make_segments([20, 3], None, starts=[4, 40]), lse=True, sinks=True)
    outs, grads = case.on_kernels()
    empty = [*range(4), *range(24, 40), *range(43, 48)]
    for x in (outs[0], *grads[:3]):
        assert not x[empty].any()
    with kernels():
        _, lse = attention(*case.inputs[:3], case.queries, sinks=case.inputs[3], return_lse=True)
    assert (lse[empty] == -torch.inf).all()


def test_a_stream_without_documents():
    case = Case(make_segments([], None), sinks=True)
    outs, grads = case.on_kernels()
    assert not any(x.any() for x in (*outs, *grads))


def test_the_output_may_be_changed_in_place():
    """If no gradient goes through it: else torch says what happened."""
    case = Case(make_segments([20], None))
    with kernels():
        plain = attention(*case.inputs, case.queries)
        recorded = attention(*(x.clone().requires_grad_() for x in case.inputs), case.queries)
        expected = 2 * plain
        plain *= 2
        recorded *= 2
        assert torch.equal(plain, expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            recorded.sum().backward()


@pytest.mark.parametrize("size", [1e2, 1e4, 3e18])
def test_extreme_scores(size):
    case = Case(make_segments([40], None), lse=True, softcap=5.0)
    case.inputs[0] *= size
    outs, grads = case.on_kernels()
    assert all(x.isfinite().all() for x in (*outs, *grads))


def test_scale_and_values_are_read_as_they_lie():
    case = Case(make_segments([40, 9], None), scale=0.3, heads=(4, 2))
    q, k, v = case.inputs
    fused = torch.zeros(54, 2, 5, 16, device=DEVICE)
    fused[:, :, 4] = v
    with kernels():
        out = attention(q, k, fused[:, :, 4], case.queries, scale=0.3, spare=64)
    assert out.flatten(1).stride() == (4 * 16 + 64, 1)
    torch.testing.assert_close(out, case.plain(q, k, v), rtol=1e-4, atol=1e-5)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    case = Case(make_segments([20], None))
    _, expected = case.on_kernels()
    computed = []
    for name in ("_queries_backward", "_keys_backward"):
        plain = getattr(flash, name)
        monkeypatch.setattr(flash, name, lambda *a, plain=plain, name=name: computed.append(name) or plain(*a))
    for wanted in (0, 2):
        leaves = [x.clone().requires_grad_(place == wanted) for place, x in enumerate(case.inputs)]
        with kernels():
            (grad,) = torch.autograd.grad(case.fast(*leaves), leaves[wanted], case.upstream[0])
        assert torch.equal(grad, expected[wanted])
    assert computed == ["_queries_backward", "_keys_backward"]


def test_tables_must_be_declared():
    case = Case(segments([9], device=DEVICE))
    with (
        kernels(),
        pytest.raises(KeyError, match="was not declared .*give .* what kernels.attention.attention_tiles returns"),
    ):
        case.fast(*case.inputs)


def test_tables_of_keys_are_missed_in_the_forward():
    queries, bare = make_segments([9], None), segments([9], tokens=14, max_documents=3, device=DEVICE)
    case = Case(queries, bare)
    with kernels():
        out = case.fast(*case.inputs)
        torch.testing.assert_close(out, case.plain(*case.inputs), rtol=1e-4, atol=1e-5)
        case.fast(case.inputs[0].requires_grad_(), *case.inputs[1:])  # which takes the queries' table
        case.inputs[1].requires_grad_()
        with pytest.raises(KeyError, match="was not declared .*give .* what kernels.attention.attention_tiles returns"):
            case.fast(*case.inputs)


@pytest.mark.parametrize("window", [2**30 - 1, 2**30, 2**31 - 1])
def test_huge_windows(window):
    Case(make_segments([40, 9], window), window=window).check()
    queries = make_segments([20, 5], window, [2**30 - 20, 0])
    keys = make_segments([40, 5], window, [2**30 - 40, 0], [0, 45])
    Case(queries, keys, window=window).check()


def test_sinks_as_they_lie():
    case = Case(make_segments([30, 9], None), heads=(4, 2))
    sinks = torch.randn(4, 3, device=DEVICE)
    case.inputs.append(sinks)
    fast, plain = case.fast, case.plain
    case.fast = lambda q, k, v, table: fast(q, k, v, table[:, 1])
    case.plain = lambda q, k, v, table: plain(q, k, v, table[:, 1])
    case.check()


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-46])
def test_scales_that_kernels_do_not_take(scale):
    case = Case(make_segments([30, 9], None), scale=scale)
    exact = case.plain(*(x.double() for x in case.inputs))
    with kernels():
        torch.testing.assert_close(case.fast(*case.inputs).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chip", "kernels_of_it"),
    [
        ("attention", ("flash_forward", "flash_delta", "flash_keys", "flash_queries")),
        ("hopper", ("hopper_forward", "hopper_delta", "hopper_backward", "hopper_queries")),
    ],
)
def test_batches_of_other_sizes_compile_nothing(chip, kernels_of_it):
    if chip == "hopper" and not gluon.FITS:
        pytest.skip("needs Gluon")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "specializations.py"
    run = subprocess.run([sys.executable, script, chip], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == dict.fromkeys(kernels_of_it, 1)


def test_large_heads_take_the_reference():
    with kernels():
        assert attention_tiles(512, 512, [None], BF16, DEVICE) == ()
        assert attention_tiles(64, 64, [None], torch.float64, DEVICE) == ()
        assert attention_tiles(64, 64, [2**31], BF16, DEVICE) == attention_tiles(64, 64, [None], BF16, DEVICE)
        case = Case(segments([9], device=DEVICE), dims=(512, 512))
        torch.testing.assert_close(case.fast(*case.inputs), case.plain(*case.inputs), rtol=1e-4, atol=1e-5)
