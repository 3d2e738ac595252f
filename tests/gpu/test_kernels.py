"""What of the kernels needs a GPU; tests/kernels runs there too (`python -m pytest tests/kernels`) and is not repeated.

sanitize.py beside this is for compute-sanitizer.
"""

import numpy as np
import pytest
import torch

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import Document, build_batch
from gapless.config import AdapterConfig
from gapless.kernels.activation import swiglu
from gapless.kernels.cross_entropy import linear_cross_entropy
from gapless.kernels.rms_norm import rms_norm
from gapless.kernels.runtime import forced
from gapless.models.views import hf_views
from tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
LENGTHS = ((100, 1, 27), (64, 0, 40), (128,))


def decoder(kind, dtype="bf16", dropout=0.0):
    """Qwen3's layers (norms on queries and keys), with adapters that do something, or all weights trained."""
    model = tiny_model("qwen3", dtype=dtype, hidden_size=72, intermediate_size=200, head_dim=32, vocab_size=517)
    model.train()
    if kind == "lora":
        apply_lora(model, AdapterConfig(r=4, lora_dropout=dropout), seed=0)
        generator = torch.Generator().manual_seed(1)
        for view in adapter_views(model):
            view.write(view.parameter, 0.1 * torch.randn(view.shape, generator=generator))
    return model.cuda()


def batch_of(model):
    """Three packed rows, with a document of one token and an empty one."""
    draw = np.random.default_rng(0)

    def document(length):
        return Document(draw.integers(0, 517, length).astype(np.int32), draw.random(length) < 0.7)

    rows = [[document(length) for length in lengths] for lengths in LENGTHS]
    layout = model.batch_layout(rows=len(rows), row_tokens=128, row_documents=4)
    return build_batch(layout, rows, seed=3, step=5).to("cuda")


def gradients(kind, dtype, path):
    """Loss and all gradients of a step, the latter as one float64 vector."""
    with forced(path):
        model = decoder(kind, dtype)
        loss = model.loss(batch_of(model))
        loss.backward()
    views = adapter_views(model) if kind == "lora" else hf_views(model)
    found = {view.name: view.parameter.grad.double().flatten() for view in views}
    return loss.detach().double(), torch.cat([found[name] for name in sorted(found)])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_step_is_as_exact_as_with_references(kind):
    exact_loss, exact = gradients(kind, "fp32", "reference")
    eager_loss, eager = gradients(kind, "bf16", "reference")
    loss, ours = gradients(kind, "bf16", "triton")
    assert (ours - exact).norm() <= 1.5 * (eager - exact).norm()
    assert (loss - exact_loss).abs() <= 2 * (eager_loss - exact_loss).abs() + 1e-3 * exact_loss


def test_a_step_in_float32_is_that_of_references():
    for kind in ("lora", "full"):
        exact_loss, exact = gradients(kind, "fp32", "reference")
        loss, ours = gradients(kind, "fp32", "triton")
        assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)
        assert (ours - exact).norm() <= 1e-4 * exact.norm()


def test_a_hundred_repeats_have_the_same_bits():
    model = decoder("lora", dropout=0.3)
    batch = batch_of(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = None
    for _ in range(100):
        loss = model.loss(batch)
        found = [loss.detach(), *torch.autograd.grad(loss, trained)]
        if first is None:
            first = found
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_forward_and_backward_wait_for_nothing(kind):
    model = decoder(kind)
    batch = batch_of(model)
    model.loss(batch).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.loss(batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- more than 2^31 elements: what 32-bit offsets would not reach ----


def assert_last_rows(function, x, rows=3):
    """Output and gradient of the last rows are those of a call with these rows alone."""
    grad = torch.randn(1, device="cuda", dtype=x.dtype)
    out = function(x)
    (found,) = torch.autograd.grad(out, x, grad.expand_as(out))
    last = x.detach()[-rows:].clone().requires_grad_()
    expected = function(last)
    (wanted,) = torch.autograd.grad(expected, last, grad.expand_as(expected))
    torch.testing.assert_close(out[-rows:], expected, rtol=0, atol=0)
    torch.testing.assert_close(found[-rows:], wanted, rtol=0, atol=0)


def large(columns):
    rows = 2**31 // columns + 5
    return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()


def test_large_norm():
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    assert_last_rows(lambda x: rms_norm(x, weight, 1e-5), large(4096))


def test_large_activation():
    assert_last_rows(swiglu, large(8192))


def test_large_logits():
    vocabulary, width = 128256, 64
    tokens = 2**31 // vocabulary + 9
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).mul_(0.1).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device="cuda", dtype=torch.int32)
    results = []
    for chunk in (tokens, 512):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
        results.append([loss.detach(), *torch.autograd.grad(loss, (hidden, weight))])
    for whole, pieces in zip(*results, strict=True):
        assert (whole.float() - pieces.float()).norm() <= 4e-3 * pieces.float().norm()
