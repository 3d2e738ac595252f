"""Moments in 8 bits: the map, the codes, and the kernel that updates them."""

import math

import pytest
import torch

from gapless.config import OptimConfig
from gapless.kernels import quantized_state
from gapless.kernels.adamw import Entry, TensorList, prepare
from gapless.kernels.quantized_state import (
    QuantizedMoment,
    code_values,
    dequantize,
    dequantize_tile,
    limits,
    quantize,
    quantize_tile,
)
from gapless.kernels.runtime import jit, launch, tl
from gapless.training.optim import AdamW
from kernels.test_adamw_kernel import make_views, train
from kernels.tools import DEVICE, guarded, kernels, reference

SIZES = (1, 3, 255, 257, 0, 4097, 8192)


def spread(count, signed, seed=0):
    """Values over many decades, and blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 10 ** (torch.rand(count, generator=generator) * -8)
    x = x if signed else x.square()
    x[256:512] = 0
    return x


# ---- the reference ----


def test_large_tensors_are_taken_in_pieces(monkeypatch):
    x = spread(3000, True)
    codes, scales = quantize(x, True)
    values = dequantize(codes, scales, True)
    monkeypatch.setattr(quantized_state, "_AT_ONCE", 512)
    again = quantize(x, True)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert torch.equal(dequantize(codes, scales, True), values)


def test_the_map_is_that_of_the_paper():
    """The signed one in words: 7 decades below 1 of 1, 2, ... 64 parts each, both signs, 0 and 1."""
    signed, unsigned = (code_values(kind).double().sort().values for kind in (True, False))
    for values, parts in ((signed[128:], 1), (unsigned[1:], 2)):
        expected = []
        for exponent in range(-6, 1):
            width = 0.9 / parts
            expected += [(0.1 + width * (index + 0.5)) * 10**exponent for index in range(parts)]
            parts *= 2
        torch.testing.assert_close(values, torch.tensor([*expected, 1.0], dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(-signed[:127].flip(0), signed[128:255])
    assert signed[127] == unsigned[0] == 0


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_nearest(signed):
    x = spread(100_000, signed)
    codes, scales = quantize(x, signed)
    ordered = code_values(signed).double().sort().values
    y = torch.nan_to_num(x.double() / scales.double().repeat_interleave(256)[: len(x)])
    above = torch.bucketize(y, ordered).clamp(1, 255)
    gap = ordered[above] - ordered[above - 1]
    nearest = torch.minimum((ordered[above] - y).abs(), (y - ordered[above - 1]).abs())
    error = (code_values(signed).double()[codes.long()] - y).abs()
    raised = (y > 0) & (y < ordered[1]) if not signed else torch.zeros_like(y, dtype=torch.bool)
    assert (error - nearest <= gap / 100)[~raised].all()
    assert (codes[raised] == 2).all(), "a second moment became 0"
    assert (codes[x == 0] == 0).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e-20, 1e30, 1e-35])
def test_values_come_back_as_the_same_bits(signed, factor):
    x = spread(5000, signed) * (factor if signed else abs(factor))
    x = torch.cat([x, code_values(signed) * factor if signed else code_values(signed)])
    if signed:
        x = torch.cat([torch.linspace(-2, 2, 256), x])  # the largest value with either sign
    codes, scales = quantize(x, signed)
    values = dequantize(codes, scales, signed)
    again = quantize(values, signed)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)
    assert torch.equal(dequantize(*again, signed), values)
    largest = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256).abs().amax(1)
    kept = largest >= 2.0**-100
    assert torch.equal(scales.abs()[kept], largest[kept])
    assert not scales[~kept].any()


# ---- the kernels ----


@jit
def _round_trip_kernel(x, codes, scales, out, count, SIGNED: tl.constexpr, LIMITS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    found, scale = quantize_tile(tl.load(x + offsets, mask=offsets < count, other=0.0), SIGNED, LIMITS)
    tl.store(codes + offsets, found, mask=offsets < count)
    tl.store(scales + rows, scale, mask=rows * 256 < count)
    tl.store(out + offsets, dequantize_tile(found, scale, SIGNED, LIMITS), mask=offsets < count)


def edges(signed):
    """Magnitudes on both sides of each place where a code changes, in blocks that begin with 1."""
    bounds = limits(signed)
    middles = code_values(signed).double().sort().values.diff() / 2 + code_values(signed).double().sort().values[:-1]
    places = [bounds.zero, *bounds.decades, bounds.one, *(round(float(middle) * 2**30) for middle in middles)]
    sizes = torch.tensor(places, dtype=torch.float64)[:, None] + torch.arange(-3, 4)
    sizes = (sizes if signed else sizes.clamp(min=0)).flatten() / 2**30
    blocks = torch.nn.functional.pad(sizes, (0, -len(sizes) % 255)).view(-1, 255)
    return torch.cat([torch.ones(len(blocks), 1), blocks.float()], dim=1).flatten()


@pytest.mark.parametrize("signed", [True, False])
def test_kernels_choose_the_codes_of_the_reference(signed):
    x = torch.cat([spread(4097, signed), torch.zeros(255), edges(signed)]).to(DEVICE)
    if signed:
        both = torch.linspace(-2, 2, 256, device=DEVICE)  # the largest value with either sign
        x = torch.cat([x, -x, x.view(-1, 256).flip(1).flatten() * -3e-7, both])
    codes, scales = quantize(x, signed)
    with guarded():
        ours = torch.empty_like(x, dtype=torch.uint8)
        sizes, values = torch.empty_like(scales), torch.empty_like(x)
    settings = {"SIGNED": signed, "LIMITS": tuple(limits(signed)), "ROWS": 4}
    grid = (-(-len(scales) // 4),)
    launch(_round_trip_kernel, grid, x.device, x, ours, sizes, values, len(x), **settings)
    assert torch.equal(ours, codes)
    assert torch.equal(sizes, scales)
    assert torch.equal(values, dequantize(codes, scales, signed))


def make(master=torch.float32, copy=None, shift=0, sizes=SIZES):
    """Entries, and the memory they lie in: canaries on both sides."""
    generator = torch.Generator().manual_seed(0)
    memory = []

    def place(values):
        whole = torch.full((values.numel() + 128 + shift,), 77, dtype=values.dtype, device=DEVICE)
        inner = whole[64 + shift : 64 + shift + values.numel()]
        inner.copy_(values)
        memory.append((whole, shift, values.numel()))
        return inner

    def moment(values, signed):
        codes, scales = quantize(values, signed)
        return QuantizedMoment(place(codes), place(scales), values.shape, signed)

    entries = [
        Entry(
            place(torch.randn(size, generator=generator)),
            place(torch.randn(size, generator=generator).to(master)),
            None if copy is None else place(torch.zeros(size, dtype=copy)),
            moment(spread(size, signed=True, seed=index) * 0.1, signed=True),
            moment(spread(size, signed=False, seed=index) * 0.01, signed=False),
            index % 2 == 0,
        )
        for index, size in enumerate(sizes)
    ]
    return entries, memory


def step(entries, loss=1.0, eight=True):
    """A kernel's step from step count 3; in float32 on the values of the moments if not `eight`."""
    if not eight:
        entries = [
            entry._replace(exp_avg=entry.exp_avg.read(), exp_avg_sq=entry.exp_avg_sq.read()) for entry in entries
        ]
    with kernels(), guarded():
        tensors = TensorList(entries, torch.device(DEVICE))
        norm = tensors.squares(torch.ones(len(entries), dtype=torch.int32, device=DEVICE)).sqrt()
        scalars = [torch.tensor(value, device=DEVICE) for value in (loss, 1e-2, True, 3.0)]
        control, _ = prepare(scalars[0], norm, *scalars[1:], 1.0, (0.9, 0.999))
        tensors.update(control, 0.1, 1e-8, (0.9, 0.999))
    return entries


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("master", "copy"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)]
)
def test_an_update_is_that_of_the_values_rounded_again(master, copy, shift):
    (entries, memory), (twins, _) = make(master, copy, shift), make(master, copy, shift)
    step(entries)
    for entry, twin in zip(entries, step(twins, eight=False), strict=True):
        assert not entry.grad.any()
        torch.testing.assert_close(
            entry.master, twin.master, rtol=2**-7 if master == torch.bfloat16 else 1e-6, atol=1e-7
        )
        if copy is not None:
            assert torch.equal(entry.copy, entry.master.to(copy))
        for ours, exact, signed in ((entry.exp_avg, twin.exp_avg, True), (entry.exp_avg_sq, twin.exp_avg_sq, False)):
            codes, scales = quantize(exact, signed)
            # On a GPU the two kernels may contract a product and a sum differently.
            assert (ours.codes != codes).sum() <= (0 if DEVICE == "cpu" else len(codes) * 1e-3)
            torch.testing.assert_close(ours.scales, scales, rtol=1e-6, atol=0)
    for whole, offset, count in memory:
        assert (whole[: 64 + offset] == 77).all()
        assert (whole[64 + offset + count :] == 77).all()


def test_a_bad_step_changes_no_bit():
    (entries, memory), (twins, copies) = make(), make()
    step(entries, loss=math.nan)
    grads = {entry.grad.data_ptr() for entry in entries}
    for (whole, offset, count), (old, _, _) in zip(memory, copies, strict=True):
        inner = whole[64 + offset : 64 + offset + count]
        assert torch.equal(whole, old) if inner.data_ptr() not in grads else not inner.any()
    assert len(entries) == len(twins)


@pytest.mark.parametrize(("dtype", "pure"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_the_optimizer_follows_its_reference(dtype, pure):
    config = OptimConfig(weight_decay=0.1, pure_bf16=pure, optim="adamw_8bit")
    results = []
    for path in (kernels, reference):
        views = make_views(dtype, sizes=((33, 130), (70,), (5, 3)))
        optimizer = AdamW(views, config, DEVICE)
        train(views, optimizer, path=path)
        results.append({name: tensor for name, _, tensor in optimizer.tensors()})
    for name, ours in results[0].items():
        difference = (ours.float() - results[1][name].float()).abs()
        tolerance = 1e-5 if ours.dtype == torch.float32 else 2**-7
        assert (difference > tolerance * results[1][name].float().abs() + 1e-6).float().mean() < 2e-3, name
