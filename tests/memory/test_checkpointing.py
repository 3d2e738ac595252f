"""Layers that run again in the backward: the bits of layers that keep everything, and little that is kept."""

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from gapless.adapters.lora import unchanged
from gapless.batch import BatchLayout
from gapless.memory.checkpointing import apply_checkpointing
from gapless.training.graph import GraphStep
from gapless.training.optim import AdamW
from gapless.training.step import mean_loss, train_step
from tiny import tiny_model
from training.steps import Again, assert_same_state, make_training, varied_steps

LAYOUT = BatchLayout(rows=2, row_tokens=24, row_documents=4)


def pair(kind, dtype="fp32", **settings):
    """The same training twice: of layers that keep everything, and of checkpointed ones."""
    plain, full = (make_training(kind, dtype=dtype, **settings) for _ in range(2))
    apply_checkpointing(full[0].stages[0], "full")
    return plain, full


def trained(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lora", {}),
        ("full", {"tie_word_embeddings": True}),
        ("full", {"family": "qwen3"}),
        ("lora", {"family": "qwen2", "tie_word_embeddings": True}),
    ],
)
def test_steps_are_the_same_bits(kind, dtype, settings):
    """Gradients accumulated over micro-batches, with dropout on adapters."""
    (plain, plain_optimizer), (full, full_optimizer) = pair(kind, dtype, **settings)
    for step in varied_steps(LAYOUT, 4):
        with unchanged(*plain.stages), unchanged(*full.stages):
            expected, found = train_step(plain, plain_optimizer, step), train_step(full, full_optimizer, step)
        assert torch.equal(found.values, expected.values)
    assert_same_state(full_optimizer, plain_optimizer)
