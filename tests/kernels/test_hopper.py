"""The host's side of attention on Hopper. Its kernels run on a GPU alone (tests/gpu), and compile (test_compile)."""

import itertools
import random
import subprocess
import sys

import pytest
import torch

from gapless.batch import TileSpec, segments
from gapless.kernels import gluon, runtime
from gapless.kernels.attention import attention, attention_tiles, flash, hopper, shared_tiles
from gapless.kernels.runtime import SHARED_MEMORY, forced, next_power_of_2
from kernels.attention_cases import BF16, FP16, FP32

GPU = torch.device("cuda")
needs_gluon = pytest.mark.skipif(not gluon.FITS, reason="needs Gluon")
DIMS = range(8, 257, 8)


@pytest.fixture
def chip(monkeypatch):
    """Pretend that devices are of a compute capability."""

    def pretend(architecture):
        monkeypatch.setattr(runtime, "_properties", lambda _: runtime.Chip(architecture, 132, 50 << 20))
        monkeypatch.setattr(runtime, "_forced", runtime._Forced())

    return pretend


@needs_gluon
def test_when_they_run(chip, monkeypatch):
    chip(90)
    assert all(hopper.applies(d, v, BF16, GPU) for d, v in itertools.product(DIMS, DIMS))
    assert hopper.applies(64, 64, FP16, GPU)
    assert not hopper.applies(64, 64, FP32, GPU)
    assert not any(hopper.applies(d, v, BF16, GPU) for d, v in [(68, 64), (64, 60), (264, 64), (64, 264)])
    assert isinstance(flash._tiles(64, 64, BF16, GPU).forward, hopper.Tile)
    assert isinstance(flash._tiles(128, 72, BF16, GPU).keys, hopper.BackTile)
    assert hopper.back_tile(192, 128).wide
    assert not hopper.back_tile(128, 128).wide
    monkeypatch.setattr(gluon, "FITS", False)
    assert not hopper.applies(64, 64, BF16, GPU)
    assert isinstance(flash._tiles(64, 64, BF16, GPU).forward, flash.Tile)
    monkeypatch.setattr(gluon, "FITS", True)
    chip(100)
    assert not hopper.applies(64, 64, BF16, GPU)


@pytest.mark.parametrize(
    ("dims", "persistent"),
    [((64, 64), True), ((40, 40), True), ((128, 128), True), ((64, 128), True), ((96, 96), False), ((128, 96), False),
     ((192, 128), False), ((256, 256), False)],
)  # fmt: skip
def test_persistent_where_it_is_faster(dims, persistent):
    assert hopper.forward_tile(*dims).persistent == persistent


@needs_gluon
def test_their_tables_are_declared():
    with forced("triton", 90):
        plain = attention_tiles(64, 64, [None], BF16, "cpu")
        packed = attention_tiles(64, 64, [None], BF16, "cpu", groups=4)
    assert {spec.query_tile for spec in plain} == {hopper.forward_tile(64, 64).queries} == {192}
    assert {spec.query_tile for spec in packed} == {192, 48}
    with forced("triton", 80):
        assert len(attention_tiles(64, 64, [None], BF16, "cpu", groups=4)) == 2


@pytest.mark.parametrize(
    ("groups", "shared"), [(1, 1), (2, 2), (3, 1), (4, 4), (6, 2), (7, 1), (8, 8), (12, 4), (16, 16), (32, 16), (71, 1)]
)
def test_heads_that_share_a_tile(groups, shared):
    tile = hopper.forward_tile(128, 128).packed(groups)
    assert tile.group == shared
    assert tile.queries * shared == 128


@needs_gluon
@pytest.mark.parametrize(
    ("declared", "heads", "shared"),
    [(4, (8, 2), 4), (1, (8, 2), 1), (2, (8, 2), 1), (4, (2, 2), 1), (6, (6, 1), 2), (32, (32, 1), 16)],
)
@pytest.mark.parametrize("dim", [128, 256])
def test_the_tile_of_a_call(declared, heads, shared, dim, monkeypatch):
    """Where the table of packed heads was not declared, the other runs."""
    launches = []
    monkeypatch.setattr(hopper, "launch_forward", lambda *given, **_: launches.append(given))
    q, k = (torch.zeros(140, count, dim, dtype=BF16) for count in heads)
    with forced("triton", 90):
        stream = segments([100, 40], tiles=attention_tiles(dim, dim, [None], BF16, "cpu", groups=declared))
        attention(q, k, k, stream)
        (grid, *_, table, _, _, tile) = launches.pop()
        assert tile.group == shared
        assert grid[0] * grid[2] == heads[0] // shared
        starts = range(0, 100, 128 // shared), range(100, 140, 128 // shared)
        assert sorted(table[: grid[1], 1].tolist()) == [start for some in starts for start in some]
        with pytest.raises(KeyError, match="query_tile=128"):
            attention(q, k, k, segments([140], tiles=attention_tiles(64, 64, [None], BF16, "cpu", groups=declared)))


@needs_gluon
@pytest.mark.parametrize(
    ("lengths", "shared"), [([4096], 1), ([4100], 1), ([128, 128], 1), ([300] * 9, 4), ([20] * 9, 4)]
)
def test_heads_share_tiles_where_documents_are_short(lengths, shared, monkeypatch):
    launches = []
    monkeypatch.setattr(hopper, "launch_forward", lambda *given, **_: launches.append(given))
    q, k = (torch.zeros(sum(lengths), count, 128, dtype=BF16) for count in (4, 1))
    kind = 128, 128, [None, None], BF16, "cpu"
    with forced("triton", 90):
        stream = segments(lengths, tiles=attention_tiles(*kind, groups=4))
        attention(q, k, k, stream)
        assert shared_tiles(*kind, stream, groups=4) == (shared > 1,)
    assert launches[0][-1].group == shared
    assert shared_tiles(*kind, stream, groups=4) == ()


def parts_of(sums, queries):
    """Gradients [N, rows, D] as the consumers of `hopper_backward` leave them: see `in_lines`."""
    heads, rows, dim = sums.shape
    tiles = sums.view(heads, rows // queries, queries, dim)
    parts = tiles.unflatten(3, (2, -1)).transpose(2, 3) if queries == 64 else tiles.unflatten(2, (2, 64))
    # Row 16 w + 8 a + g, column 16 h + 8 j + 2 q + p: warp w, thread 4 g + q.
    threads = parts.unflatten(4, (-1, 2, 4, 2)).unflatten(3, (4, 2, 8))  # heads, tiles, parts, w, a, g, h, j, q, p
    return threads.permute(0, 1, 2, 3, 6, 7, 5, 8, 4, 9).reshape(heads, rows, dim)


@pytest.mark.parametrize(
    ("queries", "table", "dim", "columns"), [(64, 128, 128, 128), (64, 128, 56, 64), (128, 192, 40, 64)]
)
def test_gradients_are_taken_from_their_parts(queries, table, dim, columns):
    """And delta and the LSE put where tiles of queries find them."""
    lengths, heads, tokens = [70, 0, 1, 200, 33], 3, 344
    spec = TileSpec(query_tile=table, key_tile=128)
    stream = segments(lengths, tokens=tokens, tiles=[spec])
    tables = stream.tile_tables(spec)
    b = hopper.Backward(
        tables.forward, tables.forward_used, table, tables.backward, len(lengths),
        (stream.cu_seqlens, stream.seqused, stream.offset) * 2, (0.5, 1.0, 1.0, 1), {}, hopper.BackTile(queries, 128),
    )  # fmt: skip
    out, grad = (torch.randn(tokens, heads, dim).to(BF16) for _ in range(2))
    lse, grad_lse, sinks = torch.randn(heads, tokens), torch.randn(tokens, heads), torch.randn(heads)
    lse[:, 75] = -torch.inf
    with forced("triton"):
        *padded, grad_sinks = hopper.launch_delta(b, out, grad, lse, grad_lse, sinks)
        # Of 16 numbers in a row, 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
        lse_padded, minus_delta = (x.unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).reshape(x.shape) for x in padded)
        expected_delta = (out.float() * grad.float()).sum(2) - grad_lse
        sums = torch.full((heads, lse_padded.shape[1], columns), torch.nan)
        expected = torch.zeros(tokens, heads, dim)
        for document, (start, count) in enumerate(zip(stream.starts, stream.lengths, strict=True)):
            place = (start // queries + document) * queries
            here, end = slice(place, place + count), place + -(-count // queries) * queries
            torch.testing.assert_close(-minus_delta[:, here], expected_delta[start : start + count].t())
            assert (minus_delta[:, place + count : end] == 0).all()
            there = lse[:, start : start + count]
            assert torch.equal(lse_padded[:, here], torch.where(there == -torch.inf, torch.inf, there))
            assert (lse_padded[:, place + count : end] == torch.inf).all()
            sums[:, here] = torch.randn(heads, count, columns)
            expected[start : start + count] = sums[:, here, :dim].transpose(0, 1) * 0.5
        found = torch.full((tokens, heads, dim), torch.nan, dtype=BF16)
        hopper.launch_queries(b, parts_of(sums, queries), found)
    assert torch.equal(found, expected.to(BF16))
    weights = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks[:, None] - lse / 1.44269504))
    expected_sinks = -(weights * expected_delta.t())[:, : sum(lengths)].sum(1)
    torch.testing.assert_close(grad_sinks, expected_sinks, rtol=1e-4, atol=1e-4)


def test_a_gluon_that_does_not_fit_is_told(chip, monkeypatch):
    chip(90)
    monkeypatch.setattr(gluon, "FITS", True)
    assert gluon.hopper_note(GPU) is None
    monkeypatch.setattr(gluon, "FITS", False)
    if runtime.triton is not None:
        assert f"the Gluon of Triton 3.6 to 3.9, which Triton {runtime.triton.__version__} lacks" in str(
            gluon.hopper_note(GPU)
        )
    assert gluon.hopper_note(torch.device("cpu")) is None
    with forced("reference"):
        assert gluon.hopper_note(GPU) is None
    chip(80)
    assert gluon.hopper_note(GPU) is None


@pytest.mark.parametrize(
    ("version", "fits"), [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0.0", False)]
)
def test_versions_that_were_tried(version, fits):
    assert gluon.known(version) == fits


@pytest.mark.parametrize("missing", ["triton", "triton.experimental.gluon"])
def test_nothing_is_needed_to_import_them(missing):
    script = f"""
import sys
sys.modules[{missing!r}] = None
from gapless.kernels import gluon
from gapless.kernels.attention import hopper
assert not gluon.FITS
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dim", DIMS)
def test_chunks(dim):
    first, second = hopper.chunks(dim)
    assert all(size in (16, 32, 64, 128, 256) for size in (first, second) if size)
    assert second < first
    assert dim <= first + second < max(1.34 * dim, 17)


def test_all_fit_shared_memory():
    """As the kernel allocates it; barriers and what Triton keeps for itself are below 1 KiB."""
    for d, v in itertools.product(DIMS, DIMS):
        tile, (d0, d1), (v0, v1) = hopper.forward_tile(d, v), hopper.chunks(d), hopper.chunks(v)
        rows = tile.stages * tile.keys
        alike = not tile.persistent and v0 == d0 and v1 in (d1, 0)
        elements = tile.queries * (d0 + d1 + (0 if alike else v0 + v1)) + rows * (d0 + d1 + v0 + v1)
        assert 2 * elements + 1024 <= SHARED_MEMORY[90], (d, v)


def test_all_of_the_backward_fits_shared_memory():
    for d, v in itertools.product(DIMS, DIMS):
        tile = hopper.back_tile(d, v)
        if tile.wide:  # chosen by `_wide_bytes`, which test_compile compares with what is compiled
            continue
        columns = sum(max(64, next_power_of_2(dim)) for dim in (d, v))
        half = max(d, v) if tile.queries == 128 else (64 if d > 64 else 32)
        elements = columns * (tile.stages * tile.queries + tile.keys) + 3 * tile.keys * tile.queries
        numbers = 2 * 64 * max(half, 32) + 2 * tile.stages * tile.queries
        assert 2 * elements + 4 * numbers + 1024 <= SHARED_MEMORY[90], (d, v)


@pytest.mark.parametrize(
    ("dims", "stages"), [((192, 192), (3, 2)), ((192, 128), (3, 2)), ((136, 136), (3, 2)), ((256, 256), (2, 1))]
)
def test_tiles_of_wide_heads_as_many_as_fit(dims, stages):
    assert hopper.back_tile(*dims)[2:] == stages


def test_padded_places_do_not_overlap():
    """Documents begin at multiples of a tile, (start // tile + index) tiles from the first, and end before the next."""
    draw = random.Random(0)
    for _ in range(200):
        tile = draw.choice([64, 128])
        lengths = [draw.choice([0, 1, tile - 1, tile, tile + 1, draw.randint(0, 500)]) for _ in range(6)]
        starts, place = [], 0
        for length in lengths:
            starts.append(place)
            place += length + draw.choice([0, 0, 3])
        tokens = place + draw.choice([0, 5])
        back = hopper.Backward(*[None] * 4, len(lengths), *[None] * 3, hopper.BackTile(tile, 128))
        ends = 0
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            first = (start // tile + index) * tile
            assert first >= ends
            ends = first + -(-length // tile) * tile
        assert ends <= back.padded_rows(tokens)


@needs_gluon
@pytest.mark.parametrize("heads", [2, 4, 16])
def test_boxes_of_packed_heads(heads):
    """Row r of a box, whose last axes run fastest, is token r // heads of head r % heads, or beyond the document."""
    x = torch.empty(500, 2 * heads, 48, dtype=BF16)
    tokens = 64 // heads
    descriptor = gluon.ragged_descriptor(x, tokens, 32, heads)
    assert list(descriptor.block_shape) == [1, 1, tokens, heads, 32]
    steps = [step * x.element_size() for step in descriptor.strides]
    for (start, count), first, head in itertools.product([(0, 500), (7, 1), (30, 0), (300, 101)], [0, 96], [0, heads]):
        place = (gluon.MOST_ROWS, start + count, gluon.MOST_ROWS - count + first, head, 0)
        for row, box in enumerate(itertools.product(*map(range, descriptor.block_shape[:-1]))):
            index = [a + b for a, b in zip(place, (*box, 0), strict=True)]
            token = first + row // heads
            there = all(a < size for a, size in zip(index, descriptor.shape, strict=True))
            assert there == (token < count)
            if there:
                offset = sum(a * step for a, step in zip(index, steps, strict=True)) % 2**64
                assert offset == x[start + token, head + row % heads].data_ptr() - x.data_ptr()


@needs_gluon
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_ragged_descriptors(dtype):
    """Addresses as hardware forms them, from sizes, steps and places, modulo 2^64."""
    fused = torch.empty(1000, 6, 48, dtype=dtype)
    x = fused[:, 2:5]
    descriptor = gluon.ragged_descriptor(x, 64, 32)
    steps = [step * x.element_size() for step in descriptor.strides]
    assert all(0 < step < 2**40 and step % 16 == 0 for step in steps[:-1])
    assert all(0 < size < 2**31 for size in descriptor.shape)
    for (start, count), row, head, column in itertools.product(
        [(0, 1000), (0, 0), (7, 1), (700, 300)], [0, 1, 63, 299, 640, 999, 1063], [0, 2, 3], [0, 32, 48]
    ):
        place = (gluon.MOST_ROWS, start + count, gluon.MOST_ROWS - count + row, head, column)
        assert all(0 <= index < 2**31 for index in place)
        there = all(index < size for index, size in zip(place, descriptor.shape, strict=True))
        assert there == (row < count and head < 3 and column < 48)
        if there:
            offset = sum(index * step for index, step in zip(place, steps, strict=True)) % 2**64
            assert offset == x[start + row, head, column].data_ptr() - x.data_ptr()


def test_alignment():
    fused = torch.zeros(10, 6, 64, dtype=BF16)
    for x in (fused, fused[3:, 2:5], fused[:, :, 8:40], fused[::2]):
        assert gluon.aligned(x) is x
    odd = [
        torch.zeros(10 * 6 * 64 + 4, dtype=BF16)[4:].view(10, 6, 64),
        torch.zeros(10, 6, 68, dtype=BF16)[:, :, :64],
        torch.zeros(10, 6 * 64 + 4, dtype=BF16)[:, :-4].view(10, 6, 64),
        fused[:, :1].expand(-1, 6, -1),
        fused[:1].expand(10, -1, -1),
        fused[:8].permute(2, 1, 0),
    ]
    for x in odd:
        copy = gluon.aligned(x)
        assert not gluon.is_aligned(x)
        assert gluon.is_aligned(copy)
        assert torch.equal(copy, x)
