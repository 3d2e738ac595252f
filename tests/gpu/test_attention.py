"""The attention kernels with the tiles that a GPU runs: hundreds of combinations, and the same bits every time."""

import random

import pytest
import torch

from gapless.batch import segments
from gapless.kernels.attention import flash
from kernels.attention_cases import BF16, FP16, FP32, Case, make_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

DIMS = [
    (16, 16),
    (32, 32),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (64, 128),
]
COMBINATIONS, TOGETHER, KERNELS = 240, 8, 40


def drawn(seed):
    """A case of random documents, shapes and features."""
    draw = random.Random(seed)
    # Which kernels are compiled follows from `seed % KERNELS`, the rest is new every time.
    kind = random.Random(seed % KERNELS)
    dims, dtype = DIMS[seed % KERNELS % len(DIMS)], kind.choice([BF16, BF16, FP16, FP32])
    longest = draw.choice([1, 40, 300, 700])
    lengths = [draw.choice([0, 1, draw.randint(1, longest), longest]) for _ in range(draw.randint(1, 6))]
    causal = kind.random() < 0.8
    options = {
        "causal": causal,
        "window": draw.choice([1, 17, 128, 400]) if causal and kind.random() < 0.5 else None,
        "softcap": kind.choice([None, None, 5.0]),
        "scale": draw.choice([None, 0.05]),
        "sinks": kind.random() < 0.3,
        "lse": kind.random() < 0.5,
        "heads": draw.choice([(1, 1), (4, 4), (6, 2), (8, 1)]),
        "dtype": dtype,
        "dims": dims,
    }
    settings = {"dims": dims, "dtype": dtype}
    queries = make_segments(lengths, options["window"], **settings)
    if draw.random() < 0.6:
        return Case(queries, **options)
    # A cache: as many keys before as you like, spans with room behind.
    before = [draw.choice([0, 0, 5, 130]) for _ in lengths]
    starts, place = [], 0
    for length, more in zip(lengths, before, strict=True):
        starts.append(place)
        place += length + more + draw.choice([0, 3, 64])
    queries = make_segments(lengths, options["window"], before, **settings)
    counts = [length + more for length, more in zip(lengths, before, strict=True)]
    return Case(queries, make_segments(counts, options["window"], None, starts, **settings), **options)


@pytest.mark.parametrize("first", range(COMBINATIONS // TOGETHER))
def test_combinations(first):
    for seed in range(first, COMBINATIONS, COMBINATIONS // TOGETHER):
        case = drawn(seed)
        try:
            case.check(eps=1e-5 if case.inputs[0].dtype == FP32 else 4e-3)
        except AssertionError as error:
            raise AssertionError(f"combination {seed}: {error}") from error


@pytest.mark.parametrize(
    ("dims", "window", "sinks"), [((128, 128), None, True), ((64, 64), 200, False), ((96, 96), 64, True)]
)
def test_the_same_bits_every_time(dims, window, sinks):
    queries = make_segments([700, 1, 0, 333, 512], window, dims=dims, dtype=BF16)
    case = Case(queries, heads=(8, 2), dims=dims, dtype=BF16, window=window, sinks=sinks, lse=True)
    first = case.on_kernels()
    for _ in range(100):
        again = case.on_kernels()
        assert all(torch.equal(x, y) for x, y in zip(first[0] + first[1], again[0] + again[1], strict=True))


def test_an_accumulator_beyond_2_to_the_31():
    """Offsets of 64 bits: 1.2e9 elements of queries, 2.5e9 bytes."""
    tokens, heads, dim = 1 << 17, 72, 128
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
