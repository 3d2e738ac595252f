"""What a kernel or an operation is for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from gapless.profiling.events import Activity, Op

Kind = Literal[
    "matmul",
    "attention forward",
    "attention backward",
    "norm",
    "rope",
    "activation",
    "lora",
    "dropout",
    "head and loss",
    "optimizer",
    "communication",
    "copies",
    "other",
]

KERNELS: dict[str, Kind] = {
    "_gate_forward": "activation",
    "_gate_backward": "activation",
    "_prepare_kernel": "optimizer",
    "_squares_kernel": "optimizer",
    "_update_kernel": "optimizer",
    "_update_8bit_kernel": "optimizer",
    "flash_forward": "attention forward",
    "hopper_forward": "attention forward",
    "flash_delta": "attention backward",
    "flash_keys": "attention backward",
    "flash_queries": "attention backward",
    "hopper_delta": "attention backward",
    "hopper_backward": "attention backward",
    "hopper_queries": "attention backward",
    "hopper_wide_keys": "attention backward",
    "hopper_wide_queries": "attention backward",
    "_loss_kernel": "head and loss",
    "_cut_loss_kernel": "head and loss",
    "_scale_kernel": "head and loss",
    "_statistics_kernel": "head and loss",
    "_dropout_kernel": "dropout",
    "_norm_forward": "norm",
    "_wide_norm_forward": "norm",
    "_norm_backward": "norm",
    "_add_partials": "norm",
    "_rotate_forward": "rope",
    "_rotate_backward": "rope",
    "_add_splits_kernel": "lora",
    "_outer_kernel": "lora",
    "_project_kernel": "lora",
    "_spread_kernel": "lora",
}
"""Our kernels, by the name that a GPU has for them."""

MATMULS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::baddbmm": 1,
    "aten::baddbmm_": 1,
}
"""Operations that are one matrix product, and the first of its two factors among their inputs."""
_FUNCTIONS: dict[str, Kind] = {
    "_LinearCrossEntropy": "head and loss",
    "_FusedLinearCrossEntropy": "head and loss",
    "_RMSNorm": "norm",
    "_RotateQKV": "rope",
    "_Gated": "activation",
    "_LoraUpdate": "lora",
    "_PlaceParts": "lora",
    "_Dropout": "dropout",
}
"""Autograd functions all of whose operations are of one kind, backward included."""
_ATTENTION = re.compile(r"_Flash|aten::_?scaled_dot_product_\w+|ScaledDotProduct\w+")
_OPTIMIZER = re.compile(r"aten::_fused_adamw_?|aten::_foreach_\w+")
_COPIES = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::clone", "aten::_to_copy", "aten::contiguous"}
_MATMUL_NAME = re.compile(r"gemm|gemv|cutlass|xmma|nvjet|cublas|splitk", re.IGNORECASE)
_COMMUNICATION = re.compile(r"nccl|c10d::|gloo:", re.IGNORECASE)
_BACKWARD = "Backward"


def kind_of(activity: Activity, ops: Sequence[Op] = ()) -> Kind:
    """What an activity of a GPU is for.

    Args:
        activity: a kernel, copy or fill.
        ops: the operations that its launch lies in, outermost first; there are none for those of a CUDA graph.
    """
    ours = KERNELS.get(activity.name)
    if ours is not None:
        # Sums of partial results are those of what they are called from: of a norm, or of the weights of rope's norms.
        return kind_of_ops(ops) if activity.name == "_add_partials" and ops else ours
    if _COMMUNICATION.search(activity.name):
        return "communication"
    kind = kind_of_ops(ops)
    if activity.kind != "kernel":
        # Room that is cleared for attention's sums, say, is attention's.
        return "copies" if kind in ("matmul", "other") else kind
    return "matmul" if kind == "other" and _MATMUL_NAME.search(activity.name) else kind


def kind_of_ops(ops: Sequence[Op]) -> Kind:
    """What an operation is for.

    Args:
        ops: those that it lies in, outermost first, itself last.
    """
    for op in ops:
        name = op.name.removeprefix("autograd::engine::evaluate_function: ")
        kind = _FUNCTIONS.get(name.removesuffix(_BACKWARD))
        if kind is not None:
            return kind
        if _ATTENTION.match(name):
            return "attention backward" if _is_backward(name) else "attention forward"
        if _OPTIMIZER.fullmatch(name):
            return "optimizer"
        if _COMMUNICATION.match(name):
            return "communication"
    innermost = next((op.name for op in reversed(ops) if not op.name.startswith("autograd::")), "")
    if any(op.name in MATMULS for op in ops):
        return "matmul"
    return "copies" if innermost in _COPIES else "other"


def _is_backward(name: str) -> bool:
    return name.rstrip("0123456789").endswith((_BACKWARD, "_backward")) or "_backward" in name
