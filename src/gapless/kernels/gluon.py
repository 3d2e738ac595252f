"""What the kernels for Hopper need of Gluon, Triton's explicit dialect, and whether the Triton that is here has it.

In Gluon a kernel itself commands the matrix units, the copy engine (TMA) and barriers in shared memory. It is
experimental, and its names move from release to release: all that differs between Triton 3.6 and 3.9 is in this file.
There is no interpreter of it, so where there is no Hopper GPU these kernels can be compiled, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from gapless.kernels.runtime import family, runs_kernels, triton

try:
    from triton._C.libtriton import ir
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9 has other names for the same copies, and refuses the old ones.
    tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    tma_store_wait = tma.store_wait
    if hasattr(tma, "async_atomic_add"):
        tma_add = tma.async_atomic_add
    else:
        _reductions = ir.DESCRIPTOR_REDUCE_KIND

        @builtin
        def tma_add(desc: Any, place: Any, source: Any, _semantic: Any = None) -> None:
            """Start to add a tile in shared memory to a tensor: Triton 3.6 has the operation, but no name for it."""
            place = _semantic._convert_to_ir_values(place, require_i64=False)
            _semantic.builder.create_async_tma_reduce(_reductions.ADD, desc.handle, place, source.handle)

    constexpr_function = gluon.constexpr_function
    _needed = (gl.warp_specialize, gl.inline_asm_elementwise, gl.NVMMADistributedLayout, gl.NVMMASharedLayout)
except (ImportError, AttributeError):  # there is no Triton, or one whose Gluon has moved on
    gluon: Any = None
    gl: Any = None
    fence_async_shared: Any = None
    mbarrier: Any = None
    tma_load: Any = None
    tma_store: Any = None
    tma_store_wait: Any = None
    tma_add: Any = None
    warpgroup_mma: Any = None
    warpgroup_mma_wait: Any = None
    TensorDescriptor: Any = None

    def constexpr_function(function: Callable[..., Any]) -> Any:
        """Stands in for Gluon's."""
        return function


def known(version: str) -> bool:
    """Whether kernels were tried with a version of Triton; names alone do not tell what they mean."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return (3, 6) <= (major, minor) <= (3, 9)


FITS = gluon is not None and known(triton.__version__)
"""Whether kernels in Gluon can be compiled."""
MOST_ROWS = 1 << 30
"""Rows that a ragged descriptor counts up to."""


def gluon_jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """`gluon.jit`, or the function as it is where there is no Gluon; as `runtime.jit` for Triton."""
    if function is None:
        return partial(gluon_jit, do_not_specialize=do_not_specialize)
    return gluon.jit(do_not_specialize=do_not_specialize)(function) if FITS else function


def constant(value: Any) -> Any:
    """A global that kernels may read."""
    return gl.constexpr(value) if FITS else value


def hopper_note(device: torch.device) -> str | None:
    """Why a Hopper GPU runs the kernels that are for every chip where it could run its own, or None."""
    if FITS or device.type != "cuda" or not runs_kernels(device) or family(device) != 90:
        return None
    return (
        f"note: Hopper's own attention kernels need the Gluon of Triton 3.6 to 3.9, which Triton {triton.__version__} "
        "lacks, so the kernels for every GPU run, which are slower"
    )


# ---- documents of a packed stream by TMA ----


def ragged_descriptor(x: torch.Tensor, rows: int, columns: int, heads: int = 1) -> Any:
    """Describe [T, heads, C] to TMA so that tiles [rows, heads, columns] end where a document does.

    Hardware bounds a copy by the tensor's sizes: what is beyond reads as zeros and is not written. The end of a
    document is none of them, but differs from copy to copy. So the token axis is given three times, to be used at
    (MOST_ROWS, end, MOST_ROWS - count + row), see `ragged_place`: the third, of size MOST_ROWS = 2^30, ends where
    row = count. What the places add up to too much, 2^30 times the token's stride, the first axis takes away again: its
    stride is 2^34 elements less one token's, and 2^30 times 2^34 elements of 2 or 4 bytes is 0 in addresses of 64 bits.

    (The idea: triton/tools/ragged_tma.py, which spends two axes on it.) Strides stay below TMA's 2^40 bytes.

    Args:
        x: of 16 or 32 bits, whose memory satisfies `is_aligned`; fewer than 2^30 tokens.
        rows: tokens of a tile, at most 256.
        columns: likewise; beyond C there are zeros.
        heads: of a tile, likewise.
    """
    if not x.shape[0]:
        x = x.new_zeros(1, *x.shape[1:])  # never read: TMA wants an address
    token, head, _ = x.stride()
    block = (1, 1, rows, heads, columns)
    sizes = [_UNBOUNDED, _UNBOUNDED, MOST_ROWS, x.shape[1], x.shape[2]]
    return TensorDescriptor(x, sizes, [2**34 - token, token, token, head, 1], list(block), _layout(block, x.dtype))


def plain_descriptor(x: torch.Tensor, block: tuple[int, int]) -> Any:
    """Describe a dense [R, C] of float32 to TMA, for tiles of one row, laid out as they are, or of several."""
    layout = _flat_layout() if block[0] == 1 else _layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


_UNBOUNDED = 0x7FFF0000
"""Size of an axis that bounds nothing: an int32."""


@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Of a tile in shared memory; to ask takes 5 microseconds, and every launch does for each of its tensors."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)


@cache
def _flat_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether TMA can read [T, heads, C] as it lies: dense columns, and all else multiples of 16 bytes."""
    token, head, column = (stride * x.element_size() for stride in x.stride())
    steps = token > 0 and head > 0 and token % 16 == 0 and head % 16 == 0
    return column == x.element_size() and steps and x.data_ptr() % 16 == 0


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The same [T, heads, C], copied if it is not `is_aligned`; C is a multiple of 16 bytes."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


_WRAP = constant(MOST_ROWS)


@gluon_jit
def ragged_place(start, count, row, head, column):
    """Place in a ragged descriptor of a row of the document at `start`; rows from `count` on do not exist."""
    return (_WRAP, start + count, _WRAP - count + row, head, column)


# ---- what Gluon lacks ----


@constexpr_function
def _barrier_text(action: Any, index: Any, threads: Any) -> Any:
    return f"bar.{action} {index}, {threads}; mov.u32 $0, $1;"


@gluon_jit
def _barrier(ACTION: gl.constexpr, INDEX: gl.constexpr, THREADS: gl.constexpr):
    # Once a thread of the four warps that run this: an operation on a tensor with one element each.
    thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    text: gl.constexpr = _barrier_text(ACTION, INDEX, THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)  # pyrefly: ignore


@gluon_jit
def named_barrier_wait(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Wait at a hardware barrier until THREADS threads have come to it; INDEX from 9, the first are Triton's."""
    _barrier("sync", INDEX, THREADS)


@gluon_jit
def named_barrier_arrive(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Come to a hardware barrier and go on."""
    _barrier("arrive", INDEX, THREADS)


@gluon_jit
def wait_for_value(pointer, value):
    """Wait until an int32 in global memory is `value`; then TMA may follow. For a partition of one warp.

    Pointer and value are the same in all threads: else the warp went on in parts, and each would start what follows.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(  # pyrefly: ignore
        """{
        .reg .pred other;
        .reg .b32 found;
        again:
        ld.acquire.gpu.global.b32 found, [$1];
        setp.ne.s32 other, found, $2;
        @other bra.uni again;
        fence.proxy.async;
        mov.u32 $0, found;
        }""",
        "=r,l,r",
        [pointer + lane * 0, lane * 0 + value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def release_after_tma(pointer, value):
    """Make an int32 in global memory `value` when all that this warp has written by TMA is there, too."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(  # pyrefly: ignore
        """{
        .reg .pred first;
        cp.async.bulk.wait_group 0;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        setp.eq.s32 first, $3, 0;
        @first st.release.gpu.global.b32 [$1], $2;
        mov.u32 $0, $2;
        }""",
        "=r,l,r,r",
        [pointer + lane * 0, lane * 0 + value, lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
