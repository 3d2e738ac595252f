"""What the Triton kernels share: when they run, for which chip, and how they are launched.

A public function asks `use_triton` once, in its forward, and keeps the answer for its backward: on a GPU of compute
capability 8.0 or more its kernel runs, elsewhere the reference. There is no autotuning: launchers choose tiles from
tables by `architecture`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # an installation for CPUs has no Triton; the references need none
    triton: Any = None
    tl: Any = None

OLDEST = 80
"""The first architecture with bf16 matrix units (Ampere)."""
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes a thread block may have, by architecture (CUDA C++ Programming Guide, table "Technical Specifications")."""

Path = Literal["triton", "reference"]


class Chip(NamedTuple):
    """What launchers ask of a GPU."""

    architecture: int
    """Compute capability as one number: 80, 86, 89, 90, 100, 120, ..."""
    multiprocessors: int
    cache_bytes: int
    """Of the L2 cache."""


_CPU = Chip(OLDEST, 3, 1 << 15)
"""A few of each for a CPU, where the interpreter runs one program after the other."""


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`triton.jit`, or the function as it is where there is no Triton to run it.

    Args:
        function: the kernel; without it a decorator is returned.
        do_not_specialize: its arguments that change from batch to batch. Triton compiles a kernel again when an integer
            or an address becomes divisible by 16, or is no longer, and when an integer becomes 1.
    """
    if function is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    return function if triton is None else triton.jit(do_not_specialize=do_not_specialize)(function)


def cdiv(a: int, b: int) -> int:
    """The quotient rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass
class _Forced:
    path: Path | None = None
    architecture: int | None = None
    captured: bool = False
    chip: Chip | None = None
    """Kernels are compiled for it and not launched."""


_forced = _Forced()


@contextmanager
def forced(path: Path, architecture: int | None = None) -> Generator[None]:
    """Have the public functions take one path whatever the device, while entered.

    To compare kernels with references on one GPU, to run kernels in Triton's interpreter on a CPU, and to compile them
    for other chips.

    Args:
        path: "triton" or "reference".
        architecture: to choose tiles for, as `architecture` gives it; by default that of the tensors' device.

    Raises:
        ValueError: another path.
    """
    if path not in get_args(Path):
        raise ValueError(f'path is {path!r}, not "triton" or "reference"')
    before = (_forced.path, _forced.architecture)
    _forced.path, _forced.architecture = path, architecture
    try:
        yield
    finally:
        _forced.path, _forced.architecture = before


@contextmanager
def compiled_only(chip: Chip) -> Generator[None]:
    """Have kernels compiled as a chip would launch them, and not launched, while entered.

    Tensors may be on the meta device. See `gapless.kernels.compiling`, which has the driver that Triton needs for it.
    """
    before = _forced.chip
    with forced("triton", chip.architecture):
        _forced.chip = chip
        try:
            yield
        finally:
            _forced.chip = before


def use_triton(x: torch.Tensor) -> bool:
    """Whether kernels run on x, rather than references."""
    return runs_kernels(x.device)


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device's tensors, rather than references."""
    if _forced.path is not None:
        return _forced.path == "triton"
    return device.type == "cuda" and triton is not None and architecture(device) >= OLDEST


def reference_note(device: torch.device) -> str | None:
    """Why a GPU runs the slow references, or None."""
    if device.type != "cuda" or runs_kernels(device):
        return None
    if triton is None:
        return "note: Triton is not installed, so plain PyTorch operations run, which are slow; pip install triton"
    if architecture(device) < OLDEST:
        name = torch.cuda.get_device_name(device)
        return f"note: kernels need compute capability 8.0; {name} has less, so plain PyTorch operations run"
    return None


def architecture(device: torch.device) -> int:
    """Compute capability of a GPU as one number: 80, 86, 89, 90, 100, 120, ...; `OLDEST` for a CPU."""
    if _forced.architecture is not None:
        return _forced.architecture
    return _properties(device).architecture


def family(device: torch.device) -> int:
    """The latest architecture of `SHARED_MEMORY` that is not later than the device's: the key of tables of tiles."""
    return max((known for known in SHARED_MEMORY if known <= architecture(device)), default=OLDEST)


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few for a CPU."""
    return _properties(device).multiprocessors


def cache_bytes(device: torch.device) -> int:
    """Bytes of a GPU's L2 cache; a few for a CPU."""
    return _properties(device).cache_bytes


def chip(device: torch.device) -> Chip:
    """All that launchers ask of a GPU."""
    return _properties(device)


def _properties(device: torch.device) -> Chip:
    if _forced.chip is not None:
        return _forced.chip
    if device.type != "cuda":
        return _CPU
    return _properties_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _properties_of(index: int) -> Chip:
    """To ask takes microseconds, and every launch does."""
    properties = torch.cuda.get_device_properties(index)
    architecture = 10 * properties.major + properties.minor
    return Chip(architecture, properties.multi_processor_count, properties.L2_cache_size)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, whose replays are for other batches and steps."""
    return _forced.captured or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


@contextmanager
def as_captured() -> Generator[None]:
    """Have everything launched as while a CUDA graph is captured, while entered: for any batch.

    A run before the capture then compiles, loads and allocates what the capture cannot.
    """
    before, _forced.captured = _forced.captured, True
    try:
        yield
    finally:
        _forced.captured = before


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **settings: Any) -> None:
    """Run a kernel on a device's current stream; nothing where the grid is empty.

    Args:
        kernel: made by `jit`.
        grid: programs along up to three axes.
        device: of the tensors; Triton alone would take the current one.
        args: of the kernel, in order.
        settings: its constexprs by name, num_warps, num_stages.

    Raises:
        ValueError: kernels are forced where they cannot run.
    """
    if 0 in grid:
        return
    if device.type != "cuda":
        _check_interpreted(kernel, device)
    # Triton 3.10 changes its default: a scaled score less its maximum needs the multiply-add that rounds once.
    settings["enable_fp_fusion"] = True
    if _forced.chip is not None:
        kernel.warmup(*args, grid=grid, **settings)
        return
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **settings)
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **settings)


def _check_interpreted(kernel: Any, device: torch.device) -> None:
    if triton is None:
        raise ValueError("kernels need Triton, which is not installed: pip install triton")
    # Those for another chip are compiled and do not run.
    if isinstance(kernel, triton.JITFunction) and _forced.architecture is None:
        raise ValueError(
            f"kernels on the device {device.type} run in Triton's interpreter only: set TRITON_INTERPRET=1 in the "
            "environment before gapless is imported"
        )


def empty_rows(x: torch.Tensor, columns: int, spare: int = 0) -> torch.Tensor:
    """Uninitialised [rows of x, columns] in x's dtype, each row followed by `spare` columns of scratch memory.

    `lora_linear` puts x A^T there, so that base and update are one GEMM over the longer rows.
    """
    return x.new_empty(x.shape[0], columns + spare)[:, :columns]


class Recipe(NamedTuple):
    """How a tensor is made again in a backward, bit for bit, from tensors that are kept in any case."""

    make: Callable[..., torch.Tensor]
    """Of `kept`, without autograd; it runs on the path that the forward has taken."""
    kept: tuple[torch.Tensor, ...]


def spare_columns(x: torch.Tensor) -> int:
    """Columns of scratch memory behind each row of [T, C], as `empty_rows` made them; 0 where there are none."""
    if x.ndim != 2 or x.stride(1) != 1 or x.shape[0] == 0:
        return 0
    end = x.storage_offset() + x.shape[0] * x.stride(0)
    return x.stride(0) - x.shape[1] if end * x.element_size() <= x.untyped_storage().nbytes() else 0


@jit
def tanh(x):
    """Within a few units in the last place, as the fast exponential alone would not be near 0."""
    size = tl.abs(x)
    z = x * x
    # Fit of (tanh(x) / x - 1) / x^2 on |x| < 0.6, in Chebyshev points; relative error of tanh 4e-10.
    near = 2.374711912125349e-3
    near = near * z - 8.413742296397686e-3
    near = near * z + 2.1789535880088806e-2
    near = near * z - 5.396172031760216e-2
    near = near * z + 1.3333313167095184e-1
    near = near * z - 3.333333432674408e-1
    near = x + x * z * near
    far = 1.0 - 2.0 / (1.0 + tl.exp2(size * 2.8853900817779268))  # 2 log2(e)
    return tl.where(size < 0.6, near, tl.where(x < 0.0, -far, far))
