"""Compile the kernels for chips that are not here: a script, run without TRITON_INTERPRET, without a GPU.

    python tests/kernels/compile_check.py --architectures 80,90 --cases rms_norm

calls the public functions of `compile_cases` on small CPU tensors, with a driver that compiles what is launched and
launches nothing, and prints a line of JSON for every kernel that was compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

from gapless.kernels import runtime
from kernels.compile_cases import CASES

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompilingDriver:
    """Stands in for a GPU's driver: the target, and a device of its own for each, so that caches are apart."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return self.architecture

    def get_current_stream(self, device):
        return 0


class Compiled(list):
    """Collects the kernels of launches while entered."""

    def __enter__(self):
        self._run = JITFunction.run

        def run(function, *args, grid, warmup, **settings):
            kernel = self._run(function, *args, grid=grid, warmup=True, **settings)
            if not any(kernel is known for _, known in self):
                self.append((function.fn.__name__, kernel))

        JITFunction.run = run
        return self

    def __exit__(self, *error):
        JITFunction.run = self._run


def resources(kernel) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack (spills and arrays that are not in registers)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--architectures", default="80,86,89,90,100,120,121")
    parser.add_argument("--cases", default=",".join(CASES), help="all by default")
    options = parser.parse_args()
    for architecture in map(int, options.architectures.split(",")):
        driver.set_active(CompilingDriver(architecture))
        for case in options.cases.split(","):
            with runtime.forced("triton", architecture), Compiled() as compiled:
                torch.manual_seed(0)
                CASES[case]()
            for name, kernel in compiled:
                found = {"case": case, "kernel": name, "architecture": architecture}
                found |= {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, **resources(kernel)}
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
