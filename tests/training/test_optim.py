"""AdamW against torch.optim.AdamW, and what a bad step must not do."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gapless.config import OptimConfig
from gapless.kernels.quantized_state import QuantizedMoment
from gapless.kernels.runtime import forced
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


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_gradients_that_someone_has_replaced(path):
    """Zeroed by a script before a step, or set: what `grad` says is trained."""
    results = []
    for case in ("plain", "zeroed", "set"):
        views = make_views()
        optimizer = AdamW(views, OptimConfig())
        if case == "plain":
            expected = [view.parameter.detach().clone() for view in views]
        else:
            backward(views, 3.0)
            for view in views:
                view.parameter.grad = None if case == "zeroed" else torch.zeros_like(view.parameter)
            optimizer.bind_gradients()
        backward(views, 1.0)
        with forced(path):
            norm = optimizer.squares().sqrt()
            optimizer.step(ONE, torch.tensor(0.1), norm)
            assert all(view.parameter.grad is optimizer.gradient(view.parameter) for view in views)
            assert not any(view.parameter.grad.any() for view in views)
            moved = [view.parameter.detach().clone() for view in views]
            for view in views:
                view.parameter.grad = None
            optimizer.step(ONE, torch.tensor(0.0))
        results.append([norm, *moved, *(tensor for _, tensor in state_of(optimizer).items())])
        assert not any(torch.equal(one, other) for one, other in zip(moved, expected, strict=True))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_gradients_that_are_replaced_within_a_step_are_refused(path):
    views = make_views()
    optimizer = AdamW(views, OptimConfig())
    backward(views, 1.0)
    views[0].parameter.grad = None
    with forced(path), pytest.raises(RuntimeError, match="within a step"):
        optimizer.squares()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_cleared_or_set_in_every_dtype(dtype):
    parameter = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    optimizer = AdamW([PlainView("x", parameter)], OptimConfig())
    parameter.sum().backward()
    optimizer.zero_grad()
    parameter.sum().backward()
    assert float(optimizer.squares()) == pytest.approx(6)
    parameter.grad = torch.full_like(parameter, 2)
    optimizer.bind_gradients()
    assert float(optimizer.squares()) == pytest.approx(24)


def test_a_buffer_is_zero_where_the_gradient_was_dropped():
    views = make_views()
    optimizer = AdamW(views, OptimConfig(max_grad_norm=0.0))
    backward(views, 3.0)
    for view in views:
        view.parameter.grad = None
    optimizer.bind_gradients()
    assert optimizer.squares() == 0


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


# ---- moments in 8 bits ----

EIGHT = OptimConfig(optim="adamw_8bit", weight_decay=0.1)


@dataclass
class PartView(PlainView):
    """Some rows of a fused parameter."""

    start: int = 0
    end: int = 0

    def view(self, tensor):
        return tensor[self.start : self.end]


def make_large_views(dtype=torch.float32) -> list[PlainView]:
    """A fused parameter in two parts, whose border is within a block of 256, a small one, an embedding."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in ((63, 67), (40, 10), (100, 50))]
    fused, small, embedding = (nn.Parameter(weight) for weight in weights)
    return [
        PartView("q.weight", fused, start=0, end=20),
        PartView("k.weight", fused, start=20, end=63),
        PlainView("small.weight", small),
        PlainView("model.embed_tokens.weight", embedding),
    ]


def train(views, optimizer, steps, first=0):
    for step in range(first, first + steps):
        backward(views, 1.0 + step)
        optimizer.step(ONE, torch.tensor(1e-2))


@pytest.mark.parametrize(("dtype", "pure"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_8bit_moments_resume_with_the_same_bits(dtype, pure):
    config = dataclasses.replace(EIGHT, pure_bf16=pure)
    views, copies = make_large_views(dtype), make_large_views(dtype)
    optimizer, other = AdamW(views, config), AdamW(copies, config)
    train(views, optimizer, 3)
    state = state_of(optimizer)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == state_shapes(views, config)
    assert all(tensor.dtype == torch.float32 for name, tensor in state.items() if name.startswith("exp_avg"))
    other.load(lambda name, _: state[name], int(optimizer.step_count))
    assert_same_bits(snapshot(other), snapshot(optimizer))
    train(views, optimizer, 3, first=3)
    train(copies, other, 3, first=3)
    assert_same_bits(snapshot(other), snapshot(optimizer))


def test_large_parameters_but_embeddings_have_8bit_moments():
    views = make_large_views()
    optimizer = AdamW(views, EIGHT)
    kinds = [type(moment) for group in optimizer._groups for moment in (*group.exp_avgs, *group.exp_avg_sqs)]
    assert kinds == [QuantizedMoment, Tensor, Tensor] * 2
    moment = optimizer._groups[0].exp_avgs[0]
    assert moment.codes.nbytes == 63 * 67
    assert moment.scales.nbytes == 4 * -(-63 * 67 // 256)


def test_bytes_of_an_update():
    """Gradient, master and moments read and written, a low-precision copy written."""
    count = 5 * 3 + 7 + 4 + 4
    assert AdamW(make_views(), OptimConfig()).update_bytes() == 32 * count
    assert AdamW(make_views(torch.bfloat16), OptimConfig()).update_bytes() == 34 * count
    large, others = 63 * 67, 40 * 10 + 100 * 50
    scales = 4 * -(-large // 256)
    assert AdamW(make_large_views(), EIGHT).update_bytes() == 16 * large + 4 * (large + scales) + 32 * others


def test_a_bad_step_leaves_8bit_moments_alone():
    views = make_large_views()
    optimizer = AdamW(views, EIGHT)
    train(views, optimizer, 2)
    before = snapshot(optimizer)
    backward(views)
    optimizer.step(torch.tensor(float("nan")), torch.tensor(1e-2))
    assert_same_bits(snapshot(optimizer), before)


def test_8bit_moments_train_like_float32():
    """A small network; the losses of 30 steps."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 64, generator=generator), torch.randn(256, 16, generator=generator)
    losses = {}
    for kind in ("adamw", "adamw_8bit"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))
        views = [PlainView(name, parameter) for name, parameter in model.named_parameters()]
        optimizer = AdamW(views, OptimConfig(optim=kind))
        losses[kind] = []
        for _ in range(30):
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step(loss.detach(), torch.tensor(2e-3))
            losses[kind].append(loss.item())
    assert losses["adamw"][-1] < 0.7 * losses["adamw"][0]
    assert losses["adamw_8bit"] != losses["adamw"]
    assert losses["adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.01)


def test_gradients_are_cleared_and_returned():
    views = make_views()
    optimizer = AdamW(views, OptimConfig())
    backward(views)
    optimizer.step(ONE, torch.tensor(1e-2))
    assert all(not view.parameter.grad.any() for view in views)
    optimizer.close()
    assert all(view.parameter.grad is None for view in views)
