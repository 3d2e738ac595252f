"""Time blocks and warps of the norm and of AdamW: tensors of 8,192 x 4,096 and 8,192 x 14,336, and 500 adapters.

    PYTHONPATH=src python benchmarks/tiles/adamw.py

Prints milliseconds, bytes a second and the share of a copy's, measured in the same run, of the norm, of the update of
float32 masters with bf16 copies, and of the same with moments in 8 bits; torch's kernels beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from triton.testing import do_bench

from gapless.kernels import adamw
from gapless.kernels.adamw import Entry, TensorList, Tiles, prepare
from gapless.kernels.quantized_state import QuantizedMoment

MATRICES = (8192 * 4096, 8192 * 14336)
ADAPTERS = (16 * 4096,) * 500
UPDATES = ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16), (4096, 8), (4096, 16), (8192, 16))
UPDATES_8BIT = ((1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16))
NORMS = ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
CUDA = torch.device("cuda")
BETAS = (0.9, 0.999)


def measure(work: Callable[[], object], size: float, copy: float) -> str:
    """Milliseconds, GB/s, share of `copy`, which is in bytes a second."""
    time = do_bench(work, warmup=10, rep=40, return_mode="median")
    return f"{time:7.3f} ms {size / time / 1e6:5.0f} GB/s {size / time / 1e-3 / copy:5.2f}"


def copy_rate() -> float:
    """Bytes a second of a copy of 1 GiB, read and written."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device=CUDA)
    y = torch.empty_like(x)
    return 2 * x.numel() / (do_bench(lambda: y.copy_(x), warmup=10, rep=100, return_mode="median") / 1e3)


def entries(sizes: tuple[int, ...], copy: torch.dtype | None, *, eight: bool = False) -> list[Entry]:
    """Tensors with a gradient, from a first step on."""
    made = []
    for size in sizes:
        master = torch.randn(size, device=CUDA)
        moments = [
            QuantizedMoment.zeros(master, signed) if eight else torch.zeros_like(master) for signed in (True, False)
        ]
        narrow = None if copy is None else master.to(copy)
        made.append(Entry(torch.randn_like(master) * 1e-3, master, narrow, *moments, True))
    return made


def tensor_list(tensors: list[Entry], block: int, warps: int) -> TensorList:
    with mock.patch.object(adamw, "_tiles", return_value=Tiles(block, warps, warps, warps)):
        return TensorList(tensors, CUDA)


def sweep(name: str, tensors: list[Entry], tiles: tuple[tuple[int, int], ...], copy: float, width: int) -> None:
    """A line for each tile; `width` is the bytes of an update of one parameter, 4 for the norm."""
    one = torch.ones((), device=CUDA)
    control, _ = prepare(one, one, one * 1e-3, one.bool(), one.clone(), 1.0, BETAS)
    every = torch.ones(len(tensors), dtype=torch.int32, device=CUDA)
    size = sum(entry.grad.numel() for entry in tensors) * width
    for block, warps in tiles:
        ours = tensor_list(tensors, block, warps)
        update = partial(ours.update, control, 0.01, 1e-8, BETAS)
        work = partial(ours.squares, every) if width == 4 else update
        print(f"{name} {block:5} {warps:2} warps {measure(work, size, copy)}")


def beside(name: str, tensors: list[Entry], copy: float) -> None:
    """The same of torch: the fused update, masters to their copies, gradients cleared; and the norm."""
    grads, masters, moments, squares = ([entry[place] for entry in tensors] for place in (0, 1, 3, 4))
    narrow = [entry.copy for entry in tensors if entry.copy is not None]
    count = torch.ones((), device=CUDA)
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}

    def update() -> None:
        torch._fused_adamw_(
            masters, grads, moments, squares, [], [count] * len(masters), amsgrad=False, maximize=False,
            grad_scale=count, found_inf=torch.zeros_like(count), **options,
        )  # fmt: skip
        if narrow:
            torch._foreach_copy_(narrow, masters)
        torch._foreach_zero_(grads)

    def norm() -> object:
        return torch.stack(torch._foreach_norm(grads)).square().sum()

    elements = sum(grad.numel() for grad in grads)
    print(f"{name} torch update   {measure(update, elements * (30 if narrow else 28), copy)}")
    print(f"{name} torch norm     {measure(norm, elements * 4, copy)}")


def main() -> None:
    copy = copy_rate()
    print(f"copy {copy / 1e9:.0f} GB/s; {torch.cuda.get_device_name()}")
    tensors = entries(MATRICES, torch.bfloat16)
    sweep("bf16 update", tensors, UPDATES, copy, 30)
    sweep("norm       ", tensors, NORMS, copy, 4)
    beside("bf16       ", tensors, copy)
    del tensors
    sweep("8bit update", entries(MATRICES, torch.bfloat16, eight=True), UPDATES_8BIT, copy, 22)
    tensors = entries(ADAPTERS, None)
    sweep("lora update", tensors, ((2048, 8),), copy, 28)
    sweep("lora norm  ", tensors, ((2048, 4),), copy, 4)
    beside("lora       ", tensors, copy)


if __name__ == "__main__":
    main()
