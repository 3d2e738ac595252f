"""Calls of the public functions, forward and backward, that launch every kernel with the tiles of real models.

Tensors are on the CPU and have few tokens: what is compiled depends on their other dimensions and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gapless.kernels.cross_entropy import linear_cross_entropy
from gapless.kernels.rope import rotary_table, rotate_qkv

CASES: dict[str, Callable[[], None]] = {}
"""By name; the first part of a name, up to a dot, is the operation."""


def case(name: str):
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = function
        return function

    return add


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def backward(*outs: torch.Tensor) -> None:
    torch.autograd.backward(outs, [torch.randn_like(out) for out in outs])


def rotate(shape: tuple[int, int, int], half: int, *, norm: str = "none", tokens: int = 2, **options) -> None:
    """norm: "none", "frozen" or "trained"."""
    rotary = rotary_table(torch.arange(tokens, dtype=torch.int32), torch.ones(half))
    weights = [] if norm == "none" else [tensor(shape[2], grad=norm == "trained") for _ in range(2)]
    backward(*rotate_qkv(tensor(tokens, *shape), rotary, *weights, **options))


@case("rope.llama")
def _() -> None:
    rotate((8, 6, 128), 64)


@case("rope.qwen3")
def _() -> None:
    rotate((8, 6, 128), 64, norm="frozen")


@case("rope.qwen3_trained")
def _() -> None:
    rotate((8, 6, 128), 64, norm="trained", tokens=64)  # enough for programs of many steps


@case("rope.padded")
def _() -> None:
    rotate((4, 3, 72), 36)


@case("rope.glm")
def _() -> None:
    rotate((2, 18, 128), 32, interleaved=True, norm="trained", tokens=96)


def head(vocabulary: int, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    hidden, weight = tensor(2, 16, dtype=dtype), tensor(vocabulary, 16, dtype=dtype)
    labels = torch.zeros(2, dtype=torch.int32)
    backward(linear_cross_entropy(hidden, weight, labels, **options))


@case("cross_entropy.llama")
def _() -> None:
    head(128256)


@case("cross_entropy.gemma2")
def _() -> None:
    head(256000, softcap=30.0, z_loss=1e-4)


@case("cross_entropy.odd_fp32")
def _() -> None:
    head(50257, torch.float32, logit_scale=0.0625)
