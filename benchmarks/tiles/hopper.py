"""Time candidate tiles of Hopper's attention kernels: 16,384 tokens, hidden 2,048, bf16.

    PYTHONPATH=src python benchmarks/tiles/hopper.py [64 128 256]

Candidates take turns, as the card's clock falls under load. Prints TFLOP/s of each: the forward at 8k and 16k tokens a
document, causal, and 16k full; the backward, fast and in turn, at 8k causal.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from itertools import product
from unittest import mock

import torch
from triton.testing import do_bench

from gapless.batch import segments
from gapless.kernels.attention import attention, attention_tiles, hopper
from gapless.kernels.attention.hopper import BackTile, Tile
from gapless.kernels.runtime import SHARED_MEMORY
from gapless.training.setup import determinism

TOKENS, HIDDEN, ROUNDS = 16384, 2048, 3
DOCUMENTS = [(8192, True), (16384, True), (16384, False)]


def forward_tiles(head_dim: int) -> list[Tile]:
    """All that fit shared memory and registers."""
    found = []
    switch = (False, True)
    for keys, consumers, stages, turns, persistent in product((64, 128), (2, 3), (2, 3), switch, switch):
        memory = 2 * head_dim * (64 * consumers * (1 + persistent) + 2 * stages * keys)
        registers = head_dim / 2 + keys / 2 + keys / 4 <= (200 if consumers == 2 else 130)
        if memory + 1024 <= SHARED_MEMORY[90] and registers:
            found.append(Tile(keys, consumers, stages, turns, persistent))
    return found


def back_tiles(head_dim: int) -> list[BackTile]:
    """Queries of a tile."""
    return [BackTile(64, 64)] if head_dim > 128 else [BackTile(64, 128), *([BackTile(128, 128)] * (head_dim == 64))]


def work(head_dim: int, length: int, causal: bool, tile: Tile, back: BackTile | None, ordered: bool) -> tuple:
    """A call of the forward or, with `back`, of the backward; and its FLOPs."""
    with (
        mock.patch.object(hopper, "forward_tile", return_value=tile),
        mock.patch.object(hopper, "back_tile", return_value=back or hopper.back_tile(head_dim, head_dim)),
    ):
        tiles = attention_tiles(head_dim, head_dim, [None], torch.bfloat16, "cuda")
        stream = segments([length] * (TOKENS // length), tiles=tiles, device="cuda")
        shape = (TOKENS, HIDDEN // head_dim, head_dim)
        q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        flops = (10 if back else 4) * TOKENS * length * HIDDEN * (0.5 if causal else 1)
        if back is None:
            call = _patched(lambda: attention(q, k, v, stream, causal=causal), tile)
        else:
            for x in (q, k, v):
                x.requires_grad_()
            with determinism(ordered):
                out = attention(q, k, v, stream, causal=causal)
            call = lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)  # noqa: E731
        call()
        return call, flops


def _patched(call: Callable, tile: Tile) -> Callable:
    def patched():
        with mock.patch.object(hopper, "forward_tile", return_value=tile):
            return call()

    return patched


def compile_some(part: list[tuple]) -> None:
    """Fill Triton's cache on disk."""
    for arguments in part:
        work(*arguments)


def works(head_dim: int) -> dict[tuple, tuple]:
    """Arguments of `work`, by what is printed, length and mask."""
    best = hopper.forward_tile(head_dim, head_dim)
    found = {
        (str(tuple(tile)), length, causal): (head_dim, length, causal, tile, None, False)
        for tile in forward_tiles(head_dim)
        for length, causal in DOCUMENTS
    }
    return found | {
        (f"back {tuple(tile)}{' in turn' * ordered}", 8192, True): (head_dim, 8192, True, best, tile, ordered)
        for tile in back_tiles(head_dim)
        for ordered in (False, True)
    }


def main() -> None:
    dims = [int(text) for text in sys.argv[1:]] or [64, 128, 256]
    everything = [arguments for dim in dims for arguments in works(dim).values()]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(everything[index::14],)) for index in range(14)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for head_dim in dims:
        made = {key: work(*arguments) for key, arguments in works(head_dim).items()}
        rates: dict[tuple, float] = {}
        for _ in range(ROUNDS):
            for key, (call, flops) in made.items():
                rate = flops / do_bench(call, warmup=3, rep=12, return_mode="median") / 1e9
                rates[key] = max(rate, rates.get(key, 0.0))
        for name in dict.fromkeys(key[0] for key in rates):
            shown = "  ".join(f"{rate:4.0f}" for key, rate in rates.items() if key[0] == name)
            print(f"{head_dim:>4} {name:<32} {shown}", flush=True)


if __name__ == "__main__":
    main()
