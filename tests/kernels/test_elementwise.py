"""RMS norm and SwiGLU against float64, values and gradients."""

import pytest
import torch
from torch.nn import functional

from gapless.kernels.activation import swiglu
from gapless.kernels.rms_norm import rms_norm

SHAPES = [(1, 2), (7, 33), (5, 3, 4, 18), (0, 16)]


def grads_of(function, *inputs, weight):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(weight.to(out.dtype))
    return out, [leaf.grad for leaf in leaves]


def check(function, oracle, *inputs):
    """Float32 close to float64; bf16 at most twice as far off as the oracle computed in bf16."""
    torch.manual_seed(1)
    doubles = [x.double() for x in inputs]
    weight = torch.randn(oracle(*doubles).shape, dtype=torch.float64)
    exact, exact_grads = grads_of(oracle, *doubles, weight=weight)
    out, grads = grads_of(function, *inputs, weight=weight)
    for ours, theirs in zip([out, *grads], [exact, *exact_grads], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    halves = [x.bfloat16() for x in inputs]
    exact, exact_grads = grads_of(oracle, *[x.double() for x in halves], weight=weight)
    out, grads = grads_of(function, *halves, weight=weight)
    eager, eager_grads = grads_of(oracle, *halves, weight=weight)
    for ours, theirs, truth in zip([out, *grads], [eager, *eager_grads], [exact, *exact_grads], strict=True):
        assert ours.dtype == torch.bfloat16
        error, budget = ((x.double() - truth).square().sum().sqrt() for x in (ours, theirs))
        assert error <= 2 * budget + 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape):
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(shape), 1 + torch.randn(shape[-1])
    check(
        lambda x, w: rms_norm(x, w, 1e-2),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-2).rsqrt() * w,
        x,
        weight,
    )


def test_rms_norm_of_extreme_rows():
    x = torch.tensor([[0.0] * 4, [1e-25] * 4, [1e18] * 4])
    out = rms_norm(x, torch.ones(4), 1e-6)
    torch.testing.assert_close(out, torch.tensor([[0.0] * 4, [1e-22] * 4, [1.0] * 4]))


def test_rms_norm_of_strided_input():
    x = torch.randn(5, 3, 6, 8)[:, :, 1:4]
    torch.testing.assert_close(rms_norm(x, torch.ones(8), 1e-6), rms_norm(x.contiguous(), torch.ones(8), 1e-6))


@pytest.mark.parametrize("shape", [(1, 2), (7, 34), (0, 16), (515, 6)])
def test_swiglu(shape):
    torch.manual_seed(0)

    def oracle(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    check(swiglu, oracle, 4 * torch.randn(shape))
    extreme = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 3.0, 5.0]], requires_grad=True)
    out = swiglu(extreme)
    out.sum().backward()
    torch.testing.assert_close(out, torch.tensor([[0.0, 3e4, 0.0]]))
    assert extreme.grad.isfinite().all()
