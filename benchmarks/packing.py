"""Packed rows against padded batches: trained tokens/s of the same documents in the same step.

    python benchmarks/packing.py

Documents of round(exp(N(ln 350, 1))) tokens, 16 to 4,096, go through our loader into packed rows of 4,096 tokens, two a
step, and, beside, in their order into batches of eight that are padded to their longest. The limit is the ratio of
tokens: padding left out at no cost would make the step so many times as fast. Both ways find the same loss of all
documents, or nothing is recorded. The row goes to benchmarks/results/packing.json. Exits with 1 if the case failed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from cases import packing
from common import print_failed, print_table, require_gpu, run_cases


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, failed = run_cases("packing", {"packing": packing.rows}, "python benchmarks/packing.py")
    print_table(rows)
    print_failed(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
