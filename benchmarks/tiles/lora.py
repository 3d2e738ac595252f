"""Time candidate tiles of the skinny products, and adapted layers whole: Llama-3.1-8B, 8,192 tokens, r 16, bf16.

    PYTHONPATH=src python benchmarks/tiles/lora.py

Prints, for each candidate (tokens x channels / pieces / warps / stages), microseconds at every shape, in a CUDA graph
so that the host does not count and on operands in turn so that the cache does not help, with the time that the bytes
alone take at the rate of a copy; what calls take of the host; then layers over their base matmul, beside other ways to
add the update.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
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
PROJECT_TILES = [
    (64, 128, 1, 4, 4),
    (64, 128, 1, 8, 4),
    (64, 128, 1, 4, 3),
    (64, 256, 1, 8, 3),
    (64, 64, 1, 4, 6),
    (32, 128, 1, 4, 6),
    (32, 256, 1, 4, 3),
    (128, 64, 1, 8, 6),
    (128, 64, 2, 4, 5),
    (128, 128, 2, 8, 4),
]
OUTER = {"dA qkv": (4096, 48), "dA down": (14336, 16), "dB gate_up": (28672, 32)}
OUTER_TILES = [(64, 128, 4, 4, 4), (64, 128, 2, 4, 4), (128, 64, 4, 4, 4), (64, 256, 8, 8, 3)]
SPREAD = {"dx qkv": (4096, 48), "y qkv": (6144, 48)}
SPREAD_TILES = [(64, 256, 1, 8, 2), (128, 128, 1, 8, 2), (32, 256, 1, 4, 2)]
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


def in_graph(calls: list[Callable[[], Any]], rounds: int = 8) -> float:
    """Microseconds of the GPU for a call, of a graph of them in turn: the median of some replays, once it is warm."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(24)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in zip(events[-9:], events[-8:], strict=False)]
    return statistics.median(times) * 1e3 / (rounds * len(calls))


def of_host(call: Callable[[], Any], count: int = 200) -> float:
    """Microseconds of the host for a call; the GPU has to have less to do."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6


def copy_rate() -> float:
    """Bytes read or written a microsecond."""
    x = draw(2**28)
    return 2 * x.nbytes / timed(lambda: x.clone())


def skinny_product(kind: str, channels: int, rank: int, *, first: bool, tokens: int = TOKENS) -> Callable[[], Any]:
    """A call with a large operand of its own. Strides are those of a wide buffer.

    Args:
        kind: "project", "spread" or "outer".
        channels: of the large operand.
        rank: of the small ones.
        first: whether the weight is A, or B transposed.
        tokens: of both.
    """
    w = draw(rank, channels + 64)[:, :channels] if first else draw(channels, 4096 + 64)[:, 4096 : 4096 + rank].t()
    inner = draw(tokens, rank)
    if kind == "spread":
        return lambda: skinny.spread(inner, w)
    x = empty_rows(draw(1, 1).expand(tokens, 1), channels, 64 if first else 0)
    x.normal_()
    if kind == "outer":
        return lambda: skinny.outer(inner, x, None, rank_first=first)
    return lambda: skinny.project(x, w, 2.0, None, spare=64 if first else 0)


def sweep(kind: str, shapes: dict[str, tuple[int, int]], candidates: Sequence[tuple[int, ...]], rate: float) -> None:
    print(f"{kind:20}" + "".join(f"{name:>13}" for name in shapes))
    sizes = {name: TOKENS * channels * 2 for name, (channels, _) in shapes.items()}
    print(f"{'bytes alone':20}" + "".join(f"{size / rate:13.1f}" for size in sizes.values()))
    times: list[list[float]] = [[] for _ in range(1 + len(candidates))]
    for name, shape in shapes.items():
        first = name.startswith(("fwd", "dA", "dx"))
        calls = [skinny_product(kind, *shape, first=first) for _ in range(2**28 // sizes[name] + 1)]
        times[0].append(in_graph(calls))
        for line, candidate in zip(times[1:], candidates, strict=True):
            with mock.patch.object(skinny, "_tiles", lambda *_, tiles=candidate: skinny._Tiles(*tiles)):
                line.append(in_graph(calls))
    for line, candidate in zip(times, [None, *candidates], strict=True):
        name = "as it is" if candidate is None else "{}x{} / {} / {} / {}".format(*candidate)
        print(f"{name:20}" + "".join(f"{time:13.1f}" for time in line), flush=True)


def host() -> None:
    """What calls take of the host, with so few tokens that the GPU waits; and as do_bench has it, with all tokens."""
    kinds = ("project", "spread", "outer")
    times = [of_host(skinny_product(kind, 4096, 48, first=True, tokens=256)) for kind in kinds]
    channels, leading, parts = LAYERS["qkv"]
    wide = WideWeight(draw(*leading, channels), 48, parts)
    a = draw(48, channels, dtype=torch.float32).requires_grad_()
    b = [draw(part.features(leading), 16, dtype=torch.float32).requires_grad_() for part in parts]
    x, grad = empty_rows(draw(64, 1), channels, wide.spare).zero_().requires_grad_(), draw(64, wide.out)

    def forward() -> torch.Tensor:
        return lora_linear(x, wide, a, b, 2.0, spare=wide.spare, trusted=True)

    times.append(of_host(forward))
    times.append(of_host(lambda: torch.autograd.grad(forward(), [x, a, *b], grad)))
    times.append(timed(skinny_product("project", 4096, 48, first=True)))
    names = (*kinds, "forward", "and backward", "do_bench of project")
    print("host: " + ", ".join(f"{name} {time:.1f}" for name, time in zip(names, times, strict=True)))


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
            spare = wide.spare  # noqa: B023
            return lora_linear(x, wide, a, b, 2.0, residual=residual, dropout=drop, spare=spare, trusted=True)  # noqa: B023

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
    host()
    torch.cuda.empty_cache()
    layers()


if __name__ == "__main__":
    main()
