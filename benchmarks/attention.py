"""Attention beside torch's kernels, FlashAttention 3 and FlashAttention 4.

    python benchmarks/attention.py [--quick | --cases 'fwd-hd128-*,packed*'] [--peers fa2,fa4] [--fa3 LIBRARY] [--list]

Forward and backward, each alone, at 16k tokens (32k for documents of that length) and hidden size 2,048, in bf16, with
random values: all sides on the same ones, in turns, each checked against float32 in the same run, the host's launches
hidden. A causal mask halves the FLOPs, and a backward has 2.5 times the forward's. The limit is a matmul of 8,192^3,
which draws more power than smaller products: these may exceed it. One problem measured twice in a run differed by up
to 9 %.

`fa2` and `cudnn` are torch's own (fa2 takes values as wide as keys alone), `fa3` is the library `_vllm_fa3_C.abi3.so`
of vLLM's wheel, which has no backward, `fa4` the package flash-attn-4, `triton` our kernels for every GPU. Of documents
of one length ours get a packed stream, fa2, cudnn and fa4 a batch.

Peers that are not installed are skipped with a line. Rows go to benchmarks/results/attention.json; `vs-fa4` is made
from all that it has of this commit. Exits with 1 if a case failed; a bar that was missed is said in the table and is no
failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from cases import measure_rates
from cases.attention import CASES, QUICK, versus
from cases.attention_sides import PEERS, installed
from common import RESULTS, Row, chosen, commit, merge, print_failed, print_table, require_gpu, run_cases


def selected(patterns: str) -> list[str]:
    """The cases that fit one of the comma-separated patterns of a shell."""
    wanted = patterns.split(",")
    unknown = [pattern for pattern in wanted if not any(fnmatch(case, pattern) for case in CASES)]
    if unknown:
        sys.exit(f"error: no case is like {', '.join(map(repr, unknown))}; --list prints them")
    return [case for case in CASES if any(fnmatch(case, pattern) for pattern in wanted)]


def overall() -> list[Row]:
    """`vs-fa4` from the rows of this commit and device, this run's and those of earlier ones."""
    path = RESULTS / "attention.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    here = {"commit": commit(), "device": torch.cuda.get_device_name()}
    row = versus([record for record in kept if here.items() <= record.items()], "fa4")
    return [] if row is None else [row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help="the cases that have a bar")
    which.add_argument("--cases", help="patterns of names, separated by commas; all by default")
    parser.add_argument("--peers", default=",".join(PEERS), help="separated by commas; all by default")
    parser.add_argument("--fa3", type=Path, help="_vllm_fa3_C.abi3.so")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    options = parser.parse_args()
    names = selected(options.cases or "*") if not options.quick else QUICK
    if options.list:
        print("\n".join(names))
        return 0
    wanted = chosen(options.peers, PEERS, "peer")
    require_gpu()
    peers = installed(wanted, options.fa3)
    rates = measure_rates()
    part = " --quick" if options.quick else f" --cases '{options.cases}'" if options.cases else ""
    part += f" --peers {options.peers}" * (options.peers != ",".join(PEERS)) + " --fa3 LIBRARY" * bool(options.fa3)
    command = f"python benchmarks/attention.py{part}"
    rows, failed = run_cases("attention", {name: partial(CASES[name], rates, peers) for name in names}, command)
    rows += (total := overall())
    merge("attention", total, command)
    print_table(rows)
    print_failed(failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
