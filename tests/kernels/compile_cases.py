"""Calls of the public functions, forward and backward, that launch every kernel with the tiles of real models.

Tensors are on the CPU and have few tokens: what is compiled depends on their other dimensions and dtypes alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
