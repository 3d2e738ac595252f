"""Time candidate splits of the kernels that normalise and rotate queries and keys: 8,192 tokens, heads of 128, bf16.

    PYTHONPATH=src python benchmarks/tiles/rope.py

Prints shares of the rate of a copy, measured in the same run, for every candidate, and GB/s of the present choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from triton.testing import do_bench_cudagraph

from gapless.kernels import rope
from gapless.kernels.rope import RotaryTable, rotary_table

TOKENS, HEAD = 8192, 128
SHAPES = {"32/8": (8, 4), "112/112": (112, 1), "32/32": (32, 1)}
"""Query and key heads: key heads and groups. The last one is timed with the present choice alone."""
CANDIDATES = (
    *((1, 2, 0), (1, 4, 0), (1, 8, 0), (2, 2, 0), (2, 4, 0)),
    *((1, 4, 4), (1, 4, 5), (1, 4, 10), (1, 4, 20), (1, 2, 10), (1, 8, 2)),
)
"""Only those of many steps are timed with trained weights."""
KINDS = ("fwd", "fwd norm", "bwd", "bwd norm", "bwd trained")

Work = tuple[str, Callable[[], object], int]


def works(kv_heads: int, groups: int) -> Iterator[Work]:
    """Kind, call, and the fewest bytes that it moves."""
    qkv, q, k, v = (
        torch.randn(TOKENS, kv_heads, *sizes, HEAD, device="cuda", dtype=torch.bfloat16)
        for sizes in ((groups + 2,), (groups,), (), ())
    )
    grads = [q.flatten(1, 2), k, v]
    weights = [torch.randn(HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    table: RotaryTable = rotary_table(
        torch.arange(TOKENS, device="cuda", dtype=torch.int32), torch.rand(HEAD // 2, device="cuda")
    )
    settings = rope._Settings(1e-6, False, True)
    tables, turned, whole = 2 * table.cos.nbytes, q.nbytes + k.nbytes, qkv.nbytes
    yield "fwd", lambda: rope._fast_forward(qkv, table, [], settings), 2 * turned + tables
    yield "fwd norm", lambda: rope._fast_forward(qkv, table, weights, settings), 2 * turned + tables
    yield "bwd", lambda: rope._fast_backward(grads, None, table, [], settings, (True, False)), 2 * whole + tables
    for kind, trained in (("bwd norm", False), ("bwd trained", True)):

        def backward(trained: bool = trained) -> object:
            return rope._fast_backward(grads, qkv, table, weights, settings, (True, trained))

        yield kind, backward, 2 * whole + turned + tables


def timed(call: Callable[[], object]) -> float:
    """Milliseconds, the median in CUDA graphs; inputs and outputs are larger than L2."""
    return do_bench_cudagraph(call, rep=10, return_mode="median")


def copy_rate() -> float:
    """Bytes read plus bytes written a millisecond."""
    source = torch.randint(0, 256, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def main() -> None:
    copy = copy_rate()
    present = rope._tiles
    print(f"copy {copy / 1e6:.0f} GB/s; shares of it; a candidate is vectors, warps, programs per multiprocessor")
    print(" " * 22 + "".join(f"{kind:>12}" for kind in KINDS))
    for name, shape in SHAPES.items():
        found = list(works(*shape))
        for tiles in [] if name == "32/32" else CANDIDATES:
            rope._tiles = lambda tiles=tiles, **kind: rope._Tiles(*tiles)
            shares = []
            for kind, call, size in found:
                # Without many steps there would be a sum for every tile.
                skipped = kind == "bwd trained" and tiles[2] == 0
                shares.append("-" if skipped else f"{size / timed(call) / copy:.3f}")
            print(f"{name:8}{tiles!s:14}" + "".join(f"{share:>12}" for share in shares), flush=True)
        rope._tiles = present
        rates = [size / timed(call) for _, call, size in found]
        shown = (f"{rate / copy:.3f} {rate / 1e6:.0f}" for rate in rates)
        print(f"{name:8}{'present, GB/s':14}" + "".join(f"{text:>12}" for text in shown), flush=True)


if __name__ == "__main__":
    main()
