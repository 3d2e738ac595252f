"""Time candidate tiles of the attention kernels: 2 x 8,192 tokens, causal, hidden 2,048, bf16.

    PYTHONPATH=src python benchmarks/tiles/flash.py [64 128 ...]

Prints, for each head dim and kernel, candidates by speed, and what the best of them make together.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from triton.testing import do_bench

from gapless.batch import segments
from gapless.kernels.attention import flash
from gapless.kernels.attention.flash import Tile, Tiles

TOKENS, HIDDEN = 8192, 2048
CANDIDATES = {
    "forward": [(128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4)],
    "queries": [(128, 64, 8), (64, 64, 4), (128, 32, 8), (128, 128, 8), (64, 32, 4)],
    "keys": [(64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4), (128, 128, 8), (64, 128, 4)],
}
STAGES = (2, 3)
WORK = {"forward": 1.0, "queries": 1.5, "keys": 2.0}
"""Matrix products, in those of the forward."""


def candidates(head_dim: int) -> Iterator[tuple[str, Tile]]:
    """Kernel and tile of all that fit."""
    for kind, tiles in CANDIDATES.items():
        for (queries, keys, warps), stages in product(tiles, STAGES):
            resident, streamed = (keys, queries) if kind == "keys" else (queries, keys)
            values = resident if kind == "forward" else 2 * resident
            if 2 * head_dim * (values + 2 * stages * streamed) <= 227 * 1024:
                yield kind, Tile(queries, keys, warps, stages)


class Problem:
    """Tensors, and a call of one kernel with a tile."""

    def __init__(self, head_dim: int, tokens: int = TOKENS) -> None:
        torch.manual_seed(0)
        self.tokens, self.heads, self.dim = tokens, HIDDEN // head_dim, head_dim
        shape = (2 * tokens, self.heads, head_dim)
        self.q, self.k, self.v, self.grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.lse = torch.randn(self.heads, 2 * tokens, device="cuda") + 12
        self.delta = torch.randn_like(self.lse)

    def call(self, kind: str, tile: Tile) -> Callable[[], Any]:
        """A launch of a kernel with a tile."""
        tiles = Tiles(tile, tile, tile)
        stream = segments([self.tokens] * 2, tiles=tuple(dict.fromkeys(flash._specs(tiles, None))), device="cuda")
        call = flash._Call(stream, stream, None, None, self.dim**-0.5, True, False, tiles)
        saved = (self.q, self.k, self.v, self.grad, self.lse, self.delta)
        return {
            "forward": lambda: flash._Flash.apply(self.q, self.k, self.v, None, call, False, 0),
            "queries": lambda: flash._queries_backward(call, *saved),
            "keys": lambda: flash._keys_backward(call, *saved),
        }[kind]


def compile_some(part: list[tuple[int, str, Tile]]) -> None:
    """Fill Triton's cache on disk."""
    for head_dim, kind, tile in part:
        try:
            Problem(head_dim, 256).call(kind, tile)()
        except RuntimeError as error:  # what does not compile is left out when times are taken
            print(f"{head_dim} {kind} {tile}: {str(error)[:80]}", flush=True)


def main() -> None:
    dims = [int(text) for text in sys.argv[1:]] or [64, 128]
    work = [(dim, kind, tile) for dim in dims for kind, tile in candidates(dim)]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(work[index::14],)) for index in range(14)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for dim in dims:
        problem, best = Problem(dim), {}
        flops = 4 * 2 * problem.heads * TOKENS**2 * dim / 2
        for kind in CANDIDATES:
            times = []
            for tile in (tile for name, tile in candidates(dim) if name == kind):
                try:
                    times.append((do_bench(problem.call(kind, tile), warmup=5, rep=25, return_mode="median"), tile))
                except RuntimeError:
                    continue
            times.sort()
            best[kind] = times[0][0]
            told = ", ".join(f"{tuple(tile)} {WORK[kind] * flops / ms / 1e9:.0f}" for ms, tile in times[:5])
            print(f"head dim {dim}, {kind}, TFLOP/s: {told}", flush=True)
        backward = best["queries"] + best["keys"]
        print(
            f"head dim {dim}: forward {flops / best['forward'] / 1e9:.0f}, backward without delta "
            f"{2.5 * flops / backward / 1e9:.0f} TFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
