"""The cases of kernels.py and attention.py, by kind of kernel: functions of the machine's rates that return rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Row, copy_rate, free_memory, medians


@dataclass(frozen=True)
class Rates:
    """What the card does, measured in the same run."""

    copy: float
    """Bytes a millisecond, read and written counted."""
    matmul: float
    """TFLOP/s of a bf16 product of 8192^3, on random data."""


Case = Callable[[Rates], list[Row]]


def measure_rates() -> Rates:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time = medians({"matmul": lambda: a @ b}, rep=200)["matmul"]
    rates = Rates(copy=copy_rate(), matmul=2 * 8192**3 / time / 1e9)
    free_memory()
    print(f"copy {rates.copy / 1e6:.0f} GB/s read + written, bf16 matmul 8192^3 {rates.matmul:.0f} TFLOP/s", flush=True)
    return rates
