"""RMS norm and gated activations: kernels and references against float64, values and gradients."""

import pytest
import torch
from torch.nn import functional

from gapless.kernels import rms_norm as norm_file
from gapless.kernels.activation import geglu, swiglu
from gapless.kernels.rms_norm import WIDEST, rms_norm
from gapless.kernels.runtime import spare_columns
from kernels.tools import DEVICE, check, guarded, kernels, reference, run

EPS = 1e-3
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PATHS = {"kernel": kernels, "reference": reference}


def randn(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, device=DEVICE)).to(dtype)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- RMS norm ----


def plain_norm(x, weight, eps=EPS):
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def norm(x, weight):
    return rms_norm(x, weight, EPS)


@pytest.fixture(params=[0, 1])
def programs(request, monkeypatch):
    """Programs with a tile each; and one a multiprocessor, that go on."""
    plain = norm_file._tiles
    if request.param:
        monkeypatch.setattr(norm_file, "_tiles", lambda *args: plain(*args)._replace(programs=1, stages=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (37, 33), (29, 64), (5, 3, 100), (9, 576), (0, 16), (6, 1500), (2, 9000)])
def test_norm_agrees_with_float64(shape, dtype, programs):
    inputs = [randn(*shape, dtype=dtype, scale=3), 1 + randn(shape[-1], dtype=dtype)]
    check(norm, plain_norm, inputs, [randn(*shape)])


def test_norm_of_a_weight_of_another_dtype():
    inputs = [randn(5, 48, dtype=torch.bfloat16), 1 + randn(48)]
    check(norm, lambda x, weight: plain_norm(x.to(weight.dtype), weight).to(x.dtype), inputs, [randn(5, 48)])


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_norm_gives_the_gradients_that_are_wanted(trained, programs):
    x, weight = (x.requires_grad_(wanted) for x, wanted in zip((randn(9, 33), randn(33)), trained, strict=True))
    upstream = randn(9, 33)
    both = torch.autograd.grad(
        plain_norm(*(leaves := [x.detach().requires_grad_() for x in (x, weight)])), leaves, upstream
    )
    with kernels(), guarded():
        norm(x, weight).backward(upstream)
    for leaf, wanted, expected in zip((x, weight), trained, both, strict=True):
        assert (leaf.grad is not None) == wanted
        if wanted:
            torch.testing.assert_close(leaf.grad, expected)


STRIDED = {
    "rows apart": lambda x: x.view(30, 6, 8)[:, 2],
    "slices": lambda x: x.view(10, 3, 6, 8)[:, :, 1:4],
    "slices of slices": lambda x: x.view(10, 3, 6, 8)[:6, :2, 1:4],
    "transposed": lambda x: x.view(10, 3, 6, 8).transpose(1, 2),
    "features apart": lambda x: x.view(90, 16)[:, ::2],
    "columns": lambda x: x.view(16, 90).T,
    "expanded": lambda x: x.view(10, 3, 6, 8)[:, :1, :1].expand(10, 3, 6, 8),
    "one row": lambda x: x.view(180, 8)[:1].expand(7, 8),
    "one number": lambda x: x[:1, :1].expand(10, 8),
}


@pytest.mark.parametrize("of", ["x", "gradient"])
@pytest.mark.parametrize("kind", STRIDED)
def test_norm_of_strided_tensors(kind, of):
    strided = STRIDED[kind](randn(30, 48))
    features = strided.shape[-1]
    other, weight = randn(*strided.shape), 1 + randn(features)
    x, upstream = (strided, other) if of == "x" else (other, strided)
    expected = torch.autograd.grad(
        plain_norm(*(leaves := [x.detach().requires_grad_(), weight.requires_grad_()])), leaves, upstream.contiguous()
    )
    with kernels(), guarded():
        out = norm(leaves[0], weight)
        found = torch.autograd.grad(out, leaves, upstream)
    assert out.is_contiguous()
    torch.testing.assert_close(out, plain_norm(*leaves))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("path", PATHS)
def test_norm_of_extreme_rows(path):
    x = torch.tensor([[0.0] * 4, [1e-25] * 4, [1e18] * 4], device=DEVICE, requires_grad=True)
    with PATHS[path]():
        out = rms_norm(x, torch.ones(4, device=DEVICE), 1e-6)
        (grad,) = torch.autograd.grad(out, x, torch.tensor([1.0, 0, 0, 0], device=DEVICE).expand(3, 4))
    torch.testing.assert_close(out, torch.tensor([[0.0] * 4, [1e-22] * 4, [1.0] * 4], device=DEVICE))
    row = torch.tensor([1e3, 0, 0, 0])
    expected = torch.stack([row, row, torch.tensor([0.75e-18, *[-0.25e-18] * 3])]).to(DEVICE)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-25)


def test_norm_sums_the_weights_gradient_in_a_fixed_order(programs):
    x, weight = randn(201, 40), randn(40).requires_grad_()
    upstream = randn(201, 40)
    with kernels():
        first, second = (torch.autograd.grad(norm(x, weight), weight, upstream)[0] for _ in range(2))
    assert torch.equal(first, second)


# ---- activations ----


def silu_gate(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_gate(approximate):
    def gated(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate=approximate) * up

    return gated


ACTIVATIONS = {
    "swiglu": (swiglu, silu_gate),
    "geglu": (lambda x, **options: geglu(x, approximate="none", **options), gelu_gate("none")),
    "geglu_tanh": (lambda x, **options: geglu(x, approximate="tanh", **options), gelu_gate("tanh")),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_agree_with_float64(kind, dtype):
    for rows, features in ((2, 9), (45, 33), (7, 136), (2, 1536), (3, 1100), (0, 8)):
        check(*ACTIVATIONS[kind], [randn(rows, 2 * features, dtype=dtype, scale=4)], [randn(rows, features)])


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_references_of_activations_agree_with_float64(kind):
    fast, plain = ACTIVATIONS[kind]
    x, upstream = randn(300, 14, scale=4), randn(300, 7)
    with reference():
        found = run(fast, [x], [upstream])
    torch.testing.assert_close(found, run(plain, [x.double()], [upstream]), check_dtype=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_extremes(kind, path):
    for dtype in (torch.float32, torch.bfloat16):
        gate = torch.tensor([-1e4, 1e4, -100.0, 100.0, -88.5, 0.0], device=DEVICE, dtype=dtype)
        x = torch.stack([gate, torch.full_like(gate, 3)]).view(1, -1).requires_grad_()
        with PATHS[path]():
            out = ACTIVATIONS[kind][0](x)
            (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        torch.testing.assert_close(out, 3 * gate.relu()[None])
        slope = 3 * torch.tensor([0.0, 1, 0, 1, 0, 0.5], device=DEVICE, dtype=dtype)
        torch.testing.assert_close(grad, torch.cat([slope, gate.relu()])[None])


@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh"])
def test_activations_of_strided_rows(kind):
    fast, plain = ACTIVATIONS[kind]
    for view in (lambda x: x[:, 3:23], lambda x: x[::2, 8:28], lambda x: x[:, 1:29:2], lambda x: x[:1].expand(7, 30)):
        x = view(randn(9, 30)).detach().requires_grad_()
        upstreams = [view(randn(9, 30))[:, : x.shape[1] // 2], randn(1, 1).expand(x.shape[0], x.shape[1] // 2)]
        for upstream in upstreams:
            (expected,) = torch.autograd.grad(plain(x), x, upstream.contiguous())
            with kernels(), guarded():
                out = fast(x)
                (grad,) = torch.autograd.grad(out, x, upstream)
            torch.testing.assert_close(out, plain(x))
            torch.testing.assert_close(grad, expected)


# ---- both ----


@pytest.mark.parametrize("path", PATHS)
def test_spare_columns(path):
    x, weight = randn(5, 24), randn(24)
    for fast in (*(fast for fast, _ in ACTIVATIONS.values()), lambda x, **options: rms_norm(x, weight, EPS, **options)):
        with PATHS[path](), guarded():
            leaf = x.clone().requires_grad_()
            out, dense = fast(leaf, spare=16), fast(x)
            (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        assert out.shape == dense.shape
        assert out.stride() == (out.shape[1] + 16, 1)
        assert spare_columns(out) == 16
        whole = out.detach().as_strided((5, out.shape[1] + 16), out.stride())
        torch.testing.assert_close(out, dense, rtol=0, atol=0)
        assert whole[:, out.shape[1] :].isnan().all(), "scratch memory was written"
        assert grad.isfinite().all()
        whole[:, out.shape[1] :] = 0  # as lora_linear does, without telling autograd


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\[3\]: rows have 4 features"):
        rms_norm(randn(2, 4), randn(3), EPS)
    with pytest.raises(ValueError, match="spare"):
        rms_norm(randn(2, 2, 4), randn(4), EPS, spare=8)
    with pytest.raises(ValueError, match="-2 spare columns"):
        rms_norm(randn(2, 4), randn(4), EPS, spare=-2)
    with pytest.raises(ValueError, match="0 features"):
        rms_norm(torch.tensor(1.0), randn(1), EPS)
    with kernels(), pytest.raises(ValueError, match=f"{WIDEST + 1} features"):
        rms_norm(randn(1, WIDEST + 1), randn(WIDEST + 1), EPS)
    with pytest.raises(ValueError, match=r"\[2, 3\], not"):
        swiglu(randn(2, 3))
    with pytest.raises(ValueError, match="erf"):
        geglu(randn(2, 4), approximate="erf")
    for path in (kernels, reference):
        for function in (swiglu, lambda x, spare: geglu(x, approximate="none", spare=spare)):
            with path(), pytest.raises(ValueError, match="-2 spare columns"):
                function(randn(2, 4), spare=-2)
            with path(), pytest.raises(ValueError, match=r"\[1, 2, 4\], not \[T, 2F\]"):
                function(randn(1, 2, 4), spare=8)


def test_gradients_of_gradients_are_refused():
    x = randn(2, 4).requires_grad_()
    for out in (rms_norm(x, randn(4), EPS), swiglu(x)):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()
