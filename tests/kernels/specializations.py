"""Count how often kernels would be compiled for batches and layers of several kinds: a script, without an interpreter.

    python specializations.py [attention | hopper | lora]

Prints a line of JSON: of each kernel, the number of keys of Triton's cache. Nothing is compiled.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from triton import knobs
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[1]))

from gapless.batch import DropoutCounters, segments
from gapless.kernels import runtime
from gapless.kernels.attention import attention, attention_tiles
from gapless.kernels.dropout import dropout
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.kernels.runtime import empty_rows
from gapless.models.linear import Part
from kernels.compile_check import CompilingDriver


def of_attention() -> None:
    tiles = attention_tiles(16, 16, [None], torch.bfloat16, "cpu")
    for tokens, documents in ((64, 3), (57, 3), (63, 4), (1, 3), (48, 6)):
        stream = segments([tokens], max_documents=documents, tiles=tiles)
        q, k, v = (torch.zeros(tokens, 2, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out = attention(q, k, v, stream)
        assert isinstance(out, torch.Tensor)
        out.backward(out)


def of_lora() -> None:
    """With dropout, whose random numbers depend on the layer and on its first channel."""
    wide = WideWeight(torch.zeros(64, 48, dtype=torch.bfloat16), 16, [Part("down", 0, 0, 64)])
    a, b = torch.zeros(16, 48, requires_grad=True), torch.zeros(64, 16, requires_grad=True)
    for tokens, layer, site, first_channel in ((64, 0, 0, 0), (57, 0, 1, 4), (1, 3, 2, 64), (48, 16, 0, 8)):
        place = torch.zeros(tokens, dtype=torch.int32)
        drop = InputDropout(0.1, DropoutCounters(place.new_zeros(2), place, place), layer, site, first_channel)
        dropout(torch.zeros(tokens, 48), *drop)
        x = empty_rows(wide.rows.new_empty(tokens, 1), 48, wide.spare).requires_grad_()
        out = lora_linear(x, wide, a, [b], 1.0, dropout=drop, spare=wide.spare)
        out.backward(out)


def main() -> None:
    keys = defaultdict(set)

    def note(*, key, fn, **_) -> bool:
        keys[fn.name].add(key)
        return True  # which leaves out the compilation, and the launch

    knobs.runtime.jit_cache_hook = note
    operation, architecture = {
        "attention": (of_attention, 80),
        "hopper": (of_attention, 90),
        "lora": (of_lora, 90),
    }[(sys.argv[1:] or ["attention"])[0]]
    driver.set_active(CompilingDriver(architecture))
    with runtime.forced("triton", architecture):
        operation()
    print(json.dumps({name: len(found) for name, found in keys.items()}))


if __name__ == "__main__":
    main()
