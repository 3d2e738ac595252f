"""The least time that work can take at the rates of the machine; none where it is not known.

A matmul is limited by its FLOPs over the rate of a large matmul; what only moves data by its bytes over the rate of a
large copy (bytes read and written, each once); attention by the FLOPs of the keys that each query sees. Both rates are
measured where the run is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from gapless.profiling.events import Activity, Op
from gapless.profiling.kinds import MATMULS

_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
"""Bytes of an element, by the names that traces have for dtypes."""
_FUNCTIONS = {
    "_norm_forward": "_RMSNorm",
    "_wide_norm_forward": "_RMSNorm",
    "_norm_backward": "_RMSNorm",
    "_gate_forward": "_Gated",
    "_gate_backward": "_Gated",
    "_rotate_forward": "_RotateQKV",
    "_rotate_backward": "_RotateQKV",
    "_dropout_kernel": "_Dropout",
}
"""Our kernels whose bytes follow from the inputs of an autograd function, and that function."""
TRACE_NAMES = {torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half", torch.float32: "float"}
_MATMUL_SIZE, _COPY_BYTES, _SECONDS = 8192, 2**29, 0.2


@dataclass(frozen=True)
class Rates:
    """What the machine does at best, measured."""

    matmul: float
    """FLOP/s of a large matmul in the model's dtype."""
    copy: float
    """Bytes/s read and written by a large copy."""
    dtype: str
    """The model's, as traces name it: matmuls of another have no limit here."""


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of a GPU; takes about half a second and a GiB, which is given back."""
    free = torch.cuda.mem_get_info(device)[0]
    size, count = _MATMUL_SIZE, _COPY_BYTES
    while size > 1024 and 3 * size**2 * dtype.itemsize + 2 * count > free // 2:
        size, count = size // 2, count // 4
    rates = Rates(_matmul_rate(size, device, dtype), _copy_rate(count, device), TRACE_NAMES[dtype])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return rates


def _matmul_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out))


def _copy_rate(count: int, device: torch.device) -> float:
    source = torch.zeros(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * count / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """Median seconds of some work on a GPU."""
    times: list[float] = []
    work()
    end = time.perf_counter() + _SECONDS
    while len(times) < 5 or time.perf_counter() < end:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return sorted(times)[len(times) // 2]


def op_flops(op: Op) -> int | None:
    """FLOPs of a matmul, from the shapes of its inputs; None for another operation."""
    first = MATMULS.get(op.name)
    if first is None or len(op.shapes) < first + 2:
        return None
    a, b = op.shapes[first : first + 2]
    return 2 * math.prod(a) * b[-1] if a and b else None


def op_bytes(op: Op) -> int | None:
    """Bytes that an operation of torch reads and writes at least; None where its result's size is not known."""
    sizes = _input_bytes(op)
    if op.name in ("aten::fill_", "aten::zero_"):
        return sizes[0] if sizes else None
    if op.name == "aten::copy_":
        return sum(sizes[:2])
    if op.name in ("aten::add_", "aten::mul_"):
        return 2 * sizes[0] + sum(sizes[1:2])
    if op.name in ("aten::add", "aten::mul") and len(sizes) > 1:
        return sum(sizes[:2]) + max(sizes[:2])
    return None


def kernel_bytes(name: str, op: Op) -> int | None:
    """Bytes that a kernel of ours reads and writes at least.

    Args:
        name: the kernel's.
        op: the autograd function that launched it, forward or backward, whose inputs tell the sizes.
    """
    sizes = _input_bytes(op)
    # What a layer makes again of its input is launched by another function, whose inputs are not those of the kernel.
    if not sizes or not sizes[0] or op.name.removesuffix("Backward") != _FUNCTIONS.get(name):
        return None
    first = sizes[0]
    if name in ("_norm_forward", "_wide_norm_forward"):
        return 2 * first
    if name == "_norm_backward":  # gradient and input, and the input's gradient
        return 3 * first
    if name == "_gate_forward":  # [T, 2F] -> [T, F]
        return first + first // 2
    if name == "_gate_backward":  # gradient [T, F], and the input [T, 2F] and its gradient
        return 5 * first
    if name == "_rotate_forward":  # [T, K, G + 2, D]: queries and keys, not the values
        parts = op.shapes[0][2]
        return 2 * first * (parts - 1) // parts
    if name == "_rotate_backward":
        return 2 * sum(sizes[:3])
    return 2 * first  # of dropout


def _input_bytes(op: Op) -> list[int]:
    """Of each input, 0 for what is no tensor of a known dtype."""
    pairs = zip(op.shapes, op.dtypes, strict=False)
    return [math.prod(shape) * _BYTES.get(dtype, 0) if shape else 0 for shape, dtype in pairs]


def project_bytes(op: Op) -> int | None:
    """The same of `_project_kernel`: the rows it reads, which are the first matrix."""
    return next((size for size, shape in zip(_input_bytes(op), op.shapes, strict=False) if len(shape) == 2), None)


@dataclass(frozen=True)
class Bound:
    """A limit, and the work that it is of."""

    work: int
    """An identity: kernels of the same work share the limit."""
    seconds: float


def bound(activity: Activity, ops: Sequence[Op], rates: Rates) -> Bound | None:
    """The limit of a kernel, or of the operation that it is a part of.

    Args:
        activity: what ran.
        ops: the operations that its launch lies in, outermost first.
        rates: of the machine.
    """
    if activity.kind == "fill" and activity.bytes:
        return Bound(id(activity), activity.bytes / rates.copy)
    if activity.kind == "copy":
        inside = "Device -> Device" in activity.name  # the others are limited by the bus, whose rate is not measured
        return Bound(id(activity), 2 * activity.bytes / rates.copy) if inside and activity.bytes else None
    if not ops:
        return None
    for op in reversed(ops):
        flops = op_flops(op)
        if flops is not None:
            return Bound(id(op), flops / rates.matmul) if rates.dtype in op.dtypes else None
    function = next((op for op in reversed(ops) if not op.name.startswith("aten::")), ops[-1])
    size = project_bytes(function) if activity.name == "_project_kernel" else kernel_bytes(activity.name, function)
    if size:
        return Bound(id(activity), size / rates.copy)
    size = op_bytes(ops[-1])
    return Bound(id(ops[-1]), size / rates.copy) if size else None


def visible_pairs(lengths: Iterable[int], window: int | None) -> int:
    """Pairs of a query and a key that it sees, in causal attention of documents with themselves."""
    total = 0
    for length in lengths:
        seen = length if window is None else min(window, length)
        total += seen * (seen + 1) // 2 + (length - seen) * seen
    return total


@dataclass(frozen=True)
class AttentionWork:
    """The attention of some micro-batches."""

    forward: int
    """FLOPs of one forward of all layers: the products with keys and with values."""
    backward: int
    """FLOPs of the backward, which has five products: both again, and the gradients of queries, keys and values."""
    calls: int
    """Layers times micro-batches."""


def attention_work(
    batches: Iterable[Sequence[int]], windows: Iterable[int | None], heads: int, head_dim: int, v_head_dim: int
) -> AttentionWork:
    """The FLOPs of micro-batches, by the lengths of their documents.

    Args:
        batches: lengths of the documents of each micro-batch.
        windows: of each layer; None for one that sees all earlier tokens.
        heads: of queries.
        head_dim: of queries and keys.
        v_head_dim: of values.
    """
    windows, batches = list(windows), list(batches)
    pairs = sum(visible_pairs(lengths, window) for lengths in batches for window in windows)
    forward = 2 * pairs * heads * (head_dim + v_head_dim)
    backward = 2 * pairs * heads * (3 * head_dim + 2 * v_head_dim)
    return AttentionWork(forward, backward, len(windows) * len(batches))
