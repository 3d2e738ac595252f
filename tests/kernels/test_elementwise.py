"""RMS norm, SwiGLU and rotary embedding against float64, values and gradients."""

import math

import pytest
import torch
from torch.nn import functional

from gapless.kernels.activation import swiglu
from gapless.kernels.rms_norm import rms_norm
from gapless.kernels.rope import apply_rope, rotary_table

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


@pytest.mark.parametrize("heads", [(3,), (2, 4)])
def test_rope_rotates_pairs_as_complex_numbers(heads):
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 0, 60], dtype=torch.int32)
    frequencies = torch.tensor([1.0, 0.3, 0.01])
    table = rotary_table(positions, frequencies, scaling=1.25)
    turn = torch.polar(
        torch.full((5, 3), 1.25, dtype=torch.float64), positions.double()[:, None] * frequencies.double()
    ).view(5, *(1,) * len(heads), 3)

    def oracle(x):
        first, second = x.chunk(2, dim=-1)
        if x.dtype == torch.bfloat16:
            cos, sin = turn.real.bfloat16(), turn.imag.bfloat16()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = torch.randn(5, *heads, 6)
    other = torch.randn(5, 2, 6)
    check(lambda x: apply_rope(x, other, table)[0], oracle, x)
    check(lambda x: apply_rope(other, x, table)[1], oracle, x)


def test_rope_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    frequencies = 1 / 10 ** torch.arange(4)

    def score(at_q, at_k):
        tables = (rotary_table(torch.tensor([at], dtype=torch.int32), frequencies) for at in (at_q, at_k))
        turned_q, turned_k = (apply_rope(x, x, table)[0] for x, table in zip((q, k), tables, strict=True))
        return (turned_q * turned_k).sum().item()

    assert math.isclose(score(9, 4), score(105, 100), rel_tol=1e-4)
    assert not math.isclose(score(9, 4), score(9, 5), rel_tol=1e-2)
