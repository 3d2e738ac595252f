"""The cases of benchmarks/kernels.py, by kind of kernel: functions of the machine's rates that return rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common import Row


@dataclass(frozen=True)
class Rates:
    """What the card does, measured in the same run."""

    copy: float
    """Bytes a millisecond, read and written counted."""
    matmul: float
    """TFLOP/s of a bf16 product of 8192^3, on random data."""


Case = Callable[[Rates], list[Row]]
