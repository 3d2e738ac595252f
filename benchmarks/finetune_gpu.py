"""Training on one GPU beside its peers: tokens/s and memory of whole steps, and how busy the GPU is.

    python benchmarks/finetune_gpu.py [--cases lora-8b,full-1b] [--peers hf-liger,unsloth] [--work FOLDER] [--list]

Ours is a run of the trainer with its loader, random weights in the shape of a known model, and documents of other
lengths in every timed step; its peers, transformers with PEFT, the same with Liger's kernels, and Unsloth, train the
same documents from the same weights and adapters (transformers' in bf16, ours in float32 with copies in bf16). Each
side is a process of its own; they take turns, so far as they fit on the card together. Losses and gradient norms of the
first steps are compared: a case in which no peer agrees with ours is not recorded, a peer that does not is left out, as
is one that is not installed. Rows go to benchmarks/results/finetune_gpu.json. Exits with 1 if a case failed; a bar that
was missed is said in the table and is no failure.

Models and logs of the sides are in the work folder, a temporary one by default: an 8B model takes 16 GB there. It is
written once for all cases, and for later runs with the same --work.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from cases import measure_rates
from cases.finetune import NAMES, PEERS, cases
from cases.finetune_plan import Plan
from cases.finetune_worker import PACKAGES, Lines, work
from common import chosen, print_failed, print_table, require_gpu, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names, separated by commas; all by default")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}, separated by commas; each case's own by default")
    parser.add_argument("--work", type=Path, help="folder for models, data and logs; a temporary one by default")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    parser.add_argument("--side", nargs=2, metavar=("NAME", "PLAN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Peers look for packages of the names of files here.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.side:
        name, plan = options.side
        if name not in PACKAGES:
            sys.exit(f"error: no side is {name}; there are {', '.join(PACKAGES)}")
        work(name, Plan.read(plan), Lines())
        return 0
    names = chosen(options.cases, NAMES, "case") or list(NAMES)
    if options.list:
        print("\n".join(names))
        return 0
    peers = chosen(options.peers, PEERS, "peer") or None
    require_gpu()
    with ExitStack() as stack:
        folder = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        rates = measure_rates()
        given = [f" --{key} {value}" for key in ("cases", "peers") if (value := getattr(options, key))]
        command = f"python benchmarks/finetune_gpu.py{''.join(given)}"
        functions = {name: partial(case, rates) for name, case in cases(folder, names, peers).items()}
        rows, failed = run_cases("finetune_gpu", functions, command)
    print_table(rows)
    print_failed(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
