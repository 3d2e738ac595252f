"""AdamW against torch.optim.AdamW, and what a bad step must not do."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gapless.config import OptimConfig
from gapless.training.optim import AdamW, state_shapes

ONE = torch.ones(())


@dataclass
class PlainView:
    """A parameter that is stored as it is on disk, or transposed."""

    name: str
    parameter: nn.Parameter
    transposed: bool = False
    dtype = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view(self.parameter).shape)

    def view(self, tensor):
        return tensor.T if self.transposed else tensor

    def read(self, tensor):
        return self.view(tensor).detach().clone().contiguous()

    def write(self, tensor, value):
        self.view(tensor).copy_(value)


def make_views(dtype=torch.float32) -> list[PlainView]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (5, 3), "norm.weight": (7,), "b.weight": (4, 1), "b.bias": (4,)}
    return [
        PlainView(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)), name == "b.weight")
        for name, shape in shapes.items()
    ]


def backward(views, factor=1.0) -> None:
    """Gradients that differ between elements and steps."""
    generator = torch.Generator().manual_seed(int(factor * 1000))
    total = sum(
        (view.parameter.float() * torch.randn(view.parameter.shape, generator=generator)).square().sum()
        for view in views
    )
    (factor * total).backward()


def state_of(optimizer: AdamW) -> dict[str, torch.Tensor]:
    return {name: value for name, _, value in optimizer.tensors()}


def snapshot(optimizer: AdamW) -> dict[str, torch.Tensor]:
    return state_of(optimizer) | {"step": optimizer.step_count.clone()}


def assert_same_bits(first, second) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e6])
def test_equals_torch_in_float64(max_grad_norm):
    views = make_views()
    twins = [nn.Parameter(view.parameter.detach().double()) for view in views]
    config = OptimConfig(
        weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-3, max_grad_norm=max_grad_norm
    )
    optimizer = AdamW(views, config)
    matrices, rest = [twins[0], twins[2]], [twins[1], twins[3]]
    oracle = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-3,
        foreach=False,
    )
    for step in range(6):
        rate = 1e-2 / (step + 1)
        backward(views, 1.0 + step)
        for twin, view in zip(twins, views, strict=True):
            twin.grad = view.parameter.grad.double()
        expected_norm = nn.utils.clip_grad_norm_(twins, max_grad_norm or float("inf"))
        oracle.param_groups[0]["lr"] = oracle.param_groups[1]["lr"] = rate
        oracle.step()
        norm, finite = optimizer.step(ONE, torch.tensor(rate))
        assert bool(finite)
        torch.testing.assert_close(norm.double(), expected_norm, rtol=1e-6, atol=0)
        for twin, view in zip(twins, views, strict=True):
            torch.testing.assert_close(view.parameter.double(), twin, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "pure"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_bad_step_changes_no_bit_and_neither_do_later_ones(dtype, pure, bad):
    views = make_views(dtype)
    optimizer = AdamW(views, OptimConfig(weight_decay=0.1, pure_bf16=pure))
    backward(views)
    optimizer.step(ONE, torch.tensor(1e-2))
    before = snapshot(optimizer)

    backward(views) if bad == "loss" else poison(views)
    loss = torch.tensor(float("inf")) if bad == "loss" else ONE
    _, finite = optimizer.step(loss, torch.tensor(1e-2))
    assert not bool(finite)
    assert_same_bits(snapshot(optimizer), before)

    backward(views, 2.0)
    _, finite = optimizer.step(ONE, torch.tensor(1e-2))
    assert bool(finite)
    assert_same_bits(snapshot(optimizer), before)


def poison(views) -> None:
    (views[1].parameter.float().sum() * float("nan")).backward()


def test_bf16_gradients_add_up_in_float32():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([PlainView("x", parameter)], OptimConfig())
    (parameter * 256).sum().backward()
    for _ in range(5):
        parameter.sum().backward()  # 256 + 1 is 256 in bf16
    assert parameter.grad is None
    assert optimizer.gradient(parameter).dtype == torch.float32
    assert optimizer.gradient(parameter).tolist() == [261.0] * 3


def test_masters_move_by_updates_that_bf16_loses():
    moved = {}
    for pure in (False, True):
        parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        optimizer = AdamW([PlainView("x", parameter)], OptimConfig(pure_bf16=pure, max_grad_norm=0.0))
        for _ in range(200):
            parameter.sum().backward()
            optimizer.step(ONE, torch.tensor(1e-4))
        moved[pure] = 1 - parameter.float().mean().item()
    assert moved[False] == pytest.approx(200 * 1e-4, rel=0.1)
    assert moved[True] == 0


def test_pure_bf16_is_adamw_of_the_widened_weights():
    views = make_views(torch.bfloat16)
    twins = [nn.Parameter(view.parameter.detach().float()) for view in views]
    optimizer = AdamW(views, OptimConfig(pure_bf16=True, max_grad_norm=0.0))
    oracle = torch.optim.AdamW(twins, lr=1e-2, weight_decay=0.0, foreach=False)
    backward(views)
    for twin, view in zip(twins, views, strict=True):
        twin.grad = optimizer.gradient(view.parameter).clone()
    oracle.step()
    optimizer.step(ONE, torch.tensor(1e-2))
    for twin, view in zip(twins, views, strict=True):
        assert torch.equal(view.parameter, twin.to(torch.bfloat16))
    assert not any(name.startswith("master/") for name in state_of(optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_out_and_in_under_its_names(dtype):
    views, copies = make_views(dtype), make_views(dtype)
    config = OptimConfig(weight_decay=0.1)
    optimizer, other = AdamW(views, config), AdamW(copies, config)
    for step in range(3):
        backward(views, 1.0 + step)
        optimizer.step(ONE, torch.tensor(1e-2))
    state = state_of(optimizer)
    assert state["exp_avg/b.weight"].shape == (1, 4)
    assert ("master/a.weight" in state) == (dtype == torch.bfloat16)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == state_shapes(views, config)

    other.load(lambda name, _: state[name], int(optimizer.step_count))
    for both in (views, copies):
        backward(both, 7.0)
    optimizer.step(ONE, torch.tensor(1e-2))
    other.step(ONE, torch.tensor(1e-2))
    assert_same_bits(snapshot(other), snapshot(optimizer))


def test_gradients_are_cleared_and_returned():
    views = make_views()
    optimizer = AdamW(views, OptimConfig())
    backward(views)
    optimizer.step(ONE, torch.tensor(1e-2))
    assert all(not view.parameter.grad.any() for view in views)
    optimizer.close()
    assert all(view.parameter.grad is None for view in views)
