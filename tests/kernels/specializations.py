"""Count how often attention kernels would be compiled for batches of several sizes: a script, without an interpreter.

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

from gapless.batch import segments
from gapless.kernels import runtime
from gapless.kernels.attention import attention, attention_tiles
from kernels.compile_check import CompilingDriver


def main() -> None:
    keys = defaultdict(set)

    def note(*, key, fn, **_) -> bool:
        keys[fn.name].add(key)
        return True  # which leaves out the compilation, and the launch

    knobs.runtime.jit_cache_hook = note
    driver.set_active(CompilingDriver(90))
    with runtime.forced("triton", 90):
        tiles = attention_tiles(16, 16, [None], torch.bfloat16, "cpu")
        for tokens, documents in ((64, 3), (57, 3), (63, 4), (1, 3), (48, 6)):
            stream = segments([tokens], max_documents=documents, tiles=tiles)
            q, k, v = (torch.zeros(tokens, 2, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
            out = attention(q, k, v, stream)
            assert isinstance(out, torch.Tensor)
            out.backward(out)
    print(json.dumps({name: len(found) for name, found in keys.items()}))


if __name__ == "__main__":
    main()
