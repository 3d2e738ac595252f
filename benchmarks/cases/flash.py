"""Varlen attention: dense documents against torch's kernels, and packed ones against dense."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from common import FAILURES, Row, assert_close, free_memory, gradient_work, medians, randn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import gapless
from cases import Case, Rates
from gapless.batch import Segments, segments
from gapless.kernels.attention.flash import attention_tiles

HIDDEN, TOKENS = 2048, 16384
PACKED_TOKENS, SHORTEST, LONGEST = 32768, 128, 8192
_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_BARS = {("fwd", 64): 310, ("bwd", 64): 270, ("fwd", 128): 342, ("bwd", 128): 309}


def documents(lengths: Sequence[int], head_dim: int) -> Segments:
    """Segments on the GPU with the tables of the kernel that will run."""
    tiles = attention_tiles(head_dim, head_dim, [None], torch.bfloat16, "cuda")
    return segments(lengths, tokens=sum(lengths), tiles=tiles, device="cuda")


def flops(lengths: Sequence[int], *, causal: bool) -> float:
    """Of a forward over `HIDDEN` features: two products of [S, S, D], half of it where causal; a backward has 2.5."""
    return sum(4 * HIDDEN * length**2 for length in lengths) * (0.5 if causal else 1)


def dense(rates: Rates, *, head_dim: int, length: int, causal: bool) -> list[Row]:
    """Documents of one length."""
    heads, count = HIDDEN // head_dim, TOKENS // length
    q, k, v = (randn(TOKENS, heads, head_dim) for _ in range(3))
    stream = documents([length] * count, head_dim)

    def ours() -> torch.Tensor:
        return gapless.attention(q, k, v, stream, causal=causal)

    rows = [x.detach().view(count, length, heads, head_dim).transpose(1, 2) for x in (q, k, v)]
    padded = [x.contiguous().requires_grad_() for x in rows]

    def peer(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*padded, is_causal=causal)

    _check(ours(), (q, k, v), padded, causal)
    forward, backward = {"gapless": ours}, {"gapless": gradient_work([ours()], (q, k, v))}
    for name, backend in _BACKENDS.items():
        try:
            backward[name] = gradient_work([peer(backend)], padded)
            forward[name] = partial(peer, backend)
        except FAILURES as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error)[:200]}")
    found = []
    for kind, works, factor in (("fwd", forward, 1.0), ("bwd", backward, 2.5)):
        work = factor * flops([length] * count, causal=causal)
        rate = {name: work / time / 1e9 for name, time in medians(works).items()}
        gated = causal and length == 8192
        found.append(
            Row(
                case=f"flash-{kind}-hd{head_dim}-{'causal' if causal else 'full'}-{length // 1024}k",
                unit="TFLOP/s",
                gapless=rate.pop("gapless"),
                peers=rate,
                limit=rates.matmul,
                note=f"{count} documents, hidden {HIDDEN}, FLOPs of a causal mask halved",
                bar=_BARS[kind, head_dim] if gated else None,
            )
        )
    free_memory()
    return found


def _check(out: torch.Tensor, inputs: Sequence[torch.Tensor], padded: Sequence[torch.Tensor], causal: bool) -> None:
    """Compare output and gradients with float32 attention, of the first document's first head."""
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, inputs, grad, retain_graph=True)]
    length = padded[0].shape[2]
    q, k, v = (x.detach()[0, 0].float().requires_grad_() for x in padded)
    scores = q @ k.t() * q.shape[1] ** -0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    exact = scores.softmax(-1) @ v
    wanted = [exact, *torch.autograd.grad(exact, (q, k, v), grad[:length, 0].float())]
    for name, ours, expected in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        assert_close(name, ours[:length, 0], expected, 1e-2)


def mixed_lengths(seed: int = 0) -> list[int]:
    """Log-uniform between `SHORTEST` and `LONGEST`, `PACKED_TOKENS` together."""
    draw, lengths = random.Random(seed), []
    while (left := PACKED_TOKENS - sum(lengths)) > 0:
        length = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))))
        lengths.append(min(length, left))
    draw.shuffle(lengths)
    return lengths


def _forward_backward(
    call: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(call(), inputs, grad)


def packed(rates: Rates, *, head_dim: int = 128) -> list[Row]:
    """A packed row against documents of one length with the same tokens and FLOPs."""
    lengths = mixed_lengths()
    even = sum(length**2 for length in lengths) // sum(lengths)
    layouts = {"packed": lengths, "dense": [even] * (PACKED_TOKENS // even)}
    forward, both, work = {}, {}, {}
    for name, of in layouts.items():
        q, k, v = (randn(sum(of), HIDDEN // head_dim, head_dim) for _ in range(3))
        call = partial(gapless.attention, q, k, v, documents(of, head_dim))
        grad = torch.randn_like(q)
        forward[name] = call
        both[name] = partial(_forward_backward, call, (q, k, v), grad)
        work[name] = flops(of, causal=True)
    found = []
    for kind, works, factor in (("fwd", forward, 1.0), ("fwd+bwd", both, 3.5)):
        rate = {name: factor * work[name] / time / 1e9 for name, time in medians(works, rep=200).items()}
        found.append(
            Row(
                case=f"flash-packed-{kind}-hd{head_dim}",
                unit="x of dense",
                gapless=rate["packed"] / rate["dense"],
                limit=1.0,
                beside=rate,
                note=f"TFLOP/s; {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, or all of {even}",
                bar=0.85,
            )
        )
    free_memory()
    return found


CASES: dict[str, Case] = {
    f"flash-hd{head_dim}-{'causal' if causal else 'full'}-{length // 1024}k": partial(
        dense, head_dim=head_dim, length=length, causal=causal
    )
    for head_dim in (64, 128)
    for causal, length in ((True, 8192), (True, 2048), (False, 8192))
} | {"flash-packed": packed}
