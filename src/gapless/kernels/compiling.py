"""Compile the kernels that some work would launch, on many threads and without a GPU, into Triton's cache on disk.

The work is done on the meta device: it has shapes, strides and offsets, which are all that kernels are specialised for,
and takes neither memory nor time. Triton compiles outside of Python's lock but for a seventh of the time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from gapless.kernels.runtime import Chip, compiled_only, triton

_LIST = "kernels.json"


class Compiled(NamedTuple):
    """What became of the kernels."""

    files: list[tuple[str, str]]
    """Key and main file in Triton's cache of each kernel that is there."""
    fresh: int
    """Those among them that were not there before."""
    failed: list[str]
    """Why the others are not: an error's first line each."""


class _Driver:
    """Stands in for a GPU's driver, as far as compiling asks."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # whose kernels in memory are not those of another chip

    def get_current_stream(self, device: int) -> int:
        return 0


class _Threads(ThreadPoolExecutor):
    """Keeps what was submitted; `finish` is called with each kernel."""

    def __init__(self, threads: int, finish: Callable[[Any], object]) -> None:
        super().__init__(threads, thread_name_prefix="gapless-compile")
        self.submitted: list[Future[Any]] = []
        self._finish = finish

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted.append(super().submit(self._compile, fn))
        return self.submitted[-1]

    def _compile(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        self._finish(kernel)
        return kernel


def compile_kernels(work: Callable[[], object], chip: Chip, *, threads: int, launchers: bool = False) -> Compiled:
    """Compile what `work` launches. For a process of its own: Triton has no GPU in it from then on.

    Args:
        work: calls public functions on tensors of the meta device.
        chip: to compile for.
        threads: that compile.
        launchers: also build what is built of C beside the kernels, which takes the library of an NVIDIA driver.
    """
    hits: list[bool] = []
    triton.runtime.driver.set_active(_Driver(chip.architecture))
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    finish = _launcher_builder() if launchers else lambda _: None
    with (
        _Threads(threads, finish) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
        compiled_only(chip),
    ):
        work()
    errors = [error for future in executor.submitted if (error := future.exception()) is not None]
    kernels = [future.result() for future in executor.submitted if future.exception() is None]
    failed = [f"{type(error).__name__}: {str(error).partition(chr(10))[0]}" for error in errors]
    return Compiled([(kernel.hash, _main_file(kernel)) for kernel in kernels], hits.count(False), failed)


def _main_file(kernel: Any) -> str:
    return next(name for name in kernel.metadata_group if name.endswith(".json"))


def _launcher_builder() -> Callable[[Any], object]:
    """Builds the C code that launches a kernel: Triton 3.6 has a C compiler do that for each, 3.9 has one for all."""
    from triton.backends.nvidia import driver

    driver.CudaUtils()
    if not hasattr(driver, "make_launcher"):
        return lambda _: None
    return lambda kernel: driver.CudaLauncher(kernel.src, kernel.metadata)


# ---- what is known to be there ----


def remember(key: str, files: list[tuple[str, str]]) -> None:
    """Note in Triton's cache that the kernels of some work are in it; `key` is a sha256 of what they follow from."""
    triton.runtime.cache.get_cache_manager(key).put(json.dumps(files), _LIST, binary=False)


def remembered(key: str) -> bool:
    """Whether that was noted, and the kernels are still there."""
    caches = triton.runtime.cache
    listed = caches.get_cache_manager(key).get_file(_LIST)
    if listed is None:
        return False
    try:
        files = json.loads(Path(listed).read_text(encoding="utf-8"))
    except ValueError:  # cut short with the machine's power
        return False
    return all(caches.get_cache_manager(kernel).get_group(name) for kernel, name in files)
