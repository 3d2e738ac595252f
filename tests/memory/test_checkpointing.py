"""Layers that run again in the backward: the bits of layers that keep everything, and little that is kept."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from runs import assert_same_outcome, make_config, outcome, write_inputs
from steps import Again, assert_same_state, make_training, varied_steps
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import gapless
from gapless.adapters.lora import unchanged
from gapless.batch import BatchLayout
from gapless.config import MemoryConfig
from gapless.memory.checkpointing import apply_checkpointing
from gapless.models.decoder import DecoderLayer
from gapless.models.mlp import MLP
from gapless.training.callbacks import Callback
from gapless.training.graph import GraphStep
from gapless.training.step import mean_loss, train_step
from kernels.tools import kernels

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
LAYOUT = BatchLayout(rows=2, row_tokens=24, row_documents=4)


def pair(kind, **settings):
    """The same training twice: of layers that keep everything, and of checkpointed ones."""
    plain, full = (make_training(kind, **settings) for _ in range(2))
    apply_checkpointing(full[0].stages[0], "full")
    return plain, full


def models(kind, **settings):
    return [model.stages[0] for model, _ in pair(kind, **settings)]


def batches(count):
    """Micro-batches with trained tokens."""
    found = [batch for step in varied_steps(LAYOUT, count) for batch in step.micro_batches if batch.num_trained]
    return found[:count]


def gradients(model):
    """Of all trained parameters, which are cleared."""
    found = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    assert all(value is not None for value in found.values())
    model.zero_grad(set_to_none=True)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def one_backward(model, batch):
    """The gradients of a micro-batch."""
    model.zero_grad(set_to_none=True)
    model.loss(batch).backward()
    return gradients(model)


@pytest.fixture
def runs(monkeypatch):
    """The layers that are computed, in order."""
    found, plain = [], DecoderLayer.compute

    def compute(self, *args, **settings):
        found.append(self.attention.layer)
        return plain(self, *args, **settings)

    monkeypatch.setattr(DecoderLayer, "compute", compute)
    return found


# ---- the same bits ----


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lora", {}),
        ("lora", {"family": "qwen2", "tie_word_embeddings": True}),
        ("full", {"tie_word_embeddings": True}),
        ("full", {"family": "qwen3"}),
    ],
)
def test_steps_have_the_same_bits(kind, settings, dtype):
    """With gradients accumulated over micro-batches, and dropout on adapters."""
    (plain, plain_optimizer), (full, full_optimizer) = pair(kind, dtype=dtype, **settings)
    for step in varied_steps(LAYOUT, 4):
        with unchanged(*plain.stages), unchanged(*full.stages):
            expected, found = train_step(plain, plain_optimizer, step), train_step(full, full_optimizer, step)
        assert torch.equal(found.values, expected.values)
    assert_same_state(full_optimizer, plain_optimizer)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_kernels_and_recorded_steps_have_the_same_bits(kind):
    """Adapters then are columns behind weights, and x A^T lies in the spare columns of the layer's own tensors."""
    with kernels():
        (plain, plain_optimizer), (full, full_optimizer) = pair(kind, dtype="bf16", **SMALL)
        layout = plain.stages[0].batch_layout(rows=1, row_tokens=16, row_documents=2)
        graphs = GraphStep(full, full_optimizer, layout, Again())
        steps = [varied_steps(layout, 3, accumulation=1)[1:] for _ in range(2)]
        for here, there in zip(*steps, strict=True):
            expected = train_step(plain, plain_optimizer, here)
            assert torch.equal(graphs(there).values, expected.values)
        assert_same_state(full_optimizer, plain_optimizer)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_a_backward(kind, order):
    results = []
    for model in models(kind):
        model.zero_grad(set_to_none=True)
        losses = [model.loss(batch) for batch in batches(2)]
        for index in order:
            losses[index].backward()
        results.append({str(index): loss.detach() for index, loss in enumerate(losses)} | gradients(model))
    assert_same(*results)


def test_an_evaluation_in_between(runs):
    """Of a model that has dropout when it trains."""
    results = []
    for model in models("lora"):
        model.zero_grad(set_to_none=True)
        loss = model.loss(batches(1)[0])
        model.eval()
        with torch.no_grad():
            model.loss(batches(2)[1])
        loss.backward()
        assert not any(module.training for module in model.modules())
        results.append(gradients(model))
    assert_same(*results)
    # Only what is to be differentiated runs again.
    assert runs == 2 * [0, 1, 2, 0, 1, 2] + [2, 1, 0]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradients_of_what_comes_in(kind):
    """As a later stage of a pipeline has them; in the first stage with adapters there are none."""
    results = []
    for model in models(kind):
        model.embed, batch = None, batches(1)[0]
        hidden = torch.randn(LAYOUT.tokens, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for value in model.parameters():
            value.requires_grad_(kind == "full" and value.requires_grad)
        out = model(hidden, batch.segments)
        (grad,) = torch.autograd.grad(out.square().sum(), hidden)
        results.append({"out": out.detach(), "grad": grad})
    assert_same(*results)


def test_gradients_that_are_asked_for():
    """Of some parameters; nothing accumulates."""
    results = []
    for model in models("lora"):
        model.zero_grad(set_to_none=True)
        wanted = {name: value for name, value in model.named_parameters() if "layers.1" in name and value.requires_grad}
        found = torch.autograd.grad(model.loss(batches(1)[0]), list(wanted.values()))
        results.append(dict(zip(wanted, found, strict=True)))
        assert all(value.grad is None for value in model.parameters())
    assert_same(*results)


def hear(heard, name, _):
    heard.append(name)


def test_hooks_run_once():
    """Hooks that change a gradient, and hooks that hear of it."""
    results = []
    for model in models("full"):
        heard = []
        for name, value in model.named_parameters():
            value.register_hook(lambda grad: 3 * grad)
            value.register_post_accumulate_grad_hook(partial(hear, heard, name))
        found = one_backward(model, batches(1)[0])
        assert sorted(heard) == sorted(found)
        results.append(found)
    assert_same(*results)


def test_a_backward_that_is_done_twice():
    results = []
    for model in models("lora"):
        model.zero_grad(set_to_none=True)
        loss = model.loss(batches(1)[0])
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same(*results)


# ---- what is kept ----


def kept(model, batch):
    """Bytes that the layers' forward keeps for the backward: [layer inputs, all], tables and parameters left out."""
    left_out = {value.untyped_storage().data_ptr() for value in (*model.parameters(), batch.buffer)}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            storages[storage.data_ptr()] = storage  # held, so that no other comes to lie there
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(batch.tokens, batch.segments)
    return sum(storage.nbytes() for storage in storages.values()), hidden


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_layer_keeps_its_input_alone(kind):
    plain, full = models(kind, dtype="bf16")
    (batch,) = batches(1)
    most, _ = kept(plain, batch)
    least, _ = kept(full, batch)
    stream = LAYOUT.tokens * 48 * 2
    # The inputs of three layers and of the last norm, and what that keeps for each row.
    assert least == 4 * stream + LAYOUT.tokens * 4
    assert most > 8 * least


def test_what_is_made_again_is_not_kept():
    """With kernels and adapters: outputs of norms and activation, and queries and keys as projected."""
    with kernels():
        model, _ = models("lora", dtype="bf16", **SMALL | {"num_hidden_layers": 1}, attention_bias=None)
        layout = model.batch_layout(rows=1, row_tokens=16, row_documents=2)
        batch = next(batch for step in varied_steps(layout, 2) for batch in step.micro_batches if batch.num_trained)
        model(batch.tokens, batch.segments)  # weights find their room
        found, _ = kept(model, batch)
    stream = 3 * 2 * 32 + 2 * 4  # of three norms; the first, which needs no gradient, keeps no scales
    attention = 2 * (32 + 2 * 16) + 2 * (32 + 32) + 2 * 4  # q, k, v; the output with room for x A^T; log-sum-exp
    gate_up, inner, tables = 2 * 2 * 32, 2 * 4 * (3 + 1 + 2 + 1), 2 * 4 * 8
    assert found == 16 * (stream + attention + gate_up + inner + tables)


def test_what_a_layer_makes_is_freed(monkeypatch):
    """Before the next one runs, in the forward and in the backward; without the help of the garbage collector."""
    (full,) = models("full")[1:]
    made, alive = [], []
    plain = MLP.forward

    def forward(self, x, *args, **settings):
        alive.append(sum(other() is not None for other in made))
        made.append(weakref.ref(x))
        return plain(self, x, *args, **settings)

    monkeypatch.setattr(MLP, "forward", forward)
    gc.collect()
    gc.disable()
    try:
        full.loss(batches(1)[0]).backward()
    finally:
        gc.enable()
    assert alive == [0] * 6
    assert not any(other() is not None for other in made)


class Products(TorchDispatchMode):
    """Multiplications of matrix products, attention's left out."""

    multiplied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            self.multiplied += args[-2].numel() * args[-1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_layer_runs_again_but_for_its_last_product(kind):
    """Whose values nobody needs."""
    (plain, full), (batch,) = models(kind), batches(1)
    made = []
    for model in (plain, full):
        with Products() as products:
            model.loss(batch).backward()
        made.append(products.multiplied)
    with Products() as forward, torch.no_grad():
        full(batch.tokens, batch.segments)
    last = 3 * LAYOUT.tokens * 80 * 48 if kind == "full" else 0  # adapters leave it out where kernels run
    assert made[1] - made[0] == forward.multiplied - last


def test_evaluation_runs_no_layer_again(runs):
    model, _ = make_training("lora")
    apply_checkpointing(model.stages[0], "full")
    mean_loss(model, batches(1))
    with torch.inference_mode():
        model.stages[0].loss(batches(1)[0])
    assert runs == 2 * [0, 1, 2]


def test_none_takes_it_back(runs):
    _, full = models("lora")
    apply_checkpointing(full, "none")
    one_backward(full, batches(1)[0])
    assert runs == [0, 1, 2]


# ---- what is refused ----


def test_a_second_derivative_is_refused():
    _, full = models("lora")
    loss = full.loss(batches(1)[0])
    with pytest.raises(RuntimeError, match="a checkpointed layer has first derivatives only: leave create_graph out"):
        torch.autograd.grad(loss, [full.layers["0"].mlp.down.lora_a], create_graph=True)


@pytest.mark.parametrize("what", ["weight", "another", "batch"])
def test_what_has_changed_is_refused(what):
    _, full = models("full")
    (batch,) = batches(1)
    loss = full.loss(batch)
    norm = full.layers["1"].mlp_norm
    if what == "weight":
        torch.autograd.graph.increment_version([norm.weight])  # as an optimizer's kernels do
    elif what == "another":
        other = torch.nn.Parameter(norm.weight.detach().clone())
        while other._version < norm.weight._version:
            torch.autograd.graph.increment_version([other])
        norm.weight = other
    else:
        batch.buffer.add_(0)
    with pytest.raises(RuntimeError, match="changed between a layer's forward and its backward"):
        loss.backward()


# ---- a run ----


class StopAt(Callback):
    def on_step_end(self, trainer, metrics):
        if metrics["step"] == 4:
            trainer.stop()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_run_that_goes_on_with_the_other_policy(tmp_path, runs, kind):
    inputs = write_inputs(tmp_path)
    gapless.train(make_config(inputs, tmp_path / "none", kind))
    once = len(runs)
    config = make_config(inputs, tmp_path / "both", kind)
    gapless.Trainer(config, callbacks=[StopAt()]).train()
    gapless.train(replace(config, memory=MemoryConfig(checkpointing="full")))
    assert len(runs) == 2 * once + 2 * 2 * (10 - 4)  # layers, micro-batches, steps
    assert_same_outcome(outcome(tmp_path / "both"), outcome(tmp_path / "none"))
