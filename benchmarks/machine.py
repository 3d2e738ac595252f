"""Smoke test of a GPU machine: versions, signatures this code relies on, graphs, rates.

    python benchmarks/machine.py

Run it first on a machine that is new; its output goes to docs/log.md. Takes under a minute.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import subprocess
import time

import torch
import triton
import triton.language as tl
from common import medians, random_like, versions

SIGNATURES = {
    "torch.distributed.fsdp": ("fully_shard", "MixedPrecisionPolicy", "OffloadPolicy", "DataParallelMeshDims"),
    "torch.distributed.fsdp.FSDPModule": (
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        "set_requires_gradient_sync",
        "set_reshard_after_backward",
        "set_is_last_backward",
    ),
    "torch.distributed.pipelining": ("PipelineStage", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleGPipe"),
    "torch.distributed.pipelining.schedules": ("ScheduleZBVZeroBubble", "ScheduleInterleavedZeroBubble"),
    "torch.distributed": ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single"),
    "torch.nn.utils": ("clip_grad_norm_",),
}
_LANGUAGE = "triton.experimental.gluon.language"
GLUON = {
    "triton.experimental.gluon": "jit language nvidia",
    "triton.experimental.gluon.nvidia.hopper": "TensorDescriptor",
    _LANGUAGE: (
        "NVMMADistributedLayout NVMMASharedLayout DotOperandLayout SliceLayout BlockedLayout DistributedLinearLayout "
        "allocate_shared_memory convert_layout warp_specialize inline_asm_elementwise thread_barrier num_warps"
    ),
    f"{_LANGUAGE}.nvidia.hopper": "tma mbarrier warpgroup_mma warpgroup_mma_wait fence_async_shared",
    f"{_LANGUAGE}.nvidia.hopper.tma": (
        "async_copy_global_to_shared async_copy_shared_to_global async_load async_store store_wait "
        "make_tensor_descriptor async_atomic_add"
    ),
    f"{_LANGUAGE}.nvidia.hopper.mbarrier": "MBarrierLayout init expect wait arrive invalidate",
}
PINNED_GIB, PINNED_SECONDS = 64, 15.0


@triton.jit
def _add_one(x, size, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + index, mask=index < size)
    tl.store(x + index, value + 1, mask=index < size)


def find(path: str) -> object:
    """A module, or a class in one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def show_signatures() -> None:
    for path, names in SIGNATURES.items():
        holder = find(path)
        for name in names:
            there = getattr(holder, name, None)
            print(f"  {name}{': missing' if there is None else parameters(there)}")


def parameters(function: object) -> str:
    """The signature without types."""
    signature = inspect.signature(function)
    plain = [value.replace(annotation=value.empty) for name, value in signature.parameters.items() if name != "self"]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))[:300]


def show_gluon() -> None:
    for path, names in GLUON.items():
        try:
            holder = find(path)
        except ImportError as error:
            print(f"gluon: {path}: {error}")
            continue
        missing = [name for name in names.split() if not hasattr(holder, name)]
        state = f"missing {', '.join(missing)}" if missing else "ok"
        print(f"gluon: {path.removeprefix('triton.experimental.')}: {state}")


def show_graph() -> None:
    """A product and a Triton kernel, captured and replayed, give what they give eagerly."""
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, b, out=out)
        _add_one[(4,)](out, out.numel(), block=1024)

    work()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    same = torch.equal(out, expected)
    replay = medians({"replay": graph.replay})["replay"]
    bits = "same bits" if same else "WRONG"
    print(f"CUDA graph of a matmul and a Triton kernel: {bits}, {replay * 1e3:.1f} us a replay")
    assert same


def host_microseconds(work, count: int = 2000) -> float:
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        work()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / count * 1e6


def show_rates() -> None:
    source = random_like(1 << 31, dtype=torch.uint8)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = medians({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, warmup=50, rep=300)
    print(f"copy of 2 GiB, read + written: {2 * source.numel() / times['copy'] / 1e6:.0f} GB/s")
    print(f"bf16 matmul 8192^3 on random data: {2 * 8192**3 / times['matmul'] / 1e9:.0f} TFLOP/s")
    x = torch.zeros(1024, device="cuda")
    print(f"host time of one eager launch: {host_microseconds(lambda: x.add_(1)):.1f} us")
    triton_launch = host_microseconds(lambda: _add_one[(1,)](x, 1024, block=1024))
    print(f"host time of one Triton launch: {triton_launch:.1f} us")
    print(f"item(): {host_microseconds(lambda: x[0].item(), 500):.1f} us")


def show_pinned() -> None:
    limit = subprocess.run(["bash", "-c", "ulimit -l"], capture_output=True, text=True, check=True).stdout.strip()
    blocks: list[torch.Tensor] = []
    start, end = time.perf_counter(), "all that was asked for"
    while len(blocks) < PINNED_GIB:
        if time.perf_counter() - start > PINNED_SECONDS:
            end = "stopped for time, no failure"
            break
        try:
            blocks.append(torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            end = str(error).splitlines()[0]
            break
    spent = time.perf_counter() - start
    print(f"pinned memory: {len(blocks)} GiB in blocks of 1 GiB in {spent:.1f} s ({end}); ulimit -l: {limit}")


def main() -> None:
    start = time.perf_counter()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    print(f"kernel {platform.release()}; {gpu.replace(chr(10), '; ')}; Python {platform.python_version()}")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    properties = torch.cuda.get_device_properties(0)
    print(
        f"capability {properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors, L2 "
        f"{properties.L2_cache_size >> 20} MiB, {properties.total_memory / 2**30:.1f} GiB"
    )
    show_signatures()
    show_gluon()
    show_graph()
    show_rates()
    show_pinned()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
