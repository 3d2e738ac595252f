"""Compile the kernels for chips that are not here: a script, run without TRITON_INTERPRET, without a GPU.

    python tests/kernels/compile_check.py --architectures 80,90 --cases rms_norm

calls the public functions of `compile_cases` on small CPU tensors, with a driver that compiles what is launched and
launches nothing, and prints a line of JSON for every kernel that was compiled, with what it takes of the chip and how
often its code has some instructions. The last line names all kernels that there are, compiled or not. What comes out of
Triton's cache has no notes of ptxas: give it an empty TRITON_CACHE_DIR where they matter.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1]))

import gapless.kernels
from gapless.kernels import runtime
from kernels.compile_cases import CASES

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "tcgen05": "tcgen05.mma",
    "mma": "mma.sync",
    "async_copies": "cp.async.c",
    "wide_loads": r"ld.global[.\w:]*.v4",
    "wide_stores": r"st.global[.\w:]*.v4",
}
"""Patterns in the PTX that are counted, by their key in the output."""


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
    """Collects the kernels of launches while entered, as (function, kernel, log of ptxas)."""

    def __enter__(self):
        self._run = JITFunction.run

        def run(function, *args, grid, warmup, **settings):
            with contextlib.redirect_stdout(io.StringIO()) as log:
                kernel = self._run(function, *args, grid=grid, warmup=True, **settings)
            if not any(kernel is known for _, known, _ in self):
                self.append((function, kernel, log.getvalue()))

        JITFunction.run = run
        return self

    def __exit__(self, *error):
        JITFunction.run = self._run


def dump(kernel, what: str) -> str:
    """Text that cuobjdump has of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [_TOOLS / "cuobjdump", what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack (spills and arrays that are not in registers)."""
    text = dump(kernel, "--dump-resource-usage")
    return {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


def torn(sass: str) -> list[str]:
    """Branches around an atomic, by their address, that end only after barriers in memory: a warp goes on in parts.

    Of `@first atom` before a loop ptxas 12.8 made one that ended behind the loop, and the kernel never ended.
    """
    lines = [(int(address, 16), text) for address, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(\S[^;]*);", sass)]
    found = []
    for place, (address, text) in enumerate(lines):
        if branch := re.match(r"BSSY\S* \S+, 0x([0-9a-f]+)", text):
            inside = [line for at, line in lines[place:] if at < int(branch[1], 16)]
            atomic = next((index for index, line in enumerate(inside) if "ATOMG" in line), len(inside))
            if any("SYNCS" in line for line in inside[atomic:]):
                found.append(hex(address))
    return found


def describe(function: JITFunction, kernel, log: str) -> dict[str, object]:
    """What is printed of a kernel."""
    ptx = kernel.asm["ptx"]
    found = {"kernel": full_name(function), "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    found |= resources(kernel)
    found |= {key: len(re.findall(pattern, ptx)) for key, pattern in _INSTRUCTIONS.items()}
    by_warps = "setmaxnreg" in ptx and "atom.global" in ptx
    found["torn"] = []
    if by_warps:
        sass = dump(kernel, "--dump-sass")
        assert re.search(r"ATOMG.*SYNCS", sass, re.DOTALL), "other instructions than `torn` knows"
        found["torn"] = torn(sass)
    return found | {"notes": sorted(set(re.findall(r"C75\d\d", log)))}


def full_name(function: JITFunction) -> str:
    return f"{function.fn.__module__.removeprefix('gapless.kernels.')}.{function.fn.__name__}"


def launchable() -> set[str]:
    """The kernels in gapless.kernels: what `jit` made and no other such function refers to."""
    functions: dict[int, JITFunction] = {}
    for module in pkgutil.walk_packages(gapless.kernels.__path__, "gapless.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.name:
                functions[id(value)] = value
    helpers = {id(used) for function in functions.values() for used in references(function)}
    return {full_name(function) for key, function in functions.items() if key not in helpers}


def references(function: JITFunction) -> list[object]:
    """What the names in a function's body stand for outside of it, `module.name` included."""
    scope, found = function.fn.__globals__, []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
        if isinstance(node, ast.Name) and node.id != function.fn.__name__:
            found.append(scope.get(node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append(getattr(scope.get(node.value.id), node.attr, None))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--architectures", default="80,86,89,90,100,120,121")
    parser.add_argument("--cases", default=",".join(CASES), help="all by default")
    options = parser.parse_args()
    knobs.nvidia.dump_ptxas_log = True
    for architecture in map(int, options.architectures.split(",")):
        driver.set_active(CompilingDriver(architecture))
        for case in filter(None, options.cases.split(",")):
            with runtime.forced("triton", architecture), Compiled() as compiled:
                torch.manual_seed(0)
                CASES[case]()
            for function, kernel, log in compiled:
                found = {"case": case, "architecture": architecture, **describe(function, kernel, log)}
                print(json.dumps(found), flush=True)
    print(json.dumps({"kernels": sorted(launchable())}))


if __name__ == "__main__":
    main()
