"""Adapted linear layers on the kernels' path against the formula, in rows with and without scratch memory."""

import contextlib
import copy
import gc
import io
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from gapless.adapters.lora import LoraLinear, adapter_views, apply_lora, unchanged
from gapless.adapters.merge import merged_tensors
from gapless.batch import DropoutCounters, segments
from gapless.config import AdapterConfig
from gapless.kernels import lora, skinny
from gapless.kernels.dropout import keep_mask
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.linear import DenseLinear, Part
from kernels.tools import DEVICE, INTERPRETED, assert_accurate, guarded, kernels, reference, run

QKV = ((2, 4, 8), (Part("q_proj", 1, 0, 2), Part("k_proj", 1, 2, 1), Part("v_proj", 1, 3, 1)))
SOME = (QKV[0], (QKV[1][0], QKV[1][2]))
GATE_UP = ((2, 21), (Part("gate_proj", 0, 0, 1), Part("up_proj", 0, 1, 1)))
DOWN = ((33,), (Part("down_proj", 0, 0, 33),))
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


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
    return (
        draw(tokens, channels).to(dtype),
        weight,
        draw(tokens, out).to(dtype),
        draw(out).to(dtype),
        a,
        b,
        draw(tokens, out),
    )


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


@pytest.mark.parametrize(
    ("wide_rows", "dtype"),
    [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float16), (True, torch.float32)],
)
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
        room = wide.spare if wide_rows else 0
        y = lora_linear(rows, wide, leaves[2], leaves[3:], 0.5, bias=bias, residual=leaves[1], dropout=drop, spare=room)
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


@pytest.mark.parametrize("path", [kernels, reference])
@pytest.mark.parametrize(("layout", "p"), [(QKV, 0.0), (SOME, 0.3), (GATE_UP, 0.0)])
def test_both_paths_train(layout, p, path):
    """Also of B's that are not contiguous; float32 kernels, and the reference in float64."""
    dtype = torch.float32 if path is kernels else torch.float64
    x, weight, residual, bias, a, b, upstream = (
        [part.to(dtype) for part in value] if isinstance(value, list) else value.to(dtype)
        for value in case(13, 40, layout, 3, torch.float64)
    )
    exact = run(
        formula(layout, 3, 0.5, p, 0), [tensor.double() for tensor in (x, weight, residual, bias, a, *b)], [upstream]
    )
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, residual, a, *(part.t() for part in b))]
    with path():
        wide = WideWeight(weight, a.shape[0], layout[1])
        drop = InputDropout(p, counters(13), 3, 1)
        parts = [part.t() for part in leaves[3:]]
        y = lora_linear(leaves[0], wide, leaves[2], parts, 0.5, bias=bias, residual=leaves[1], dropout=drop)
        y.backward(upstream)
    assert all(leaf.grad.dtype == dtype for leaf in leaves)
    ours = [y.detach(), *(leaf.grad for leaf in leaves[:3]), *(leaf.grad.t() for leaf in leaves[3:])]
    theirs = [exact[0][0], *(exact[1][index] for index in (0, 2, 4, *range(5, 5 + len(b))))]
    assert_close([tensor.double() for tensor in ours], theirs)


def in_pieces(kind, device, tokens, channels, element_size):
    """Tiles that cut every sum into several pieces, some of them empty."""
    return skinny._Tiles(16, 32, 1, 4, 2) if kind == "spread" else skinny._Tiles(16, 16, 3, 4, 2)


@pytest.mark.parametrize(("wide_rows", "p"), [(True, 0.3), (False, 0.0)])
def test_sums_in_pieces(wide_rows, p):
    with mock.patch.object(skinny, "_tiles", in_pieces):
        test_against_float64(21, 40, QKV, 6, p, 1, wide_rows, torch.float32)
        test_against_float64(40, 50, DOWN, 3, p, 0, wide_rows, torch.bfloat16)


def test_values_that_are_not_finite_stay_in_their_row():
    """The scratch columns of a row with an infinity are zeros all the same, not infinity times zero."""
    x, weight, _, _, a, b, _ = case(9, 40, DOWN, 5, torch.float32)
    x[4, 3] = torch.inf
    with kernels():
        wide = WideWeight(weight, 5, DOWN[1])
        for spare in (wide.spare, 0):
            rows = in_rows(x, spare)
            y = lora_linear(rows, wide, a, b, 1.0, spare=spare)
            assert not y[4].isfinite().any()
            assert y[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()
            if spare:
                assert not rows.as_strided((9, spare - 5), rows.stride(), 45).any()


def test_only_scratch_memory_is_overwritten():
    """Columns behind x that nobody has given away stay, though they are as many; promised ones must be there."""
    x, weight, _, _, a, b, _ = case(9, 40, DOWN, 5, torch.float32)
    with kernels():
        wide = WideWeight(weight, 5, DOWN[1])
        fused = torch.cat([x, torch.ones(9, wide.spare, device=DEVICE)], dim=1).requires_grad_()
        rows, gate = (fused * 1).split([40, wide.spare], dim=1)
        y = lora_linear(rows, wide, a, b, 1.0)
        assert bool((gate == 1).all())
        assert_close([lora_linear(x, wide, a, b, 1.0, spare=wide.spare)], [y])
        assert_close([lora_linear(in_rows(x, 8), wide, a, b, 1.0, spare=wide.spare)], [y])


def test_strided_small_tensors():
    x, weight, residual, bias, a, b, _ = case(9, 40, DOWN, 5, torch.float32)
    dense = counters(9)
    apart = DropoutCounters(*(torch.stack([c, c + 7], 1)[:, 0] for c in (dense.key, dense.row, dense.column)))
    with kernels():
        wide = WideWeight(weight, 5, DOWN[1])
        ys = [
            lora_linear(x, wide, a, b, 1.0, bias=one, residual=other, dropout=InputDropout(0.3, where, 3, 1))
            for one, other, where in (
                (bias, residual, dense),
                (bias.repeat_interleave(2)[::2], residual.t().contiguous().t(), apart),
            )
        ]
    assert torch.equal(*ys)


WRONG = [
    ({"x": (9, 39)}, r"x must be \[T, 40\], not \[9, 39\]"),
    ({"x": (3, 3, 40)}, r"x must be \[T, 40\], not \[3, 3, 40\]"),
    ({"x": (9, 40, torch.bfloat16)}, "x must be torch.float32"),
    ({"a": (1, 40)}, r"a must be \[10, 40\], not \[1, 40\]"),
    ({"b": (5, 21)}, r"b must be of shapes \[\(21, 5\), \(21, 5\)\], one for each part, not \[\(5, 21\)"),
    ({"bias": (5,)}, r"bias must be \[42\], not \[5\]"),
    ({"bias": (42, torch.bfloat16)}, "bias must be torch.float32"),
    ({"residual": (1, 42)}, r"residual must be \[9, 42\], not \[1, 42\]"),
    ({"residual": (8, 42)}, r"residual must be \[9, 42\], not \[8, 42\]"),
    ({"residual": (9, 42, torch.float16)}, "residual must be torch.float32"),
]


@pytest.mark.parametrize("path", [kernels, reference])
@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_does_not_fit_is_refused(change, message, path):
    x, weight, residual, bias, a, b, _ = case(9, 40, GATE_UP, 5, torch.float32)
    given = {"x": x, "a": a, "b": b, "bias": bias, "residual": residual}
    for name, (*shape, last) in change.items():
        wrong = torch.zeros(shape, dtype=last) if isinstance(last, torch.dtype) else torch.zeros(*shape, last)
        given[name] = [wrong.to(DEVICE), b[1]] if name == "b" else wrong.to(DEVICE)
    with path(), pytest.raises(ValueError, match=message):
        lora_linear(wide=WideWeight(weight, 10, GATE_UP[1]), scale=1.0, **given)


@pytest.mark.parametrize("path", [kernels, reference])
def test_settings_that_are_refused(path):
    x, weight, _, bias, a, b, _ = case(9, 40, GATE_UP, 5, torch.float32)
    with pytest.raises(ValueError, match="a multiple of their number, 2, not 9"):
        WideWeight(weight, 9, GATE_UP[1])
    wide, where = WideWeight(weight, 10, GATE_UP[1]), counters(9)
    wrong = [
        (InputDropout(1.0, where, 3, 1), r"p is 1.0"),
        (InputDropout(float("nan"), where, 3, 1), r"p is nan"),
        (InputDropout(0.1, where, 3, 256), r"site 256"),
        (InputDropout(0.1, counters(8), 3, 1), r"have shapes \[2\], \[8\], \[8\]: x has 9 tokens"),
        (
            InputDropout(0.1, DropoutCounters(where.key, where.row.long(), where.column), 3, 1),
            r"torch.int64, torch.int32, not torch.int32",
        ),
    ]
    with path():
        for drop, message in wrong:
            with pytest.raises(ValueError, match=message):
                lora_linear(x, wide, a, b, 1.0, dropout=drop)
        with pytest.raises(ValueError, match="bias requires a gradient"):
            lora_linear(x, wide, a, b, 1.0, bias=bias.requires_grad_())
        with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="leave torch.autocast out"):
            lora_linear(x, wide, a, b, 1.0)


@pytest.mark.parametrize("trained", ["x", "a", "b", "residual"])
def test_only_what_is_asked_for_is_computed(trained):
    x, weight, residual, _, a, b, upstream = case(9, 40, GATE_UP, 5, torch.float32)
    leaves = {"x": x, "residual": residual, "a": a, "b": b[1]}
    leaves[trained].requires_grad_()
    products = {"x": {"project", "spread"}, "a": {"project", "outer"}, "b": {"outer"}, "residual": set()}
    with kernels(), contextlib.ExitStack() as stack:
        y = lora_linear(x, WideWeight(weight, 10, GATE_UP[1]), a, b, 1.0, residual=residual)
        spies = {
            name: stack.enter_context(mock.patch.object(lora, name, wraps=getattr(skinny, name)))
            for name in ("project", "spread", "outer")
        }
        y.backward(upstream)
    assert {name for name, spy in spies.items() if spy.called} == products[trained]
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [trained]


def test_no_tokens():
    _, weight, _, _, a, b, _ = case(3, 40, QKV, 4, torch.float32)
    x = torch.empty(0, 40, device=DEVICE, requires_grad=True)
    a.requires_grad_()
    with kernels():
        y = lora_linear(x, WideWeight(weight, 12, QKV[1]), a, b, 1.0)
        y.sum().backward()
    assert y.shape == (0, 64)
    assert x.grad.shape == (0, 40)
    assert not a.grad.any()


@pytest.mark.skipif(not INTERPRETED, reason="compiles for a GPU that is not there")
def test_layers_and_batches_share_kernels():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, Path(__file__).parent / "specializations.py", "lora"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    # With dropout and, in the backward's products with B, without.
    expected = {"_dropout_kernel": 1, "_project_kernel": 2, "_spread_kernel": 1, "_outer_kernel": 2}
    assert json.loads(run.stdout) == expected


# ---- the module ----


def layer(*, bias=False, p=0.0):
    """An adapted layer of queries, keys and values, of which two are adapted."""
    torch.manual_seed(3)
    base = DenseLinear(40, *QKV, bias=bias, device=DEVICE).requires_grad_(False)
    if base.bias is not None:
        base.bias.normal_()
    adapted = LoraLinear(base, SOME[1], AdapterConfig(r=4, lora_dropout=p), layer=3, site=1)
    for parameter in (adapted.lora_a, *adapted.lora_b.values()):
        torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def step(module, x, spare):
    """Output, and the gradients of x and of the parameters."""
    leaf = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(in_rows(leaf, spare), counters=counters(len(x)), spare=spare)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters() if p.requires_grad)]


def assert_close(ours, theirs, share=1e-5):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=share * other.abs().max().item())


def assert_same(module, x):
    """A layer does on both paths the same; its step on the kernels'."""
    with kernels():
        ours = step(module, x, module.spare)
    with reference():
        assert_close(ours, step(module, x, 0))
    return ours


@pytest.mark.parametrize(("bias", "p"), [(False, 0.0), (True, 0.4)])
def test_a_layer_equals_its_reference(bias, p):
    module = layer(bias=bias, p=p)
    x = torch.randn(7, 40, device=DEVICE)
    with reference():
        assert module.spare == 0
        expected = step(module, x, 0)
        weight = module.dequantize()
    with kernels():
        assert module.spare == 24
        for spare in (24, 0, 8):
            assert_close(step(module, x, spare), expected)
    assert module.base.weight.shape == (2, 4, 8, 40)
    assert not module.base.weight.is_contiguous()
    assert torch.equal(module.dequantize(), weight)
    with reference():  # the weight is a view of the buffer now
        assert_close(step(module, x, 0), expected)
        halves = [module.shard(0, rank, 2)(x, counters=counters(7)) for rank in range(2)]
        assert_close([torch.cat(halves, 1)], expected[:1])


def test_what_kernels_do_not_take():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    with kernels():
        module.base.weight.requires_grad_(True)
        assert module.spare == 0
        step(module, x, 0)
        assert module.base.weight.grad is not None
        module.base.weight.requires_grad_(False)
        module.gathered = True
        assert module.spare == 0
        step(module, x, 0)
    assert module.base.weight.is_contiguous()


def test_a_change_of_an_adapter_is_seen():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    assert_same(module, x)
    for parameter in (module.lora_a, *module.lora_b.values()):
        parameter.detach().mul_(1.5)  # as an optimizer does: by another name, in place
        assert_same(module, x)


def test_copies_are_made_once_while_nobody_changes_the_adapters():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    assert_same(module, x)
    with unchanged(module):
        assert_same(module, x)
        changed = torch.full_like(module._wide.a, 3)
        module._wide.a.copy_(changed)
        with kernels():
            module(x)
        assert torch.equal(module._wide.a, changed)  # nothing was copied
        with mock.patch.object(lora, "is_captured", return_value=True):
            assert_same(module, x)  # a graph's replays are of other steps
            module._wide.a.copy_(changed)  # as if the copy had been recorded, and not made
        assert_same(module, x)
    assert_same(module, x)
    with unchanged(module):
        assert_same(module, x)
    module.lora_a.data.mul_(2)  # of which nobody is told
    with unchanged(module):
        assert_same(module, x)


def test_optimizers_that_tell_nobody_are_followed():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    optimizer = torch.optim.AdamW([module.lora_a, *module.lora_b.values()], lr=0.1, fused=True)
    for _ in range(3):
        assert_same(module, x)
        optimizer.step()
    module.lora_a.data.mul_(2)
    assert_same(module, x)


def test_inference_mode_leaves_a_layer_that_trains():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    with torch.inference_mode(), kernels():
        module(x)
        loaded = layer()
        loaded(x)
    assert not module.base.weight.is_inference()
    assert_same(module, x)


def test_a_base_that_is_trained_after_all_is_whole_again():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    assert_same(module, x)
    weight = module.base.weight.detach().clone()
    module.base.weight.requires_grad_(True)
    assert_same(module, x)
    assert module.base.weight.is_contiguous()
    assert torch.equal(module.base.weight, weight)


def test_layers_beyond_32_bits_keep_their_weight():
    assert WideWeight.takes(106496, 16384, 32)
    assert not WideWeight.takes(2**17, 2**14, 16)


def test_copies_moves_and_loaded_weights():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    first = assert_same(module, x)
    copied = copy.deepcopy(module)
    copied.base.weight.mul_(2)
    assert_close(assert_same(module, x), first)
    assert not torch.allclose(assert_same(copied, x)[0], first[0])
    assert copied.base.weight.untyped_storage().data_ptr() != module.base.weight.untyped_storage().data_ptr()
    module.base.load_state_dict(copied.base.state_dict())
    assert_close(assert_same(module, x), assert_same(copied, x))
    module.double().float()
    assert_close(assert_same(module, x), assert_same(copied, x))


@pytest.mark.parametrize("move", [lambda module: module.to("meta"), lambda module: module.double()])
def test_a_weight_that_moves_takes_its_buffer_along(move):
    module = layer()
    with kernels():
        module(torch.randn(7, 40, device=DEVICE))
    buffer = weakref.ref(module._wide.rows.untyped_storage())
    move(module)
    gc.collect()  # of what Triton's interpreter has kept
    assert buffer() is None


def test_a_state_dict_is_dense():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    first = assert_same(module, x)
    state = module.state_dict()
    assert set(state) == {"base.weight", "lora_a", "lora_b.q_proj", "lora_b.v_proj"}
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert state["base.weight"].untyped_storage().nbytes() == 64 * 40 * 4
    assert state["lora_a"].data_ptr() == module.lora_a.data_ptr()
    torch.save(state, file := io.BytesIO())
    assert module.state_dict(keep_vars=True)["base.weight"] is module.base.weight
    for assign in (False, True):
        other = layer()
        torch.nn.init.zeros_(other.base.weight)
        file.seek(0)
        other.load_state_dict(torch.load(file, map_location=DEVICE), assign=assign)
        assert_close(assert_same(other, x), first)


def test_a_change_between_forward_and_backward_is_refused():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    with kernels():
        out = module(x)
        module.lora_a.detach().mul_(2)
        module(x)
        with pytest.raises(RuntimeError, match="changed, and used, between"):
            out.sum().backward()


def test_other_forwards_between_forward_and_backward_are_no_change():
    module, x = layer(), torch.randn(7, 40, device=DEVICE)
    expected = assert_same(module, x)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    with kernels():
        out = module(leaf)
        with unchanged(module):
            pass
        module(x)
        with torch.no_grad(), unchanged(module):
            module(x)
            module(x)
        out.square().sum().backward()
    assert_close([leaf.grad, module.lora_a.grad], expected[1:3])


def test_a_decoder_takes_the_rows_with_scratch_memory():
    """Every adapted layer of a decoder is given them, and its step agrees with the reference's."""
    torch.manual_seed(1)
    model = Decoder(decoder_config(LLAMA, None), device=DEVICE)
    apply_lora(model, AdapterConfig(r=4), seed=3)
    generator = torch.Generator().manual_seed(4)
    for view in adapter_views(model):
        view.write(view.parameter, view.shape[1] ** -0.5 * torch.randn(view.shape, generator=generator))
    upstream = torch.randn(19, 48, generator=generator).to(DEVICE)
    tokens = torch.randint(0, 256, (19,), dtype=torch.int32, device=DEVICE)
    results = []
    with mock.patch.object(lora, "project", wraps=skinny.project) as spy:
        for path in (kernels, reference):
            with path():
                layout = model.batch_layout(rows=1, row_tokens=19, row_documents=2)
                where = segments([12, 7], max_documents=layout.max_documents, tiles=layout.tiles, device=DEVICE)
                model.zero_grad()
                out = model(tokens, where)
                out.backward(upstream)
            results.append([out.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert_close(*results, 1e-3)  # rounding, which two layers amplify
    assert sum(call.kwargs.get("spare", 0) > 0 for call in spy.call_args_list) == 4 * len(model.layers)
    with kernels():
        merged = dict(merged_tensors(model))
    with reference():
        assert all(torch.equal(tensor, merged[name]) for name, tensor in merged_tensors(model))


@pytest.mark.parametrize("path", [kernels, reference])
@pytest.mark.parametrize("of", ["x", "b"])
def test_gradients_of_gradients_are_refused(path, of):
    module, x = layer(), torch.randn(7, 40, device=DEVICE, requires_grad=True)
    with path():
        source = x if of == "x" else module.lora_b["q_proj"]
        (grad,) = torch.autograd.grad(module(x).square().sum(), source, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
