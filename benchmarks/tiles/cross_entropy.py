"""Time tiles and chunks of the fused head and cross-entropy: 8,192 rows, 4,096 features, vocabulary 128,256, bf16.

    PYTHONPATH=src python benchmarks/tiles/cross_entropy.py

Prints the loss kernel alone by tile, with the bytes a second that reading and writing the logits once would be; then
loss and gradients by rows of a chunk, over the matmuls alone, whole and in the same chunks, and the peak of memory
above inputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from triton.testing import do_bench

from gapless.kernels import cross_entropy
from gapless.kernels.cross_entropy import linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256
TILES = ((4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32))
ROWS = {False: (512, 1024, 2048, 4096), True: (2048, 2816, 4096, 8192)}
Step = Callable[[], object]


def tile(block: int, warps: int):
    return mock.patch.object(cross_entropy, "_tiles", return_value=(block, warps))


def kernel_alone(labels: torch.Tensor) -> tuple[int, int]:
    """Print a line for each tile; the best of them."""
    logits = torch.randn(2048, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    losses = torch.empty(2048, device="cuda")
    times = {}
    for block, warps in TILES:
        with tile(block, warps):
            both = []
            for grad in (True, False):
                work = partial(cross_entropy._loss, logits, labels[:2048], losses, cross_entropy._Options(), grad=grad)
                both.append(do_bench(work, warmup=10, rep=60, return_mode="median"))
        times[block, warps] = both[0]
        rates = [logits.numel() * 2 * count / ms / 1e6 for ms, count in zip(both, (2, 1), strict=True)]
        print(
            f"kernel {block:6} {warps:3} warps: {both[0]:6.3f} ms {rates[0]:5.0f} GB/s;"
            f" loss only {both[1]:6.3f} ms {rates[1]:5.0f} GB/s"
        )
    return min(times, key=times.__getitem__)


def matmuls(hidden: torch.Tensor, weight: torch.Tensor, rows: int, *, trained: bool) -> float:
    """Milliseconds of the products alone, in chunks of rows into buffers that are there."""
    logits = torch.randn(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16).mul_(0.1)
    scores, grad_hidden = torch.empty_like(logits), torch.empty_like(hidden)
    grad_weight = torch.empty_like(weight) if trained else None

    def work() -> None:
        for start in range(0, TOKENS, rows):
            part = slice(start, min(start + rows, TOKENS))
            x = hidden[part]
            torch.mm(x, weight.t(), out=scores[: len(x)])
            torch.mm(logits[: len(x)], weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.addmm_(logits[: len(x)].t(), x, beta=0 if start == 0 else 1)

    return do_bench(work, warmup=60, rep=250, return_mode="median")


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, trained: bool) -> None:
    """Print a line for each number of rows of a chunk, the plain rule's first."""
    weight.requires_grad_(trained)
    inputs = (hidden, weight) if trained else (hidden,)
    bare = (hidden.detach(), weight.detach())
    alone = matmuls(*bare, TOKENS, trained=trained)
    own = cross_entropy._rows_of_chunks(TOKENS, weight, trained=trained, cut=False)
    for rows in (None, *ROWS[trained]):

        def step(rows: int | None = rows) -> object:
            loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=rows)
            return torch.autograd.grad(loss, inputs)

        torch.cuda.empty_cache()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = torch.cuda.max_memory_allocated() - before - sum(x.numel() * 2 for x in inputs)
        ms = do_bench(step, warmup=60, rep=250, return_mode="median")
        chunked = matmuls(*bare, rows or own, trained=trained)
        print(
            f"{'trained' if trained else 'frozen'} {rows or own:5} rows{'' if rows else ' (rule)':7}: {ms:6.2f} ms,"
            f" {ms / alone:.3f} x matmuls ({alone:.2f} ms), {ms / chunked:.3f} x chunked ({chunked:.2f} ms),"
            f" peak {peak / 2**30:.2f} GiB"
        )


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16).mul_(HIDDEN**-0.5)
    labels = torch.randint(VOCABULARY, (TOKENS,), device="cuda", dtype=torch.int32)
    block, warps = kernel_alone(labels)
    print(f"with blocks of {block} and {warps} warps:")
    with tile(block, warps):
        for trained in (False, True):
            whole(hidden, weight, labels, trained=trained)


if __name__ == "__main__":
    main()
