"""Limits: FLOPs and bytes from shapes, each against a count by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import kernel, op

from gapless.profiling.limits import Rates, attention_work, bound, kernel_bytes, op_bytes, op_flops, visible_pairs

BF16 = "c10::BFloat16"
RATES = Rates(matmul=1e12, copy=1e9, dtype=BF16)


def shaped(name, *shapes, dtype=BF16):
    return op(name, 0, 10, shapes=shapes, dtypes=(dtype,) * len(shapes))


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        (shaped("aten::mm", (3, 5), (5, 7)), 2 * 3 * 5 * 7),
        (shaped("aten::addmm", (7,), (3, 5), (5, 7), (), ()), 2 * 3 * 5 * 7),
        (shaped("aten::mm", (3, 5), (5, 7), (3, 7)), 2 * 3 * 5 * 7),  # with out=
        (shaped("aten::addmm_", (3, 7), (3, 5), (5, 7), (), ()), 2 * 3 * 5 * 7),
        (shaped("aten::addmm", (3, 7), (3, 5), (5, 7), (), ()), 2 * 3 * 5 * 7),
        (shaped("aten::bmm", (2, 3, 5), (2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (shaped("aten::baddbmm", (2, 3, 7), (2, 3, 5), (2, 5, 7), (), ()), 2 * 2 * 3 * 5 * 7),
        (shaped("aten::mul", (3, 5), (5, 7)), None),
        (op("aten::mm", 0, 10), None),  # shapes were not recorded
    ],
)
def test_flops_of_matmuls(operation, flops):
    assert op_flops(operation) == flops


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (op("aten::copy_", 0, 9, shapes=((4, 6), (4, 6), ()), dtypes=("float", BF16, "Scalar")), 24 * (4 + 2)),
        (op("aten::fill_", 0, 9, shapes=((4, 6), ()), dtypes=(BF16, "Scalar")), 48),
        (shaped("aten::add", (4, 6), (4, 6)), 3 * 48),
        (shaped("aten::add_", (4, 6), (6,)), 2 * 48 + 12),
        (shaped("aten::index_select", (4, 6), (), (3,)), None),
        (op("aten::copy_", 0, 9), 0),
    ],
)
def test_bytes_of_operations(operation, size):
    assert op_bytes(operation) == size


@pytest.mark.parametrize(
    ("name", "operation", "size"),
    [
        ("_norm_forward", shaped("_RMSNorm", (4, 6), (6,)), 2 * 48),
        ("_norm_backward", shaped("_RMSNormBackward", (4, 6)), 3 * 48),
        ("_gate_forward", shaped("_Gated", (4, 12)), 4 * (12 + 6) * 2),
        ("_gate_backward", shaped("_GatedBackward", (4, 6)), 4 * (6 + 12 + 12) * 2),
        ("_rotate_forward", shaped("_RotateQKV", (4, 2, 5, 8)), 4 * 2 * (4 + 4) * 8 * 2),
        ("_rotate_backward", shaped("_RotateQKVBackward", (4, 6, 8), (4, 2, 8), (4, 2, 8)), 4 * (10 + 10) * 8 * 2),
        ("_loss_kernel", shaped("_FusedLinearCrossEntropy", (4, 6), (9, 6)), None),
        ("_norm_forward", op("_RMSNorm", 0, 9), None),
        # Made again for the gradient of A, whose function has the gradient of the layer's output as its input.
        ("_norm_forward", shaped("_LoraLinearBackward", (4, 36)), None),
        ("_gate_forward", shaped("_LoraLinearBackward", (4, 6)), None),
    ],
)
def test_bytes_of_kernels(name, operation, size):
    assert kernel_bytes(name, operation) == size


@given(st.lists(st.integers(0, 12), max_size=4), st.none() | st.integers(1, 9))
def test_visible_pairs(lengths, window):
    seen = sum(
        key <= query and (window is None or key > query - window)
        for length in lengths
        for query, key in itertools.product(range(length), repeat=2)
    )
    assert visible_pairs(lengths, window) == seen


def test_attention_work():
    work = attention_work([(3, 2), (4,)], [None, 2], heads=6, head_dim=8, v_head_dim=4)
    pairs = (6 + 3) + (5 + 3) + 10 + 7  # full and window of each batch
    assert work.forward == pairs * 6 * (2 * 8 + 2 * 4)
    assert work.backward == pairs * 6 * (3 * 2 * 8 + 2 * 2 * 4)
    assert work.calls == 4


def test_kernels_of_one_matmul_share_its_limit():
    matmul = shaped("aten::mm", (1000, 1000), (1000, 1000))
    around = [shaped("_LoraLinear", (), (1000, 1000)), matmul]
    first, second = (bound(kernel(n, 0, 5, name), around, RATES) for n, name in ((1, "gemm"), (2, "splitKreduce")))
    assert first is not None
    assert first == second
    assert first.seconds == pytest.approx(2e9 / 1e12)


def test_no_limit_where_none_is_known():
    matmul = shaped("aten::mm", (10, 10), (10, 10), dtype="float")
    assert bound(kernel(1, 0, 5, "gemm"), [matmul], RATES) is None  # the rate is of another dtype
    assert bound(kernel(1, 0, 5, "gemm"), [], RATES) is None
    assert bound(kernel(1, 0, 5, "Memcpy HtoD (Pinned -> Device)", kind="copy", size=100), [], RATES) is None
    assert bound(kernel(1, 0, 5, "softmax"), [shaped("aten::softmax", (4, 4))], RATES) is None


def test_limits_of_bytes():
    inside = kernel(1, 0, 5, "Memcpy DtoD (Device -> Device)", kind="copy", size=1000)
    assert bound(inside, [], RATES).seconds == pytest.approx(2e-6)
    assert bound(kernel(1, 0, 5, "Memset (Device)", kind="fill", size=1000), [], RATES).seconds == pytest.approx(1e-6)
    norm = [shaped("_RMSNorm", (10, 50), (50,))]
    assert bound(kernel(1, 0, 5, "_norm_forward"), norm, RATES).seconds == pytest.approx(2e-6)
    project = [shaped("_LoraLinear", (), (10, 50), (), (16, 50))]
    assert bound(kernel(1, 0, 5, "_project_kernel"), project, RATES).seconds == pytest.approx(1e-6)
    assert bound(kernel(1, 0, 5, "_outer_kernel"), project, RATES) is None
