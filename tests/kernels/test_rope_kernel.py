"""Splitting, normalising and rotating fused queries, keys and values: kernels and reference against float64."""

import pytest
import torch

from gapless.kernels import rope
from gapless.kernels.rope import RotaryTable, rotary_table, rotate_qkv
from kernels.tools import DEVICE, assert_accurate, check, guarded, kernels, reference, run

EPS = 1e-3
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def table(tokens, half, scaling=1.25):
    positions = torch.randint(0, 300, (tokens,), dtype=torch.int32, device=DEVICE)
    frequencies = 100 ** (-torch.arange(half, device=DEVICE).float() / half)
    return rotary_table(positions, frequencies, scaling)


def oracle(qkv, q_weight=None, k_weight=None, *, rotary, interleaved=False, eps=EPS):
    """In plain torch, in the dtype of the inputs."""
    half, groups = rotary.cos.shape[1], qkv.shape[2] - 2
    cos, sin = (x.to(qkv.dtype)[:, None] for x in (rotary.cos, rotary.sin))

    def turned(x, weight):
        if weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        x, rest = x[..., : 2 * half], x[..., 2 * half :]
        first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        pair = first * cos - second * sin, second * cos + first * sin
        return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)

    q, k, v = qkv[:, :, :groups].flatten(1, 2), qkv[:, :, groups], qkv[:, :, groups + 1]
    return turned(q, q_weight), turned(k, k_weight), v


def made(tokens, kv_heads, groups, features, dtype, *, norm):
    torch.manual_seed(0)
    qkv = torch.randn(tokens, kv_heads, groups + 2, features, device=DEVICE, dtype=dtype)
    weights = [(1 + 0.3 * torch.randn(features, device=DEVICE)).to(dtype) for _ in range(2 if norm else 0)]
    heads = (kv_heads * groups, kv_heads, kv_heads)
    return [qkv, *weights], [torch.randn(tokens, count, features, device=DEVICE) for count in heads]


def call(rotary, interleaved=False):
    return lambda qkv, *weights: rotate_qkv(qkv, rotary, *weights, eps=EPS, interleaved=interleaved)


def plain(rotary, interleaved=False):
    return lambda *inputs: oracle(*inputs, rotary=rotary, interleaved=interleaved)


# Tokens, kv heads, groups, features, R/2.
SHAPES = [
    (5, 2, 3, 32, 16),
    (9, 1, 1, 64, 32),
    (3, 3, 1, 72, 36),
    (2, 1, 16, 80, 40),
    (3, 2, 2, 96, 48),
    (3, 1, 5, 128, 64),
    (2, 1, 2, 256, 128),
    (4, 2, 2, 80, 10),  # partial, as in StableLM
    (3, 1, 3, 128, 32),  # partial, as in GLM
]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_float64(shape, norm, interleaved):
    *sizes, half = shape
    rotary = table(sizes[0], half)
    for dtype in DTYPES if shape in (SHAPES[0], SHAPES[-1]) else DTYPES[:1]:
        inputs, upstream = made(*sizes, dtype, norm=norm)
        check(call(rotary, interleaved), plain(rotary, interleaved), inputs, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "interleaved"), [(False, False), (True, False), (True, True)])
def test_reference_agrees_with_float64(norm, interleaved, dtype):
    rotary = table(5, 5)
    inputs, upstream = made(5, 2, 3, 18, dtype, norm=norm)
    exact = run(plain(rotary, interleaved), [x.double() for x in inputs], upstream)
    eager = run(plain(rotary, interleaved), inputs, upstream)
    with reference():
        ours = run(call(rotary, interleaved), inputs, upstream)
    for kind in range(2):
        assert_accurate(ours[kind], eager[kind], exact[kind])


@pytest.mark.parametrize(("features", "half", "interleaved"), [(64, 32, False), (256, 96, True)])
def test_programs_of_many_steps(features, half, interleaved, monkeypatch):
    steps, plain_launch = [], rope.launch
    monkeypatch.setattr(rope, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(rope, "_tiles", lambda **kind: rope._Tiles(1, 1, 2))

    def launch(kernel, grid, device, *args, **settings):
        if "ROWS" in settings and "K" in settings:
            heads = settings["K"] * (settings["G"] + 1 + ("WEIGHTS" in settings))
            steps.append(31 * heads / settings["ROWS"] / grid[0])
        plain_launch(kernel, grid, device, *args, **settings)

    monkeypatch.setattr(rope, "launch", launch)
    rotary = table(31, half)
    inputs, upstream = made(31, 1, 2, features, torch.bfloat16, norm=True)
    check(call(rotary, interleaved), plain(rotary, interleaved), inputs, upstream)
    assert len(steps) == 2
    assert min(steps) > 2


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("given", [(True, False, False), (False, True, False), (False, False, True)])
def test_outputs_without_a_gradient(norm, given):
    rotary = table(4, 16)
    inputs, upstream = made(4, 1, 2, 32, torch.float32, norm=norm)
    upstream = [grad if wanted else None for grad, wanted in zip(upstream, given, strict=True)]

    def zero_filled(*args):
        outs = oracle(*args, rotary=rotary)
        nothing = sum((0 * x.sum() for x in args), start=torch.zeros((), device=DEVICE))
        return tuple(out + nothing for out in outs)

    check(call(rotary), zero_filled, inputs, upstream)


@pytest.mark.parametrize("path", [kernels, reference])
def test_strided_inputs_and_gradients(path):
    """Rows of qkv further apart, gradients in other orders and not aligned: as with dense ones, bit for bit."""
    rotary = table(6, 16)
    (qkv, *weights), upstream = made(6, 2, 2, 32, torch.bfloat16, norm=True)
    wide = torch.randn(6, 2 * 4 * 32 + 24, device=DEVICE).bfloat16()
    wide[:, : 2 * 4 * 32] = qkv.flatten(1)
    spaced = wide[:, : 2 * 4 * 32].unflatten(1, (2, 4, 32))
    odd = torch.zeros(6, 4, 33, device=DEVICE).bfloat16()[:, :, 1:]
    upstream = [grad.bfloat16() for grad in upstream]
    strided = [
        odd.copy_(upstream[0]),
        upstream[1].transpose(0, 1).contiguous().transpose(0, 1),
        upstream[2].mT.contiguous().mT,
    ]
    found = []
    for x, grads in ((qkv, upstream), (spaced, strided)):
        leaf = x.detach().requires_grad_()
        norms = [weight.clone().requires_grad_() for weight in weights]
        with path(), guarded():
            outs = rotate_qkv(leaf, rotary, *norms, EPS)
            found.append([*outs, *torch.autograd.grad(outs, [leaf, *norms], grads)])
    for dense, other in zip(*found, strict=True):
        assert torch.equal(dense, other)


@pytest.mark.parametrize("path", [kernels, reference])
def test_tables_and_weights_that_are_not_dense(path):
    """As with dense ones, bit for bit."""
    (qkv, *weights), upstream = made(6, 2, 2, 32, torch.bfloat16, norm=True)
    dense = table(6, 16)
    tables = RotaryTable(*torch.cat([dense.cos, dense.sin], 1).chunk(2, dim=1))
    found = []
    for rotary, norms in ((dense, weights), (tables, [torch.stack([w, w + 1], 1)[:, 0] for w in weights])):
        leaves = [x.detach().requires_grad_() for x in (qkv, *norms)]
        with path(), guarded():
            outs = rotate_qkv(leaves[0], rotary, *leaves[1:], EPS)
            found.append([*outs, *torch.autograd.grad(outs, leaves, [grad.bfloat16() for grad in upstream])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_weights_alone(monkeypatch):
    """The kernel leaves out that of the fused tensor, as large as the tensor."""
    rotary, shapes, plain_launch = table(5, 16), [], rope.launch

    def launch(kernel, grid, device, *args, **settings):
        shapes.extend(tuple(x.shape) for x in args if torch.is_tensor(x))
        plain_launch(kernel, grid, device, *args, **settings)

    (qkv, *weights), upstream = made(5, 2, 2, 32, torch.float32, norm=True)
    found = []
    for leaves in ([qkv.clone(), *weights], weights):
        for leaf in leaves:
            leaf.requires_grad_()
        with kernels(), guarded():
            outs = rotate_qkv(leaves[0] if len(leaves) == 3 else qkv, rotary, *weights, EPS)
            monkeypatch.setattr(rope, "launch", launch)
            shapes.clear()
            found.append(torch.autograd.grad(outs, leaves, upstream, allow_unused=True)[-2:])
            monkeypatch.undo()
        assert shapes.count(tuple(qkv.shape)) == len(leaves) - 1
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("path", [kernels, reference])
@pytest.mark.parametrize("norm", [False, True])
def test_values_are_a_view_with_one_gradient(path, norm):
    rotary = table(4, 16)
    (qkv, *weights), upstream = made(4, 2, 2, 32, torch.float32, norm=norm)
    root = qkv.clone().requires_grad_()
    with path():
        fused = 2 * root
        q, k, v = rotate_qkv(fused, rotary, *weights)
    assert v.data_ptr() == fused[:, :, 3].data_ptr()
    assert v.stride() == fused[:, :, 3].stride()
    assert q.is_contiguous()
    assert k.is_contiguous()
    # Used twice, beside another use of the fused tensor.
    loss = (v * upstream[2]).sum() + (v.square() * upstream[2]).sum() + fused.sum()
    (grad,) = torch.autograd.grad(loss, root)
    expected = torch.full_like(qkv, 2.0)
    expected[:, :, 3] += 2 * upstream[2] * (1 + 2 * v.detach())
    torch.testing.assert_close(grad, expected)
    with pytest.raises(RuntimeError, match="modified inplace"):
        v.mul_(2)  # would change what the backward needs


def test_frozen_weights_and_no_tokens():
    rotary = table(3, 16)
    (qkv, *weights), _ = made(3, 1, 2, 32, torch.float32, norm=True)
    leaf = qkv.clone().requires_grad_()
    with kernels():
        outs = rotate_qkv(leaf, rotary, *weights)
        (grad,) = torch.autograd.grad(outs, leaf, [torch.ones_like(out) for out in outs])
    with reference():
        outs = rotate_qkv(leaf, rotary, *weights)
        (expected,) = torch.autograd.grad(outs, leaf, [torch.ones_like(out) for out in outs])
    torch.testing.assert_close(grad, expected)
    norms = [weight.requires_grad_() for weight in weights]
    empty = qkv[:0].clone().requires_grad_()
    with kernels():
        outs = rotate_qkv(empty, table(0, 16), *norms)
        grads = torch.autograd.grad(outs, [empty, *norms], [torch.ones_like(out) for out in outs])
    assert [out.shape for out in outs] == [(0, 2, 32), (0, 1, 32), (0, 1, 32)]
    assert grads[0].shape == (0, 1, 4, 32)
    assert not grads[1].any()
    assert not grads[2].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_idle_lanes_and_values_that_are_not_finite():
    """Lanes without a row would have no norm without eps; they must not reach the sums, nor values the rotation."""
    rotary = table(3, 16)
    (qkv, *weights), upstream = made(3, 1, 1, 32, torch.float32, norm=True)
    leaves = [x.requires_grad_() for x in (qkv, *weights)]
    upstream[2][0, 0, :2] = torch.tensor([torch.inf, -0.0])
    with kernels():
        outs = rotate_qkv(qkv, rotary, *weights, 0.0)
        grads = torch.autograd.grad(outs, leaves, upstream)
    assert grads[1].isfinite().all()
    assert grads[2].isfinite().all()
    assert torch.equal(grads[0][:, :, 2], upstream[2])
    assert grads[0][:, :, :2].isfinite().all()


def test_refuses_what_does_not_go_together():
    qkv, weight = torch.zeros(3, 1, 4, 32), torch.ones(32)
    narrow = RotaryTable(torch.zeros(3, 16), torch.zeros(3, 16))
    for args, message in (
        ((qkv[0], narrow), "not \\[T, K, G"),
        ((qkv[:2], narrow), "2 tokens have heads of 32"),
        ((qkv[..., :30], narrow), "heads of 30"),
        ((qkv, narrow, weight), "both or neither"),
        ((qkv, narrow, weight, weight[:5]), "shape \\[5\\]"),
        ((qkv, narrow, weight, weight.half()), "dtypes torch.float32 and torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            rotate_qkv(*args)


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    qkv = torch.randn(1, 1, 3, 8)
    frequencies = 1 / 10 ** torch.arange(4)

    def score(at_q, at_k):
        tables = (rotary_table(torch.tensor([at], dtype=torch.int32), frequencies) for at in (at_q, at_k))
        (q, _, _), (_, k, _) = (rotate_qkv(qkv, rotary) for rotary in tables)
        return (q * k).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-2
