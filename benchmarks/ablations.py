"""Ablations: a part of the design taken out, everything else left as it is.

    python benchmarks/ablations.py [--cases metadata-16,metadata-64] [--list]

`metadata-16`, `-32` and `-64`: what a batch's documents are is built once, against building it anew in each of so many
layers of Llama-3.1-8B's shape (LoRA r=16, two packed rows of 4,096 tokens a step): cu_seqlens with one read by the
host, or the dense mask of torch's masked attention. Each row is the time of the former over ours, of the forward, the
backward and (without a suffix) the whole step; the limit of 1 is where building it costs nothing. All ways see the same
documents in turns, and what their layers find is compared first. Rows go to benchmarks/results/ablations.json. Exits
with 1 if a case failed; a bar that was missed is said in the table and is no failure.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from cases import metadata
from common import chosen, print_failed, print_table, require_gpu, run_cases

CASES = {f"metadata-{n}": partial(metadata.rows, f"metadata-{n}", metadata.setting_of(n)) for n in (16, 32, 64)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names, separated by commas; all by default")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    options = parser.parse_args()
    names = chosen(options.cases, list(CASES), "case") or list(CASES)
    if options.list:
        print("\n".join(names))
        return 0
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    command = f"python benchmarks/ablations.py{f' --cases {options.cases}' if options.cases else ''}"
    rows, failed = run_cases("ablations", {name: CASES[name] for name in names}, command)
    print_table(rows)
    print_failed(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
