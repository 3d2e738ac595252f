"""The attention kernels with the tiles that a GPU runs: hundreds of combinations, and the same bits every time.

On Hopper most of them, those of 16 bits, run the kernels in Gluon; those in Triton have tests/kernels/test_flash.py.
"""

import contextlib
import itertools
import random
import warnings
from unittest import mock

import pytest
import torch
from torch.nn import functional

from gapless.batch import segments
from gapless.kernels import gluon
from gapless.kernels.attention import attention, flash, hopper
from gapless.kernels.runtime import family
from gapless.training.setup import determinism
from kernels.attention_cases import BF16, FP16, FP32, Case, make_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

DIMS = [
    (16, 16),
    (40, 40),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (136, 136),
    (160, 160),
    (192, 128),
    (192, 192),
    (256, 256),
    (64, 128),
    (256, 192),
    (64, 64),
    (128, 128),
]
HEADS = [
    [(1, 1), (4, 4)],
    [(1, 1), (4, 4)],
    [(3, 1), (6, 2)],
    [(2, 1), (4, 2)],
    [(4, 1), (8, 2)],
    [(6, 1), (12, 2)],
    [(8, 1), (16, 2)],
    [(32, 1)],
]
"""Of queries and of keys, by what kernels are compiled for: how many share a tile."""
KERNELS, EACH = 51, 9
GPU = torch.device("cuda")
on_hopper = pytest.mark.skipif(
    not (gluon.FITS and torch.cuda.is_available() and family(GPU) == 90), reason="no Hopper GPU"
)


@pytest.fixture
def deterministic():
    with determinism(True):
        yield


@contextlib.contextmanager
def multiprocessors(count, programs=None):
    """Have calls think of so many; persistent kernels have as many programs, or `programs`."""
    with (
        mock.patch.object(flash, "multiprocessors", return_value=count),
        mock.patch.object(hopper, "multiprocessors", return_value=programs or count),
    ):
        yield


class Laid(Case):
    """A call whose tensors lie in memory as `lay` says, in torch's deterministic mode or not.

    With few multiprocessors programs for keys go through all query heads of a key head, as they do for many tokens, and
    persistent ones through many tiles.
    """

    lay = "dense"
    ordered = False
    few = False

    def check(self, *args, **options):
        with determinism(self.ordered), multiprocessors(*(1, 3) if self.few else (1000,)):
            super().check(*args, **options)

    def fast(self, q, k, v, sinks=None):
        if self.lay == "fused" and len(q) == len(k) and q.shape[2] == v.shape[2]:
            q, k, v = torch.cat([q, k, v], 1).split([q.shape[1], k.shape[1], k.shape[1]], 1)
        elif self.lay != "dense":  # rows of 16 bytes more, or of 6, which TMA cannot read
            more = 3 if self.lay == "odd" else 8
            q, k, v = (functional.pad(x, (0, more))[:, :, : x.shape[2]] for x in (q, k, v))
        return super().fast(q, k, v, sinks)


def kind_of(seed):
    """What the kernels of a combination are compiled for, from `seed % KERNELS`; the rest is new every time."""
    kind = random.Random(seed % KERNELS)
    dims, dtype = DIMS[seed % KERNELS % len(DIMS)], kind.choice([BF16, BF16, FP16, BF16, FP16, FP32])
    return kind, dims, dtype, kind.choice(HEADS)


def drawn(seed):
    """A case of random documents, shapes and features."""
    draw = random.Random(seed)
    kind, dims, dtype, heads = kind_of(seed)
    longest = draw.choice([1, 40, 40, 300, 300, 700, 700, 3000])
    count = draw.randint(1, 2 if longest == 3000 else 6)
    lengths = [draw.choice([0, 1, draw.randint(1, longest), longest]) for _ in range(count)]
    causal = kind.random() < 0.8
    options = {
        "causal": causal,
        "window": draw.choice([1, 17, 128, 400]) if causal and kind.random() < 0.5 else None,
        "softcap": kind.choice([None, None, 5.0]),
        "scale": draw.choice([None, 0.05]),
        "sinks": kind.random() < 0.3,
        "lse": kind.random() < 0.5,
        "heads": draw.choice(heads),
        "dtype": dtype,
        "dims": dims,
    }
    if options["sinks"] and options["heads"][0] < 4:
        # The gradient of one sink is one number, which eager may happen to hit: its error and the kernels' are of one
        # size (0.0041 and 0.0043 over 80 draws, the output rounded to bf16), and 3 of 80 exceed the bound; of 4, none.
        options["heads"] = tuple(4 * count for count in options["heads"])
    # Without a table for heads that share tiles, those of single heads run.
    groups = options["heads"][0] // options["heads"][1] if kind.random() < 0.8 else 1
    settings = {"dims": dims, "dtype": dtype, "groups": groups, "tail": draw.choice([0, 5, 5, 300])}
    queries = make_segments(lengths, options["window"], **settings)
    if draw.random() < 0.6:
        case = Laid(queries, **options)
    else:  # A cache: as many keys before as you like, spans with room behind.
        before = [draw.choice([0, 0, 5, 130]) for _ in lengths]
        starts, place = [], 0
        for length, more in zip(lengths, before, strict=True):
            starts.append(place)
            place += length + more + draw.choice([0, 3, 64])
        queries = make_segments(lengths, options["window"], before, **settings)
        counts = [length + more for length, more in zip(lengths, before, strict=True)]
        offsets = None
        if draw.random() < 0.4:  # Queries that see nothing: fewer keys, none, or keys that come later.
            counts = [draw.choice([count, count // 2, 0]) for count in counts]
            offsets = [draw.choice([0, 0, 3, 200]) for _ in counts]
        case = Laid(queries, make_segments(counts, options["window"], offsets, starts, **settings), **options)
    case.few = kind.random() < 0.5
    case.lay = draw.choice(["dense", "fused", "fused", "padded", "odd"])
    case.ordered = kind.random() < 0.5
    return case


@pytest.mark.parametrize("kernel", range(KERNELS))
def test_combinations(kernel):
    for seed in range(kernel, KERNELS * EACH, KERNELS):
        case = drawn(seed)
        try:
            case.check(eps=1e-5 if case.inputs[0].dtype == FP32 else 4e-3)
        except AssertionError as error:
            raise AssertionError(f"combination {seed}: {error}") from error


@on_hopper
def test_enough_combinations_run_hoppers_kernels():
    cases = [drawn(seed) for seed in range(KERNELS * EACH)]
    cases = [case for case in cases if hopper.applies(*case.dims, case.inputs[0].dtype, GPU)]
    assert len(cases) >= 300
    assert sum(packs(case) for case in cases) >= 120
    assert sum(case.few and case.inputs[0].shape[1] > case.inputs[1].shape[1] for case in cases) >= 60
    assert sum(case.ordered for case in cases) >= 100


def packs(case):
    """Whether query heads share tiles."""
    q, k, window = *case.inputs[:2], case.options["window"]
    alone = flash._tiles(*case.dims, q.dtype, GPU)
    shared = alone.packed(q.shape[1] // k.shape[1])
    pays = flash._pays(shared, alone, window, case.queries)
    return shared.forward.group > 1 and pays


@pytest.mark.parametrize(
    ("dims", "window", "sinks"),
    [
        ((128, 128), None, True),
        ((64, 64), 200, False),
        ((96, 96), 64, True),
        ((192, 128), None, False),
        ((256, 256), None, False),
        ((128, 128), 300, False),
        ((64, 128), None, False),
    ],
)
@pytest.mark.parametrize("count", [1, 1000])
def test_the_same_bits_every_time(dims, window, sinks, count, deterministic, monkeypatch):
    monkeypatch.setattr(flash, "multiprocessors", lambda _: count)
    monkeypatch.setattr(hopper, "multiprocessors", lambda _: count)
    queries = make_segments([700, 1, 0, 333, 512], window, dims=dims, dtype=BF16, groups=4)
    case = Case(queries, heads=(8, 2), dims=dims, dtype=BF16, window=window, sinks=sinks, lse=True)
    first = case.on_kernels()
    for _ in range(100):
        again = case.on_kernels()
        assert all(torch.equal(x, y) for x, y in zip(first[0] + first[1], again[0] + again[1], strict=True))


def test_an_accumulator_beyond_2_to_the_31(deterministic):
    """Offsets of 64 bits: 2.3e9 elements of queries and of each gradient."""
    tokens, heads, dim = 1 << 17, 136, 128
    queries = make_segments([tokens - 4096, 4096], 256, dims=(dim, dim), dtype=BF16)
    case = Case(queries, heads=(heads, heads), dims=(dim, dim), dtype=BF16, window=256)
    outs, grads = case.on_kernels()
    last = slice(tokens - 4096, tokens)
    alone = Case(
        make_segments([4096], 256, tail=0, dims=(dim, dim), dtype=BF16), dtype=BF16, window=256, dims=(dim, dim)
    )
    alone.inputs = [x[last] for x in case.inputs]
    alone.upstream = [x[last] for x in case.upstream]
    expected, expected_grads = alone.on_kernels()
    for ours, theirs in zip(outs + grads, expected + expected_grads, strict=True):
        assert torch.equal(ours[last], theirs)


def test_softmax_of_very_negative_scores():
    """All near -2.5e5, exact before the softmax, whose differences need the multiply-add that rounds once."""
    case = Case(make_segments([40], None))
    case.inputs[0][:] = -250.0
    case.inputs[1][:] = 250.0
    case.inputs[1][..., 0] += torch.arange(45, device="cuda")[:, None] / 32
    exact = case.plain(*(x.double() for x in case.inputs))  # float32 has steps of 0.016 at the logarithm of its sum
    torch.testing.assert_close(case.on_kernels()[0][0].double(), exact, rtol=1e-4, atol=1e-4)


def test_every_tile_of_the_tables_runs_here():
    """Those of other chips too, where they fit: what they compute is the same."""
    for table in {id(table): table for table in (*flash._TABLES.values(), flash._FLOAT32)}.values():
        for dim, tiles in table.items():
            dtype = FP32 if table is flash._FLOAT32 else BF16
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flash, "_tiles", lambda *_, tiles=tiles: tiles)
                queries = make_segments([300, 1, 77], None, dims=(dim, dim), dtype=dtype)
                Case(queries, dims=(dim, dim), dtype=dtype, heads=(4, 2)).check(eps=1e-3)


@on_hopper
def test_every_tile_of_hoppers_table_runs():
    tiles = {hopper.forward_tile(*dims): dims for dims in itertools.product(range(8, 257, 8), repeat=2)}
    assert len(tiles) > 2
    for tile, dims in tiles.items():
        for turns, persistent, groups in itertools.product([False, True], {False, tile.persistent}, [1, 2]):
            used = tile._replace(turns=turns, persistent=persistent)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hopper, "forward_tile", lambda *_, used=used: used)
                queries = make_segments([300, 1, 0, 577], None, dims=dims, dtype=BF16, groups=groups)
                assert isinstance(flash._tiles(*dims, BF16, GPU).forward, hopper.Tile)
                with multiprocessors(132, 3):
                    Case(queries, dims=dims, dtype=BF16, heads=(4, 2)).check(eps=1e-3)


@on_hopper
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("dims", [(152, 96), (192, 40), (136, 24), (24, 176), (72, 136), (160, 8), (200, 192)])
def test_wide_heads_in_two_chunks(dims, few):
    """Gradients of keys and values by TMA, and added up in float32; heads that end in the middle of a chunk."""
    queries = make_segments([300, 1, 0, 77], None, tail=100, dims=dims, dtype=BF16)
    case = Laid(queries, heads=(4, 2), dims=dims, dtype=BF16)
    case.few = few
    case.check(eps=4e-3)


@on_hopper
@pytest.mark.parametrize("options", [{}, {"causal": False, "sinks": True}, {"window": 100, "softcap": 20.0}])
@pytest.mark.parametrize("dim", [40, 64, 128])
def test_persistent_programs(dim, options):
    """However many there are, and where every tile has its own, bits are the same."""
    window, settings = options.get("window"), {"dims": (dim, dim), "dtype": BF16}
    queries = make_segments([300, 0, 1, 129, 700, 64, 1500], window, tail=300, groups=2, **settings)
    case = Case(queries, heads=(8, 4), lse=True, **{**options, **settings})
    assert flash._tiles(dim, dim, BF16, GPU).forward.persistent
    with torch.no_grad():
        found = []
        for programs in (1, 3, 132, 10**6):
            with multiprocessors(132, programs):
                found += [case.fast(*case.inputs) for _ in range(3)]
        alone = hopper.forward_tile(dim, dim)._replace(persistent=False)
        with mock.patch.object(hopper, "forward_tile", return_value=alone):
            expected = case.fast(*case.inputs)
        assert all(torch.equal(x, y) for outs in found for x, y in zip(outs, expected, strict=True))
    with determinism(True):
        expected = case.on_kernels()[1]
        for programs in (1, 3, 10**6):
            with multiprocessors(132, programs):
                gradients = case.on_kernels()[1]
            assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_keys_or_queries_without_tokens(dim, sinks, ordered):
    """Not even memory."""
    settings = {"dims": (dim, dim), "dtype": BF16}
    none = make_segments([0, 0, 0], None, starts=[0, 0, 0], tail=0, **settings)
    some = make_segments([5, 0, 70], None, **settings)
    with determinism(ordered):
        for queries, keys in ((some, none), (none, some), (none, none)):
            Case(queries, keys, sinks=sinks, lse=True, **settings).check()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (3,)])
@pytest.mark.parametrize("dim", [64, 256])
def test_gradients_that_are_not_needed(dim, needed):
    settings = {"dims": (dim, dim), "dtype": BF16}
    case = Case(make_segments([70, 1, 30], None, **settings), sinks=True, heads=(4, 2), **settings)
    _, expected = case.on_kernels()
    leaves = [x.clone().requires_grad_(place in needed) for place, x in enumerate(case.inputs)]
    grads = torch.autograd.grad(case.fast(*leaves), [leaves[place] for place in needed], case.upstream[0].to(BF16))
    for place, grad in zip(needed, grads, strict=True):
        torch.testing.assert_close(grad, expected[place], rtol=1e-2, atol=1e-2)


def test_spare_columns_of_any_number():
    queries = make_segments([40, 9], None, dims=(64, 64), dtype=BF16)
    case = Case(queries, dims=(64, 64), dtype=BF16, heads=(4, 2))
    expected = case.fast(*case.inputs)
    for spare in (3, 8, 64):
        out = attention(*case.inputs, queries, spare=spare)
        assert out.flatten(1).stride() == (4 * 64 + spare, 1)
        assert torch.equal(out, expected)


def test_a_captured_call():
    """It has a tile for every row of the table, used or not, and begins with a counter of its own."""
    queries = make_segments([300, 0, 77], None, dims=(128, 128), dtype=BF16, groups=2)
    case = Case(queries, dims=(128, 128), dtype=BF16, heads=(4, 2))
    with torch.no_grad():
        expected = case.fast(*case.inputs)
        graph = torch.cuda.CUDAGraph()
        with multiprocessors(132, 3), torch.cuda.graph(graph):
            out = case.fast(*case.inputs)
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("dim", "window"), [(64, None), (128, 100), (256, None)])
def test_a_captured_backward(dim, window, ordered):
    """Replays start from counters and sums of their own."""
    settings = {"dims": (dim, dim), "dtype": BF16}
    case = Case(make_segments([300, 0, 577], window, **settings), heads=(4, 2), window=window, **settings)
    inputs = [x.clone().requires_grad_() for x in case.inputs]
    upstream = case.upstream[0].to(BF16)

    def gradients():
        return torch.autograd.grad(case.fast(*inputs), inputs, upstream)

    with determinism(ordered), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            gradients()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with multiprocessors(132, 3), torch.cuda.graph(graph):
            captured = gradients()
        for scale in (1.0, 0.5, 2.0):
            with torch.no_grad():
                for x, start in zip(inputs, case.inputs, strict=True):
                    x.copy_(start * scale)
            expected = gradients()
            graph.replay()
            for found, truth in zip(captured, expected, strict=True):
                if ordered:
                    assert torch.equal(found, truth)
                else:
                    torch.testing.assert_close(found, truth, rtol=1e-2, atol=1e-2)


def test_anything_may_lie_between_documents_of_a_cache():
    queries = segments([1, 1, 1], offsets=[4, 2, 0], device="cuda")
    keys = segments([5, 3, 1], starts=[0, 8, 16], tokens=24, device="cuda")
    case = Case(queries, keys, dtype=BF16)
    with torch.no_grad():
        clean = case.fast(*case.inputs)
        for x in case.inputs[1:]:
            for gap in (slice(5, 8), slice(11, 16), slice(17, 24)):
                x[gap] = torch.nan
        assert torch.equal(case.fast(*case.inputs), clean)
