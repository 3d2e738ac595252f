"""`lora_linear` without its values, as layers that run again have it, and with a recipe in place of its input."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.batch import DropoutCounters
from gapless.kernels.activation import swiglu, swiglu_recipe
from gapless.kernels.lora import InputDropout, WideWeight, lora_linear
from gapless.kernels.rms_norm import rms_norm, rms_norm_recipe
from gapless.kernels.runtime import empty_rows
from gapless.models.linear import Part
from kernels.tools import DEVICE, kernels

TOKENS, CHANNELS, SPARE = 9, 40, 24
PARTS = (Part("gate", 0, 0, 1), Part("up", 0, 1, 1))


class Products(TorchDispatchMode):
    """Counts torch's matrix products."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def random(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def dropout(p):
    column = torch.arange(TOKENS, dtype=torch.int32, device=DEVICE)
    return InputDropout(p, DropoutCounters(column[3:5], column // 4, column), 1, 2, 0) if p else None


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("spare", [0, SPARE])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_without_values(p, spare, added):
    a = random(10, CHANNELS, dtype=torch.float32).requires_grad_()
    b = [random(8 + part, 5, dtype=torch.float32)[:8].requires_grad_() for part in range(2)]
    drop, found = dropout(p), []
    for value in (True, False):
        x = empty_rows(random(TOKENS, CHANNELS), CHANNELS, spare).copy_(random(TOKENS, CHANNELS)).requires_grad_()
        residual = random(TOKENS, 16).requires_grad_() if added else None
        wide = WideWeight(random(2, 8, CHANNELS), 10, PARTS)
        assert wide.spare == SPARE
        settings = {"residual": residual, "dropout": drop, "spare": spare, "value": value}
        with kernels():
            with Products() as products:
                out = lora_linear(x, wide, a, b, 0.5, **settings)
            assert out.shape == (TOKENS, 16)
            assert products.made == value
            inputs = [x, a, *b, *([residual] if added else [])]
            found.append(torch.autograd.grad(out, inputs, random(TOKENS, 16)))
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("maker", ["norm", "swiglu"])
def test_gradients_of_an_input_that_is_made_again(maker, p):
    """The same bits, and the input is not kept, though x A^T has come to lie behind it."""
    a = random(10, CHANNELS, dtype=torch.float32).requires_grad_()
    b = [random(8 + part, 5, dtype=torch.float32)[:8].requires_grad_() for part in range(2)]
    weight = 1 + random(CHANNELS)
    source = random(TOKENS, CHANNELS if maker == "norm" else 2 * CHANNELS).requires_grad_()
    wide, found, alive = WideWeight(random(2, 8, CHANNELS), 10, PARTS), [], []
    for again in (False, True):
        with kernels():
            if maker == "norm":
                x, recipe = rms_norm(source, weight, 1e-6, spare=SPARE), rms_norm_recipe(source, weight, 1e-6)
            else:
                x, recipe = swiglu(source, spare=SPARE), swiglu_recipe(source)
            settings = {"dropout": dropout(p), "spare": SPARE, "recipe": recipe if again else None}
            out = lora_linear(x, wide, a, b, 0.5, **settings)
            kept = StorageWeakRef(x.untyped_storage())
            del x, recipe, settings
            gc.collect()  # of Triton's interpreter
            alive.append(not kept.expired())
            found.append(torch.autograd.grad(out, [source, a, *b], random(TOKENS, 16)))
    assert alive == [True, False]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
