"""Kernels beside their peers and their limits: the table of what they must show.

    python benchmarks/kernels.py [--cases rms_norm,lora] [--list]

Ours is called through the public functions, checked against float32 in the same run, and measured in turns with the
peers that are installed (Liger, torch.compile, torch's own kernels); attention.py does so for attention. Rows go to
benchmarks/results/kernels.json. Exits with 1 if a case failed; a bar that was missed is said in the table and is no
failure.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config
from cases import adamw, elementwise, linear_ce, lora, measure_rates
from common import print_failed, print_table, require_gpu, run_cases

CASES = {**elementwise.CASES, **adamw.CASES, **linear_ce.CASES, **lora.CASES}


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
    names = selected(options.cases)
    require_gpu()
    # transformers, which Liger imports, looks for a package of the name of this file.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    # Graphs are captured on a stream that is not the default one, and a backward runs where its forward ran.
    torch.cuda.set_stream(torch.cuda.Stream())
    torch.backends.cuda.matmul.allow_tf32 = False
    # Compiled backwards are called again and again on what one forward has saved.
    torch._functorch.config.donated_buffer = False
    rates = measure_rates()
    command = f"python benchmarks/kernels.py{f' --cases {options.cases}' if options.cases else ''}"
    chosen = {name: partial(CASES[name], rates) for name in names}
    rows, failed = run_cases("kernels", chosen, command)
    print_table(rows)
    print_failed(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
