"""Kinds of kernels and operations."""

import pytest
from synthetic import kernel, op

from gapless.kernels.runtime import triton
from gapless.profiling.kinds import KERNELS, kind_of, kind_of_ops


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_every_kernel_of_ours_has_a_kind():
    """Of what `jit` made, as tests/kernels/compile_check.py counts it, in a process that does not interpret."""
    import json
    import os
    import subprocess
    import sys
    from pathlib import Path

    script = Path(__file__).parents[1] / "kernels" / "compile_check.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, script, "--architectures", "90", "--cases", ""],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name.rpartition(".")[2] for name in json.loads(run.stdout.splitlines()[-1])["kernels"]}
    assert names == set(KERNELS)


def engine(name):
    return [op(f"autograd::engine::evaluate_function: {name}", 0, 10), op(name, 1, 9)]


@pytest.mark.parametrize(
    ("name", "ops", "kind"),
    [
        ("hopper_forward", [op("_Flash", 0, 9)], "attention forward"),
        ("hopper_backward", engine("_FlashBackward"), "attention backward"),
        ("_norm_backward", engine("_RMSNormBackward"), "norm"),
        ("_add_partials", engine("_RMSNormBackward"), "norm"),
        ("_add_partials", engine("_RotateQKVBackward"), "rope"),
        ("_update_kernel", [], "optimizer"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", [op("_LoraLinear", 0, 9), op("aten::addmm", 1, 8)], "matmul"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", [], "matmul"),  # in a CUDA graph
        ("sm90_xmma_gemm_bf16bf16", [op("_FusedLinearCrossEntropy", 0, 9), op("aten::mm", 1, 8)], "head and loss"),
        ("void cublasLt::splitKreduce_kernel<32>", engine("_LoraLinearBackward"), "matmul"),
        ("void at::native::elementwise_kernel<4>", [op("_LoraLinear", 0, 9), op("aten::copy_", 1, 8)], "copies"),
        ("void at::native::vectorized_gather_kernel<16>", [op("aten::embedding", 0, 9)], "other"),
        ("ncclDevKernel_AllReduce_Sum_bf16", [], "communication"),
    ],
)
def test_kernels(name, ops, kind):
    assert kind_of(kernel(1, 0, 5, name), ops) == kind


@pytest.mark.parametrize("kind", ["copy", "fill"])
def test_copies(kind):
    assert kind_of(kernel(1, 0, 5, "Memcpy HtoD (Pinned -> Device)", kind=kind), [op("aten::to", 0, 9)]) == "copies"


@pytest.mark.parametrize("kind", ["copy", "fill"])
def test_copies_and_fills_of_ours_are_what_they_are_for(kind):
    ops = [*engine("_FlashBackward"), op("aten::zero_", 2, 8)]
    assert kind_of(kernel(1, 0, 5, "Memset (Device)", kind=kind), ops) == "attention backward"
    assert kind_of(kernel(1, 0, 5, "Memset (Device)", kind=kind)) == "copies"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], "attention forward"),
        (["aten::_scaled_dot_product_flash_attention_for_cpu_backward"], "attention backward"),
        (["autograd::engine::evaluate_function: ScaledDotProductFlashAttentionBackward0"], "attention backward"),
        (["aten::linear", "aten::addmm", "aten::copy_"], "matmul"),
        (["_Dropout", "aten::mul"], "dropout"),
        (["aten::_foreach_norm"], "optimizer"),
        ([], "other"),
    ],
)
def test_operations(names, kind):
    assert kind_of_ops([op(name, 0, 9) for name in names]) == kind
