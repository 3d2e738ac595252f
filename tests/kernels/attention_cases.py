"""Calls of attention on the kernels' path, and the same written plainly."""

import torch

from gapless.batch import segments
from gapless.kernels.attention import attention, attention_tiles
from kernels.tools import DEVICE, check, guarded, kernels, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_segments(lengths, window, offsets=None, starts=None, tail=5, *, dims=(16, 16), dtype=FP32, groups=1):
    end = sum(lengths) if starts is None else starts[-1] + lengths[-1]
    with kernels():
        tiles = attention_tiles(*dims, [window], dtype, DEVICE, groups=groups)
    room = len(lengths) + 2
    return segments(
        lengths, offsets=offsets, starts=starts, tokens=end + tail, max_documents=room, tiles=tiles, device=DEVICE
    )


def plain_attention(q, k, v, queries, keys, window, softcap, sinks, scale, causal):
    """Attention as it is written without thinking of speed, in the precision of its inputs; softmax in float32."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    nothing = 0 * (q.sum() + k.sum() + v.sum())  # so that there are gradients without documents, too
    out = q.new_zeros(*q.shape[:2], v.shape[2]) + nothing
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=torch.promote_types(q.dtype, FP32)) + nothing
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
        self.dims = dims
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
        scale = self.options.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        causal = self.options["causal"]
        return self.finite(*plain_attention(q, k, v, self.queries, self.keys, *settings, sinks, scale, causal))

    def fast(self, q, k, v, sinks=None):
        found = attention(q, k, v, self.queries, self.keys, sinks=sinks, return_lse=self.lse, **self.options)
        return self.finite(*found) if self.lse else found

    def check(self, eps=2e-6):
        check(self.fast, self.plain, self.inputs, self.upstream, eps=eps)

    def on_kernels(self):
        """Outputs and gradients, in guarded memory."""
        with kernels(), guarded():
            return run(self.fast, self.inputs, self.upstream)
