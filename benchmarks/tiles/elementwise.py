"""Time candidate splits of the RMS norm's and SwiGLU's kernels: 8,192 rows of 4,096 and of 14,336 features, bf16.

    PYTHONPATH=src python benchmarks/tiles/elementwise.py

Prints, for each kernel and width, the candidates' shares of the rate of a copy that is measured in the same run, best
first, and what is chosen at present with its GB/s. Inputs take turns, so that none is found in L2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.errors import TritonError
from triton.testing import do_bench_cudagraph

from gapless.kernels import activation, rms_norm

ROWS, WIDTHS, SETS = 8192, (4096, 14336), 3

# Rows, warps, columns at a time (0: whole rows).
FORWARD = {
    4096: [(1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (1, 8, 2048)],
    14336: [(1, 8), (1, 16), (1, 8, 4096), (1, 16, 2048), (1, 16, 4096), (1, 16, 8192)],
}
# Rows, warps.
BACKWARD = {4096: [(1, 4), (1, 8), (1, 16), (2, 8)], 14336: [(1, 8), (1, 16), (1, 32)]}
# Rows, warps, 0, programs per multiprocessor, stages.
WEIGHT = {
    4096: [(1, 4, 0, 4, 1), (1, 4, 0, 4, 3), (1, 8, 0, 4, 1), (1, 8, 0, 4, 2), (1, 8, 0, 2, 3), (1, 16, 0, 2, 2)],
    14336: [(1, 16, 0, 1, 1), (1, 16, 0, 1, 3), (1, 32, 0, 1, 1), (1, 32, 0, 1, 2), (1, 32, 0, 1, 3)],
}
# Elements of a program, warps.
GATE = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (1024, 2), (8192, 8)]


class Work(NamedTuple):
    """A kernel at one width."""

    name: str
    module: Any
    candidates: Sequence[tuple[int, ...]]
    call: Callable[[], object]
    size: int
    """Fewest bytes that a call moves."""


def works(width: int) -> Iterator[Work]:
    """All kernels at a width."""
    x, grad, wide = (
        [torch.randn(ROWS, columns, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
        for columns in (width, width, 2 * width)
    )
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
    rstd = torch.rand(ROWS, device="cuda")
    row = SETS * ROWS * width * 2

    def forward() -> None:
        for some in x:
            rms_norm._fast_forward(some, weight, 1e-5, 0)

    def backward(trained: bool = False) -> None:
        for some, upstream in zip(x, grad, strict=True):
            rms_norm._fast_backward(upstream, some, weight, rstd, (True, trained))

    def gate_forward() -> None:
        for some in wide:
            activation._fast_forward(some, "silu", 0)

    def gate_backward() -> None:
        for some, upstream in zip(wide, grad, strict=True):
            activation._fast_backward(upstream, some, "silu")

    yield Work("norm fwd", rms_norm, FORWARD[width], forward, 2 * row)
    yield Work("norm bwd", rms_norm, BACKWARD[width], backward, 3 * row)
    yield Work("norm bwd trained", rms_norm, WEIGHT[width], lambda: backward(trained=True), 3 * row)
    yield Work("swiglu fwd", activation, GATE, gate_forward, 3 * row)
    yield Work("swiglu bwd", activation, GATE, gate_backward, 5 * row)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds, the median in CUDA graphs."""
    return do_bench_cudagraph(call, rep=6, return_mode="median")


def copy_rate() -> float:
    """Bytes read plus bytes written a millisecond."""
    source = torch.randint(0, 256, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def share(work: Work, copy: float, tiles: tuple[int, ...]) -> float:
    """Of a copy's rate; 0 if the chip has not enough of something."""
    present = work.module._tiles
    try:
        work.module._tiles = lambda *args, **kind: work.module._Tiles(*tiles)
        return work.size / timed(work.call) / copy
    except TritonError as error:
        print(f"{work.name} {tiles}: {error}")
        return 0.0
    finally:
        work.module._tiles = present


def main() -> None:
    begin = time.perf_counter()
    copy = copy_rate()
    print(
        f"copy {copy / 1e6:.0f} GB/s; norm: rows/warps/columns/programs a multiprocessor/stages, swiglu: elements/warps"
    )
    for width in WIDTHS:
        for work in works(width):
            rate = work.size / timed(work.call)
            shares = {"/".join(map(str, tiles)): share(work, copy, tiles) for tiles in work.candidates}
            best = sorted(shares.items(), key=lambda found: -found[1])
            print(f"{work.name} {width}: present {rate / copy:.3f} ({rate / 1e6:.0f} GB/s)")
            print("   ", ", ".join(f"{name} {value:.3f}" for name, value in best), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
