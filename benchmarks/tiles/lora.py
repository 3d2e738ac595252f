"""Time candidate tiles of the skinny products, and adapted layers whole: Llama-3.1-8B, 8,192 tokens, r 16, bf16.

    PYTHONPATH=src python benchmarks/tiles/lora.py

Prints, for each candidate (tokens x channels / pieces / warps / stages), microseconds at every shape, with the time
that the bytes alone take at the rate of a copy; then layers over their base matmul, beside other ways to add the
update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from triton.testing import do_bench

from gapless.batch import DropoutCounters
from gapless.kernels import skinny
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.kernels.runtime import empty_rows
from gapless.models.linear import Part

TOKENS = 8192
PROJECT = {"fwd qkv": (4096, 48), "fwd down": (14336, 16), "bwd qkv": (6144, 48), "bwd gate_up": (28672, 32)}
PROJECT_TILES = [(64, 64, 2, 4, 5), (64, 128, 2, 4, 4), (64, 128, 4, 4, 3), (128, 64, 4, 4, 4), (32, 128, 1, 4, 4)]
OUTER = {"dA qkv": (4096, 48), "dB gate_up": (28672, 32)}
OUTER_TILES = [(64, 64, 8, 4, 4), (64, 128, 8, 4, 4)]
SPREAD = {"dx qkv": (4096, 48), "y qkv": (6144, 48)}
SPREAD_TILES = [(64, 128, 1, 4, 2), (64, 256, 1, 8, 2)]
LAYERS: dict[str, tuple[int, tuple[int, ...], tuple[Part, ...]]] = {
    "qkv": (4096, (8, 6, 128), (Part("q", 1, 0, 4), Part("k", 1, 4, 1), Part("v", 1, 5, 1))),
    "gate_up": (4096, (2, 14336), (Part("gate", 0, 0, 1), Part("up", 0, 1, 1))),
    "down": (14336, (4096,), (Part("down", 0, 0, 4096),)),
}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def timed(call: Callable[[], Any], rep: int = 30) -> float:
    """Microseconds, the median; the cache is cleared before every call."""
    return do_bench(call, warmup=5, rep=rep, return_mode="median") * 1e3


def copy_rate() -> float:
    """Bytes read or written a microsecond."""
    x = draw(2**28)
    return 2 * x.nbytes / timed(lambda: x.clone())


def skinny_product(kind: str, channels: int, rank: int) -> tuple[Callable[[], Any], int]:
    """A call, and the bytes of its large operand. Strides are those of a wide buffer."""
    buffer = draw(rank, channels + 64)[:, :channels]
    inner = draw(TOKENS, rank)
    if kind == "spread":
        return lambda: skinny.spread(inner, buffer), TOKENS * channels * 2
    x = empty_rows(draw(1, 1).expand(TOKENS, 1), channels, 64)
    x.normal_()
    if kind == "outer":
        return lambda: skinny.outer(inner, x, None, rank_first=True), x.nbytes
    return lambda: skinny.project(x, buffer, 2.0, None, spare=64), x.nbytes


def sweep(kind: str, shapes: dict[str, tuple[int, int]], candidates: list[tuple[int, ...]], rate: float) -> None:
    calls = [skinny_product(kind, *shape) for shape in shapes.values()]
    print(f"{kind:20}" + "".join(f"{name:>13}" for name in shapes))
    print(f"{'bytes alone':20}" + "".join(f"{size / rate:13.1f}" for _, size in calls))
    print(f"{'as it is':20}" + "".join(f"{timed(call):13.1f}" for call, _ in calls))
    for candidate in candidates:
        with mock.patch.object(skinny, "_tiles", lambda *_, tiles=candidate: skinny._Tiles(*tiles)):
            times = [timed(call) for call, _ in calls]
        tokens, channels, *rest = candidate
        name = f"{tokens}x{channels} / {' / '.join(map(str, rest))}"
        print(f"{name:20}" + "".join(f"{time:13.1f}" for time in times))


def layers() -> None:
    """Forward and backward over the base matmul, other ways to add the update, and what columns of K cost."""
    names = ("base us", "fwd", "dropout", "no spare", "addmm_", "+16", "+32", "+64", "+128", "bwd", "dx us")
    print(f"{'layer, x of base':17}" + "".join(f"{name:>9}" for name in names))
    for name, (channels, leading, parts) in LAYERS.items():
        weight = draw(*leading, channels) * channels**-0.5
        wide = WideWeight(weight, 16 * len(parts), parts)
        out, flat = wide.out, weight.flatten(0, -2)
        a = draw(wide.rank, channels, dtype=torch.float32).requires_grad_()
        b = [draw(part.features(leading), 16, dtype=torch.float32).requires_grad_() for part in parts]
        x, plain, grad = empty_rows(draw(TOKENS, 1), channels, wide.spare), draw(TOKENS, channels), draw(TOKENS, out)
        x.copy_(plain)
        residual = draw(TOKENS, out) if name == "down" else None
        place = torch.arange(TOKENS, device="cuda", dtype=torch.int32)
        drop = InputDropout(0.05, DropoutCounters(place[:2], place, place), 3, 0)
        low_a, low_b, y = a.detach().bfloat16(), draw(out, wide.rank), draw(TOKENS, out)

        def ours(x: torch.Tensor = x, drop: InputDropout | None = None) -> torch.Tensor:
            return lora_linear(x, wide, a, b, 2.0, residual=residual, dropout=drop)  # noqa: B023

        base = timed(lambda: functional.linear(plain, flat))  # noqa: B023
        times = [timed(ours), timed(lambda: ours(drop=drop)), timed(lambda: ours(plain))]  # noqa: B023
        separate = timed(lambda: torch.addmm(y, plain @ low_a.t(), low_b.t(), out=y))  # noqa: B023
        times.append(base + separate)
        for spare in (16, 32, 64, 128):
            pair = draw(TOKENS, channels + spare), draw(out, channels + spare)
            times.append(timed(lambda pair=pair: functional.linear(*pair)))
        leaf = x.detach().requires_grad_()
        done = ours(leaf)
        grads = [leaf, a, *b]
        times.append(timed(lambda: torch.autograd.grad(done, grads, grad, retain_graph=True)))  # noqa: B023
        dx = timed(lambda: grad @ flat)  # noqa: B023
        shares = [*(f"{time / base:9.3f}" for time in times[:-1]), f"{times[-1] / dx:9.3f}"]
        print(f"{name:17}{base:9.0f}" + "".join(shares) + f"{dx:9.0f}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    rate = copy_rate()
    sweep("project", PROJECT, PROJECT_TILES, rate)
    sweep("outer", OUTER, OUTER_TILES, rate)
    sweep("spread", SPREAD, SPREAD_TILES, rate)
    torch.cuda.empty_cache()
    layers()


if __name__ == "__main__":
    main()
