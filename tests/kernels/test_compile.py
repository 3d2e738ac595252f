"""The kernels compile for chips that are not here, and take no more of them than there is.

`make test-full` runs this file with both Tritons that design.md names, each in an environment of its own.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from gapless.kernels.attention import hopper
from gapless.kernels.runtime import SHARED_MEMORY, triton
from kernels.compile_cases import CASES

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs Triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the other tests compile the kernels"),
]
ARCHITECTURES = (80, 86, 89, 90, 100, 120, 121)
QUICK_ARCHITECTURES = (86, 90)
QUICK_CASES = tuple({name.split(".")[0]: name for name in reversed(CASES)}.values())
"""What `make test` compiles: the first case of each operation."""

THREE = (
    "three consumers have 160 registers each: masked tiles, with Triton 3.9 alone but for packed heads; 8 with softcap"
)
GRADIENTS = "two gradients, scores and a part of dQ fill the registers; mostly addresses are stored, outside of loops"
HALVES = "gradients of 64 x 256 are half of all registers"
STACK: dict[str, tuple[int, str]] = {
    "skinny._project_kernel": (16, "on sm_100 and sm_120 with Triton 3.9: ptxas trades four registers for a block"),
    "attention.flash_forward.flash_forward": (72, "output, scores and weights fill the registers"),
    "flash.256 attention.flash_forward.flash_forward": (128, "the same, of 256 features"),
    "flash.fallback attention.flash_forward.flash_forward": (128, "the same, of 256 features"),
    "attention.hopper_forward.hopper_forward": (56, THREE),
    "flash.hopper-features-64 attention.hopper_forward.hopper_forward": (104, THREE),
    "flash.hopper-packed-features-64 attention.hopper_forward.hopper_forward": (80, THREE),
    "attention.hopper_backward.hopper_backward": (144, GRADIENTS),
    "flash.hopper-features-64 attention.hopper_backward.hopper_backward": (
        352,
        GRADIENTS + "; the softcap's slope, too",
    ),
    "flash.hopper-features-96 attention.hopper_backward.hopper_backward": (272, GRADIENTS + "; the slope, too"),
    "flash.hopper-softcap attention.hopper_backward.hopper_backward": (256, GRADIENTS + "; the slope, too"),
    "flash.features attention.hopper_backward.hopper_backward": (184, GRADIENTS + "; the slope, too"),
    "attention.hopper_sums.hopper_delta": (8, "with sinks and Triton 3.9 alone"),
    "attention.hopper_wide.hopper_wide_keys": (40, HALVES),
    "attention.hopper_wide.hopper_wide_queries": (136, HALVES),
    "flash.hopper-features-256 attention.hopper_wide.hopper_wide_queries": (224, HALVES + "; the slope, too"),
    "attention.flash_backward.flash_keys": (136, "two gradients and two products fill the registers"),
    "flash.64 attention.flash_backward.flash_keys": (160, "tiles of 64 x 64 without wgmma have operands there, too"),
    "attention.flash_backward.flash_delta": (24, "on sm_100 with Triton 3.6 alone"),
    "attention.flash_backward.flash_queries": (64, "without Hopper's matrix units operands are in registers, too"),
    "rope._rotate_forward": (8, "at 72 registers, on sm_120 with Triton 3.6: ptxas trades two for another block"),
    "rms_norm._norm_backward": (16, "rows and sums fill the registers; with Triton 3.9 alone, float32 or 32 warps"),
}
"""Bytes of stack that a kernel may have, in all cases or in one, and why; others none."""
WIDE = {"flash.hopper-256": (256, 256), "flash.hopper-256-192": (256, 192), "flash.hopper-192-256": (192, 256)}
"""Head dims of keys and values of the cases with the most shared memory."""
NO_WGMMA: dict[str, str] = {}
"""Kernels that multiply 16-bit tiles on Hopper without its asynchronous matrix units, and why."""
SERIAL: dict[str, str] = {}
"""Kernels with products that ptxas serialises on Hopper, and why that is so."""
SERIALISED = {"C7510", "C7511", "C7512", "C7513", "C7514"}
"""The notes of ptxas that say so: "wgmma.mma_async instructions are serialized due to ..."."""


def compile_cases(architectures, cases, cache):
    """The lines of compile_check.py: of each kernel, and the names of all kernels there are."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "compile_check.py", "--architectures", ",".join(map(str, architectures))]
    run = subprocess.run(
        [*command, "--cases", ",".join(cases)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    *lines, last = map(json.loads, run.stdout.splitlines())
    return lines, set(last["kernels"])


def family(architecture):
    return max(known for known in SHARED_MEMORY if known <= architecture)


def problems(line):
    """What is wrong with a kernel as it was compiled."""
    name, architecture = line["kernel"], line["architecture"]
    stack, _ = STACK.get(f"{line['case']} {name}") or STACK.get(name, (0, ""))
    if line["stack"] > stack:
        yield f"{line['stack']} bytes of stack, allowed {stack}"
    if line["shared"] > SHARED_MEMORY[family(architecture)]:
        yield f"{line['shared']} bytes of shared memory, there are {SHARED_MEMORY[family(architecture)]}"
    if architecture == 90 and line["mma"] and name not in NO_WGMMA:
        yield "mma.sync in place of wgmma"
    if SERIALISED & set(line["notes"]) and name not in SERIAL:
        yield f"notes of ptxas: {', '.join(line['notes'])}"
    if line["torn"]:
        yield f"a warp goes on in parts: branches at {', '.join(line['torn'])}"


def assert_sound(lines):
    found = [
        f"{line['case']} {line['kernel']} sm_{line['architecture']}: {problem}"
        for line in lines
        for problem in problems(line)
    ]
    assert not found, "\n".join(found)


def test_some_kernels_compile(tmp_path):
    lines, _ = compile_cases(QUICK_ARCHITECTURES, QUICK_CASES, tmp_path)
    assert {(line["case"], line["architecture"]) for line in lines} == {
        (case, architecture) for case in QUICK_CASES for architecture in QUICK_ARCHITECTURES
    }
    assert_sound(lines)


SNIPPET = """
        /*0010*/                   BSSY B0, {} ;          /* 0x0000000000007945 */
        /*0020*/               @P0 BRA 0x40 ;             /* 0x0000000000007945 */
        /*0030*/                   ATOMG.E.ADD.STRONG.GPU PT, R5, desc[UR56][R4.64], R7 ;
        /*0040*/                   BSYNC B0 ;
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR12+0x30210], R4 ;
        /*0060*/                   EXIT ;
"""


@pytest.mark.parametrize(("end", "found"), [("0x50", []), ("0x60", ["0x10"])])
def test_warps_that_go_on_in_parts_are_found(end, found):
    """A branch around an atomic that ends before the next barrier in memory, and one that ends after it."""
    from kernels.compile_check import torn

    assert torn(SNIPPET.format(end)) == found


@pytest.mark.slow
def test_all_kernels_compile_for_all_chips(tmp_path):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = pool.map(lambda chip: compile_cases([chip], CASES, tmp_path / str(chip)), ARCHITECTURES)
        lines, known = [], set()
        for some, kernels in runs:
            lines += some
            known |= kernels
    assert {line["kernel"] for line in lines} == known, "a kernel that no case launches, or one from elsewhere"
    for case, dims in WIDE.items():
        used = [line["shared"] for line in lines if line["case"] == case and "hopper_wide" in line["kernel"]]
        allowed = hopper._wide_bytes(*(sum(hopper.chunks(dim)) for dim in dims), hopper.back_tile(*dims))
        assert max(used) <= allowed <= SHARED_MEMORY[90], (case, used)
    assert_sound(lines)
