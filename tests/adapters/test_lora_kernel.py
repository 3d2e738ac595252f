"""The low-rank update against float64 autograd of its formula."""

import torch

from gapless.kernels.lora import lora_update


def test_update_and_gradients_equal_float64():
    torch.manual_seed(0)
    y, x, a, b = torch.randn(5, 7), torch.randn(5, 3), torch.randn(2, 3), torch.randn(7, 2)
    upstream = torch.randn(5, 7)
    leaves = [t.clone().requires_grad_() for t in (y, x, a, b)]
    out = lora_update(leaves[0] * 1.0, *leaves[1:], 1.7)
    out.backward(upstream)
    exact = [t.double().requires_grad_() for t in (y, x, a, b)]
    expected = exact[0] + 1.7 * (exact[1] @ exact[2].T) @ exact[3].T
    expected.backward(upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(leaves, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_the_update_is_written_into_the_output():
    y = torch.zeros(2, 2)
    out = lora_update(y, torch.ones(2, 1), torch.ones(1, 1), torch.ones(2, 1), 2.0)
    assert out.data_ptr() == y.data_ptr()
    assert out.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_what_is_frozen_costs_nothing():
    x, a, b = torch.randn(5, 3), torch.randn(2, 3), torch.randn(7, 2).requires_grad_()
    out = lora_update(torch.zeros(5, 7), x, a, b, 2.0)
    assert [tensor is None for tensor in out.grad_fn.saved_tensors] == [True, True, True, False]
    out.sum().backward()
    torch.testing.assert_close(b.grad, 2 * (x @ a.t()).sum(0).expand(7, 2))
    a.requires_grad_()
    lora_update(torch.zeros(5, 7), x, a, b.detach(), 2.0).sum().backward()
    torch.testing.assert_close(a.grad, 2 * b.detach().sum(0)[:, None] * x.sum(0))
