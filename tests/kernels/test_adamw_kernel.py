"""The kernels of norm, clip and AdamW against float64 and torch's fused AdamW, on lists of odd sizes."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gapless.config import OptimConfig
from gapless.kernels.adamw import Entry, TensorList, prepare
from gapless.training.optim import AdamW
from kernels.tools import DEVICE, guarded, kernels, reference

SIZES = (1, 3, 255, 257, 0, 4097, 8192)
BETAS, EPS, DECAY, RATE = (0.9, 0.999), 1e-8, 0.1, 1e-2
CANARY = 77.0


@dataclass
class Guarded:
    """Tensors with canaries on both sides, `shift` elements away from an aligned address."""

    entries: list[Entry]
    memory: list[torch.Tensor]

    def check(self) -> None:
        for memory, shift, count in self.memory:
            assert (memory[: 64 + shift] == CANARY).all()
            assert (memory[64 + shift + count :] == CANARY).all()


def make(master=torch.float32, copy=None, shift=0, sizes=SIZES, seed=0) -> Guarded:
    generator = torch.Generator().manual_seed(seed)
    memory = []

    def place(values, dtype=torch.float32):
        whole = torch.full((values.numel() + 128 + shift,), CANARY, dtype=dtype, device=DEVICE)
        inner = whole[64 + shift : 64 + shift + values.numel()]
        inner.copy_(values)
        memory.append((whole, shift, values.numel()))
        return inner

    entries = []
    for index, size in enumerate(sizes):
        grad, weight, m, v = (torch.randn(size, generator=generator) for _ in range(4))
        entries.append(
            Entry(
                place(grad),
                place(weight, master),
                None if copy is None else place(torch.zeros(size), copy),
                place(m * 0.1),
                place(v.square() * 0.01),
                index % 2 == 0,
            )
        )
    return Guarded(entries, memory)


class Scalars:
    """What a step reads and writes beside the tensors."""

    def __init__(self, step=3.0):
        self.step_count = torch.tensor(step, device=DEVICE)
        self.open = torch.tensor(True, device=DEVICE)
        self.rate = torch.tensor(RATE, device=DEVICE)

    def step(self, entries, loss=1.0, norm=None, max_norm=1.0, betas=BETAS):
        with kernels(), guarded():
            tensors = TensorList(entries, torch.device(DEVICE))
            every = torch.ones(len(entries), dtype=torch.int32, device=DEVICE)
            norm = tensors.squares(every).sqrt() if norm is None else torch.tensor(norm, device=DEVICE)
            loss = torch.tensor(loss, device=DEVICE)
            control, finite = prepare(loss, norm, self.rate, self.open, self.step_count, max_norm, betas)
            tensors.update(control, DECAY, EPS, betas)
        return norm, finite


def exact(entries, step, norm, max_norm=1.0):
    """Masters and moments after a step, in float64."""
    scale = max(norm / max_norm, 1.0)
    results = []
    for entry in entries:
        g = entry.grad.double() / scale
        m = BETAS[0] * entry.exp_avg.double() + (1 - BETAS[0]) * g
        v = BETAS[1] * entry.exp_avg_sq.double() + (1 - BETAS[1]) * g * g
        p = entry.master.double() * (1 - RATE * DECAY * entry.decays)
        update = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
        results.append((p - RATE * update, m, v))
    return results


def fused(entries, step, norm, max_norm=1.0):
    """Masters and moments after a step of torch's kernel, on copies."""
    results = []
    for entry in entries:
        p, g, m, v = (tensor.float().clone() for tensor in (entry.master, entry.grad, *entry[3:5]))
        count = torch.tensor(float(step), device=DEVICE)
        options = {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "amsgrad": False, "maximize": False}
        scale = (norm / max_norm).clamp(min=1.0)
        rate, decay = torch.tensor(RATE, device=DEVICE), DECAY * entry.decays
        if p.numel():
            torch._fused_adamw_(
                [p], [g], [m], [v], [], [count], lr=rate, weight_decay=decay, grad_scale=scale, **options
            )
        results.append((p, m, v))
    return results


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("copy", [None, torch.bfloat16, torch.float16])
def test_a_step_is_as_exact_as_torch(shift, copy):
    tensors, scalars = make(copy=copy, shift=shift), Scalars()
    for step in (4, 5, 6):
        for entry, fresh in zip(tensors.entries, make(seed=step).entries, strict=True):
            entry.grad.copy_(fresh.grad)
        norm = torch.stack([entry.grad.double().square().sum() for entry in tensors.entries]).sum().sqrt()
        truth = exact(tensors.entries, step, norm)
        eager = fused(tensors.entries, step, norm.float())
        measured, finite = scalars.step(tensors.entries)
        assert bool(finite)
        assert math.isclose(float(measured), float(norm), rel_tol=1e-6)
        assert float(scalars.step_count) == step
        for entry, theirs, ours in zip(tensors.entries, eager, truth, strict=True):
            for mine, other, right in zip((entry.master, *entry[3:5]), theirs, ours, strict=True):
                error, budget = (mine.double() - right).norm(), 2 * (other.double() - right).norm()
                assert float(error) <= float(budget) + 1e-7 * float(right.norm())
            assert not entry.grad.any()
            if copy is not None:
                assert torch.equal(entry.copy, entry.master.to(copy))
        tensors.check()


@pytest.mark.parametrize("shift", [0, 1])
def test_bf16_masters_are_rounded_to_nearest(shift):
    tensors = make(master=torch.bfloat16, shift=shift)
    norm = torch.stack([entry.grad.double().square().sum() for entry in tensors.entries]).sum().sqrt()
    truth = exact(tensors.entries, 4, norm)
    Scalars().step(tensors.entries)
    for entry, (right, _, _) in zip(tensors.entries, truth, strict=True):
        different = entry.master != right.to(torch.bfloat16)  # a tie may fall to the other side in float32
        assert different.float().mean() < 1e-3 if entry.master.numel() > 1000 else not different.any()
    tensors.check()


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": -math.inf}, {"norm": math.nan}, {"norm": math.inf}])
@pytest.mark.parametrize("kind", [(torch.float32, torch.bfloat16), (torch.bfloat16, None)])
def test_a_bad_step_changes_no_bit_and_closes(bad, kind):
    tensors, scalars = make(*kind, sizes=(3, 2049)), Scalars()
    before = [[tensor.clone() for tensor in entry[1:5] if tensor is not None] for entry in tensors.entries]
    tensors.entries[0].grad[0] = math.nan
    _, finite = scalars.step(tensors.entries, **bad)
    assert not bool(finite)
    for entry in tensors.entries:
        assert not entry.grad.any()
        entry.grad.fill_(1.0)
    _, finite = scalars.step(tensors.entries)  # a good one, of a closed optimizer
    assert bool(finite)
    assert not bool(scalars.open)
    assert float(scalars.step_count) == 3.0
    for entry, old in zip(tensors.entries, before, strict=True):
        assert not entry.grad.any()
        now = [tensor for tensor in entry[1:5] if tensor is not None]
        assert all(torch.equal(a, b) for a, b in zip(now, old, strict=True))
    tensors.check()


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 10_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.99999)])
def test_bias_corrections(step, betas):
    scalars, one = Scalars(step - 1.0), torch.ones((), device=DEVICE)
    with kernels(), guarded():
        control, _ = prepare(one, 10 * one, scalars.rate, scalars.open, scalars.step_count, 2.0, betas)
    rate = float(scalars.rate)
    right = [1.0, 0.2, rate, rate / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5]
    assert control.tolist() == pytest.approx(right, rel=2e-7)


def test_squares_count_chosen_tensors_and_are_the_same_bits():
    entries = make(shift=1).entries
    entries[2].grad.fill_(math.inf)
    chosen = torch.tensor([1, 0, 0, 1, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    with kernels(), guarded():
        tensors = TensorList(entries, torch.device(DEVICE))
        results = [tensors.squares(chosen) for _ in range(3)]
    right = sum(float(entries[index].grad.double().square().sum()) for index in (0, 3, 5))
    assert math.isclose(float(results[0]), right, rel_tol=1e-6)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_nothing_to_train(sizes):
    norm, finite = Scalars().step(make(sizes=sizes).entries)
    assert float(norm) == 0
    assert bool(finite)


# ---- the optimizer on the kernels' path ----


@dataclass
class PlainView:
    """A parameter as it is on disk."""

    name: str
    parameter: nn.Parameter
    dtype = None
    part = None

    @property
    def shape(self):
        return tuple(self.parameter.shape)

    full_shape = shape

    def read(self, tensor):
        return tensor.detach().clone()

    def write(self, tensor, value):
        tensor.copy_(value)


def make_views(dtype=torch.float32, sizes=((33, 130), (70,), (5, 3))) -> list[PlainView]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes]
    return [PlainView(f"{index}.weight", nn.Parameter(weight)) for index, weight in enumerate(weights)]


def train(views, optimizer, steps=3, path=kernels, rate=1e-2, first=0):
    generator = torch.Generator().manual_seed(first)
    norms = []
    for _ in range(steps):
        noise = [torch.randn(view.shape, generator=generator).to(DEVICE) for view in views]
        sum((view.parameter * x).sum() for view, x in zip(views, noise, strict=True)).backward()
        with path():
            norms.append(optimizer.step(torch.ones((), device=DEVICE), torch.tensor(rate, device=DEVICE))[0])
    return norms


@pytest.mark.parametrize(("dtype", "pure"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_the_optimizer_follows_its_reference(dtype, pure):
    config = OptimConfig(weight_decay=0.1, pure_bf16=pure)
    results = []
    for path in (kernels, reference):
        views = make_views(dtype)
        optimizer = AdamW(views, config, DEVICE)
        versions = [view.parameter._version for view in views]
        norms = train(views, optimizer, path=path)
        assert all(view.parameter._version > old for view, old in zip(views, versions, strict=True))
        results.append([*norms, *(tensor for _, _, tensor in optimizer.tensors())])
    for ours, theirs in zip(*results, strict=True):
        tolerance = {"rtol": 2**-7, "atol": 1e-6} if ours.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_gradients_that_come_as_new_tensors():
    """Those of parameters that FSDP2 shards."""
    results = []
    for path in (kernels, reference):
        views = make_views()
        for view in views:
            view.parameter.placements = ()  # as of a DTensor
        optimizer = AdamW(views, OptimConfig(), DEVICE)
        kept = []
        for step in range(3):
            for view in views:
                view.parameter.grad = torch.full_like(view.parameter, 1.0 + step)
                kept.append(view.parameter.grad)  # so that addresses are new
            with path():
                optimizer.step(torch.ones((), device=DEVICE), torch.tensor(1e-2, device=DEVICE))
            assert all(view.parameter.grad is None for view in views)
        results.append([view.parameter.detach() for view in views])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_parameter_in_other_memory_is_refused():
    views = make_views()
    optimizer = AdamW(views, OptimConfig(), DEVICE)
    views[0].parameter.data = views[0].parameter.data.clone()
    with pytest.raises(AssertionError, match="other memory"):
        train(views, optimizer)
