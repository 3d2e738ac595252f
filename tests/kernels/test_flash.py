"""The attention kernels against plain attention in float64, values and gradients, in tiles small enough to be many."""

import pytest
import torch

from gapless.batch import segments
from gapless.kernels.attention import attention, attention_tiles, flash
from kernels.tools import DEVICE, check, guarded, kernels, run

TILES = flash.Tiles(flash.Tile(32, 16, 4, 1), flash.Tile(16, 32, 4, 1), flash.Tile(16, 32, 4, 2))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(flash, "_tiles", lambda *_: TILES)


def make_segments(lengths, window, offsets=None, starts=None, tail=5):
    end = sum(lengths) if starts is None else starts[-1] + lengths[-1]
    with kernels():
        tiles = attention_tiles(16, 16, [window], FP32, DEVICE)
    room = len(lengths) + 2
    return segments(
        lengths, offsets=offsets, starts=starts, tokens=end + tail, max_documents=room, tiles=tiles, device=DEVICE
    )


def plain_attention(q, k, v, queries, keys, window, softcap, sinks, scale, causal):
    """Attention as it is written without thinking of speed, in the precision of its inputs; softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = q.new_zeros(*q.shape[:2], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.promote_types(q.dtype, FP32))
    documents = zip(
        queries.starts, queries.lengths, queries.offsets, keys.starts, keys.lengths, keys.offsets, strict=True
    )
    for start, count, offset, k_start, k_count, k_offset in documents:
        mine, theirs = slice(start, start + count), slice(k_start, k_start + k_count)
        scores = torch.einsum("tnd,snd->nts", q[mine], k[theirs]).to(lse.dtype) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        ahead = torch.arange(count)[:, None] + offset - torch.arange(k_count)[None, :] - k_offset
        seen = (ahead >= 0) & (ahead < (window or 2**31)) if causal else torch.ones_like(ahead, dtype=torch.bool)
        scores = scores.masked_fill(~seen.to(q.device), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, count, 1)], 2)
        elif not k_count:
            continue
        total = torch.logsumexp(scores, 2)
        blind = total == -torch.inf
        weights = torch.exp(scores - total.masked_fill(blind, 0)[..., None])[..., :k_count]
        out = out.index_copy(0, torch.arange(start, start + count, device=q.device), weighted(weights, v[theirs]))
        lse = lse.index_copy(0, torch.arange(start, start + count, device=q.device), total.t())
    return out, lse


def weighted(weights, v):
    return torch.einsum("nts,snd->tnd", weights.to(v.dtype), v)


class Case:
    """A call of attention, on the kernels' path and written plainly."""

    def __init__(
        self, queries, keys=None, *, heads=(2, 1), dims=(16, 16), dtype=FP32, sinks=False, lse=False, **options
    ):
        torch.manual_seed(0)
        self.queries, self.keys, self.lse = queries, queries if keys is None else keys, lse
        self.options = {"window": None, "softcap": None, "causal": True, **options}
        (n, k), (d, dv) = heads, dims
        shapes = [(self.queries.tokens, n, d), (self.keys.tokens, k, d), (self.keys.tokens, k, dv)]
        shapes += [(n,)] if sinks else []
        self.inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
        self.upstream = [torch.randn(self.queries.tokens, n, dv, device=DEVICE)]
        self.upstream += [torch.randn(self.queries.tokens, n, device=DEVICE)] if lse else []

    def finite(self, out, lse):
        """-inf where a query sees nothing: compared as 0, so that errors are numbers."""
        return (out, lse.masked_fill(lse == -torch.inf, 0)) if self.lse else out

    def plain(self, q, k, v, sinks=None):
        settings = [self.options[name] for name in ("window", "softcap")]
        scale = self.options.get("scale") or q.shape[-1] ** -0.5
        causal = self.options["causal"]
        return self.finite(*plain_attention(q, k, v, self.queries, self.keys, *settings, sinks, scale, causal))

    def fast(self, q, k, v, sinks=None):
        found = attention(q, k, v, self.queries, self.keys, sinks=sinks, return_lse=self.lse, **self.options)
        return self.finite(*found) if self.lse else found

    def check(self, eps=2e-6):
        check(self.fast, self.plain, self.inputs, self.upstream, eps=eps)


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
    plain, _ = run_kernels(case)
    for x in case.inputs:
        x[20:50] = torch.nan
    spoilt, _ = run_kernels(case)
    for rows in (slice(0, 20), slice(50, 57)):
        assert torch.equal(plain[0][rows], spoilt[0][rows])


def run_kernels(case):
    with kernels(), guarded():
        return run(case.fast, case.inputs, case.upstream)


def test_tokens_of_no_document_are_zero():
    case = Case(make_segments([20, 3], None, starts=[4, 40]), lse=True, sinks=True)
    outs, grads = run_kernels(case)
    empty = [*range(4), *range(24, 40), *range(43, 48)]
    for x in (outs[0], *grads[:3]):
        assert not x[empty].any()
    with kernels():
        _, lse = attention(*case.inputs[:3], case.queries, sinks=case.inputs[3], return_lse=True)
    assert (lse[empty] == -torch.inf).all()


def test_a_stream_without_documents():
    case = Case(make_segments([], None), sinks=True)
    outs, grads = run_kernels(case)
    assert not any(x.any() for x in (*outs, *grads))


@pytest.mark.parametrize("size", [1e2, 1e4, 3e18])
def test_extreme_scores(size):
    case = Case(make_segments([40], None), lse=True, softcap=5.0)
    case.inputs[0] *= size
    outs, grads = run_kernels(case)
    assert all(x.isfinite().all() for x in (*outs, *grads))
    case = Case(make_segments([40], None))
    case.inputs[0][:] = -500.0
    case.inputs[1][:] = 500.0 + torch.arange(45, device=DEVICE)[:, None, None] / 256
    case.check(eps=1e-5)  # scores of -1e6 and less


def test_scale_and_values_are_read_as_they_lie():
    case = Case(make_segments([40, 9], None), scale=0.3, heads=(4, 2))
    q, k, v = case.inputs
    fused = torch.zeros(54, 2, 5, 16, device=DEVICE)
    fused[:, :, 4] = v
    with kernels():
        out = attention(q, k, fused[:, :, 4], case.queries, scale=0.3, spare=64)
    assert out.flatten(1).stride() == (4 * 16 + 64, 1)
    torch.testing.assert_close(out, case.plain(q, k, v), rtol=1e-4, atol=1e-5)


def test_tables_must_be_declared():
    case = Case(segments([9], device=DEVICE))
    with kernels(), pytest.raises(KeyError, match="attention_tiles tells which are needed"):
        case.fast(*case.inputs)


def test_large_heads_take_the_reference():
    with kernels():
        assert attention_tiles(512, 512, [None], BF16, DEVICE) == ()
        case = Case(segments([9], device=DEVICE), dims=(512, 512))
        torch.testing.assert_close(case.fast(*case.inputs), case.plain(*case.inputs), rtol=1e-4, atol=1e-5)
