"""Adapted linear layers on the kernels' path against the formula, in rows with and without scratch memory."""

import copy

import pytest
import torch

from gapless.adapters.lora import LoraLinear
from gapless.batch import DropoutCounters
from gapless.config import AdapterConfig
from gapless.kernels import lora
from gapless.kernels.dropout import keep_mask
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.kernels.runtime import empty_rows, spare_columns
from gapless.models.linear import DenseLinear, Part, plain_linear
from kernels.tools import DEVICE, assert_accurate, check, guarded, kernels, reference, run

QKV = ((2, 4, 8), (Part("q_proj", 1, 0, 2), Part("k_proj", 1, 2, 1), Part("v_proj", 1, 3, 1)))
SOME = (QKV[0], (QKV[1][0], QKV[1][2]))
GATE_UP = ((2, 21), (Part("gate_proj", 0, 0, 1), Part("up_proj", 0, 1, 1)))
DOWN = ((33,), (Part("down_proj", 0, 0, 33),))


def counters(tokens):
    key = torch.tensor([5, 9], dtype=torch.int32, device=DEVICE)
    row, column = torch.arange(tokens, device=DEVICE).int() % 3, torch.arange(tokens, device=DEVICE).int()
    return DropoutCounters(key, row, column)


def in_rows(x, spare):
    """The same values in rows with scratch memory behind them, as a producer makes them: not a number there."""
    if not spare:
        return x
    memory = torch.cat([x, torch.full_like(x[:, :1], torch.nan).expand(-1, spare)], dim=1)
    return memory[:, : x.shape[1]]


def case(tokens, channels, layout, r, dtype):
    """x, W, residual, bias, A, the B's, upstream."""
    leading, parts = layout
    generator = torch.Generator().manual_seed(tokens + channels)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    weight = (draw(*leading, channels) / channels**0.5).to(dtype)
    out = weight[..., 0].numel()
    # Values that the compute copies hold exactly, so that both sides start from the same.
    a = (draw(len(parts) * r, channels) / channels**0.5).to(dtype).float()
    b = [draw(part.features(leading), r).to(dtype).float() for part in parts]
    return draw(tokens, channels).to(dtype), weight, draw(tokens, out).to(dtype), draw(out).to(dtype), a, b, draw(tokens, out)


def formula(layout, r, scale, p, first):
    """The layer in plain operations: x, weight, residual, bias, A, B... -> y."""
    leading, parts = layout

    def plain(x, weight, residual, bias, a, *b):
        dropped = x
        if p:
            kept = keep_mask(x.shape[1], p, counters(len(x)), 3, 1, first)
            dropped = torch.where(kept, x * (1 / (1 - p)), 0)
        y = x @ weight.flatten(0, -2).t() + bias + residual
        inner = (dropped @ a.to(x.dtype).t()).split(r, dim=1)
        update = x.new_zeros(len(x), *leading)
        for part, piece, of_part in zip(parts, inner, b, strict=True):
            target = part.select(update, 1)
            target.add_((piece @ of_part.to(x.dtype).t()).view(target.shape) * scale)
        return y + update.flatten(1)

    return plain


CASES = [
    # tokens, channels, layout, r, p, first channel
    (13, 40, QKV, 4, 0.0, 0),
    (13, 40, SOME, 16, 0.3, 0),
    (70, 50, GATE_UP, 5, 0.0, 0),
    (9, 131, DOWN, 16, 0.0, 0),
    (9, 131, DOWN, 7, 0.4, 6),
    (3, 70, QKV, 64, 0.25, 3),  # R = 192
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wide_rows", [True, False])
@pytest.mark.parametrize(("tokens", "channels", "layout", "r", "p", "first"), CASES)
def test_against_float64(tokens, channels, layout, r, p, first, wide_rows, dtype):
    x, weight, residual, bias, a, b, upstream = case(tokens, channels, layout, r, dtype)
    plain = formula(layout, r, 0.5, p, first)
    inputs = [x, weight, residual, bias, a, *b]
    exact = run(plain, [tensor.double() for tensor in inputs], [upstream])
    eager = run(plain, inputs, [upstream])
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, residual, a, *b)]
    with kernels(), guarded():
        wide = WideWeight(weight, len(layout[1]) * r, layout[1])
        rows = in_rows(leaves[0], wide.spare if wide_rows else 0)
        drop = InputDropout(p, counters(tokens), 3, 1, first) if p else None
        y = lora_linear(rows, wide, leaves[2], leaves[3:], 0.5, bias=bias, residual=leaves[1], dropout=drop)
        y.backward(upstream.to(dtype))
    ours = [y.detach(), *(leaf.grad for leaf in leaves)]
    pick = [0, 2, 4, *range(5, 5 + len(b))]  # weight and bias are frozen

    def chosen(results):
        return [results[0][0], *(results[1][index] for index in pick)]

    names = ["y", "x", "residual", "a", *(f"b{index}" for index in range(len(b)))]
    assert_accurate(ours, chosen(eager), chosen(exact), names=names)
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves[2:])
    if wide_rows:
        assert not rows.as_strided((tokens, wide.spare - wide.rank), rows.stride(), channels + wide.rank).any()
