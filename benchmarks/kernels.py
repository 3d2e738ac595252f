"""Kernels beside their peers and their limits: the table of what they must show.

    python benchmarks/kernels.py [--cases rms_norm,flash] [--list]

Ours is called through the public functions, checked against float32 in the same run, and measured in turns with the
peers that are installed (Liger, torch.compile, torch's own kernels). Rows go to benchmarks/results/kernels.json. Exits
with 1 if a case failed; a bar that was missed is said in the table and is no failure.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch
import torch._functorch.config
from cases import Rates, adamw, elementwise, flash, linear_ce, lora
from common import FAILURES, Row, copy_rate, free_memory, medians, merge, print_table

CASES = {**elementwise.CASES, **adamw.CASES, **linear_ce.CASES, **lora.CASES, **flash.CASES}


def measure_rates() -> Rates:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    time_ = medians({"matmul": lambda: a @ b}, rep=200)["matmul"]
    rates = Rates(copy=copy_rate(), matmul=2 * 8192**3 / time_ / 1e9)
    free_memory()
    print(f"copy {rates.copy / 1e6:.0f} GB/s read + written, bf16 matmul 8192^3 {rates.matmul:.0f} TFLOP/s", flush=True)
    return rates


def selected(names: str | None) -> list[str]:
    """The cases that begin with one of the comma-separated names; all without names."""
    if names is None:
        return list(CASES)
    unknown = [name for name in names.split(",") if not any(case.startswith(name) for case in CASES)]
    if unknown:
        sys.exit(f"error: no case begins with {', '.join(unknown)}; cases: {', '.join(CASES)}")
    return [case for case in CASES if case.startswith(tuple(names.split(",")))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="beginnings of names, separated by commas; all by default")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CASES))
        return 0
    # transformers, which Liger imports, looks for a package of the name of this file.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    # Graphs are captured on a stream that is not the default one, and a backward runs where its forward ran.
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.backends.cuda.matmul.allow_tf32 = False
    # Compiled backwards are called again and again on what one forward has saved.
    torch._functorch.config.donated_buffer = False
    rates = measure_rates()
    rows: list[Row] = []
    failed = []
    for name in selected(options.cases):
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            rows += CASES[name](rates)
        except FAILURES:
            failed.append(name)
            print(f"{name} FAILED: {traceback.format_exc(limit=-4)}", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        free_memory()
    merge("kernels", rows, f"python benchmarks/kernels.py{f' --cases {options.cases}' if options.cases else ''}")
    print_table(rows)
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
