"""Tensor parallelism gives one process's losses and gradients, and leaves frozen and tied what was.

Every case runs on the ranks of one call and once here, whole. What the ranks have is put together by its name in files.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from pool import run
from torch import distributed

from gapless.adapters.lora import adapted_modules, adapter_views, apply_lora
from gapless.batch import Document, build_batch
from gapless.config import AdapterConfig, ParallelConfig
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import hf_views
from gapless.models.weights import materialise
from gapless.parallel.mesh import Mesh, build_mesh
from gapless.parallel.tensor import apply_tensor, check_tensor, partial_parameters
from tiny import tiny_config, tiny_model

TOKENS = 48


@dataclass(frozen=True)
class Case:
    """A model and how it is cut."""

    family: str = "llama"
    lora: bool = False
    saved: tuple[str, ...] = ()
    sequence_parallel: bool = True
    on_meta: bool = True
    """Cut before it has weights, and each rank then reads its boxes."""
    architecture: dict[str, object] = field(default_factory=dict)


CASES = {
    # llama with biases on all layers and a vocabulary that does not divide, qwen3 with norms on queries and keys
    "full": Case(architecture={"vocab_size": 129}),
    "full, whole stream": Case(sequence_parallel=False, on_meta=False, architecture={"vocab_size": 129}),
    "full, tied": Case("qwen3", on_meta=False, architecture={"tie_word_embeddings": True}),
    "full, tied, whole stream": Case("qwen3", sequence_parallel=False, architecture={"tie_word_embeddings": True}),
    "lora": Case("qwen3", lora=True),
    "lora, whole stream": Case(lora=True, sequence_parallel=False, on_meta=False),
    "lora, saved": Case(lora=True, saved=("embed_tokens", "lm_head"), architecture={"vocab_size": 129}),
    "lora, tied": Case(
        "qwen2", lora=True, saved=("embed_tokens", "lm_head"), architecture={"tie_word_embeddings": True}
    ),
}
FOUR_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 129}
ON_FOUR = {"full": Case("qwen3", architecture=FOUR_HEADS), "lora": Case("qwen3", lora=True, architecture=FOUR_HEADS)}


# ---- what runs whole and on the ranks ----


def whole_model(case):
    model = tiny_model(case.family, num_hidden_layers=2, **case.architecture)
    if case.lora:
        apply_lora(model, adapter_config(case), seed=3)
        generator = torch.Generator().manual_seed(5)
        for view in adapter_views(model):
            if "lora_B" in view.name:
                view.write(view.local, 0.2 * torch.randn(view.shape, generator=generator))
    return model


def adapter_config(case):
    return AdapterConfig(r=4, lora_dropout=0.1, modules_to_save=case.saved)


def cut_model(case, mesh):
    if not case.on_meta:
        model = whole_model(case)
        apply_tensor(model, mesh, sequence_parallel=case.sequence_parallel)
        return model
    config = tiny_config(case.family, num_hidden_layers=2, **case.architecture)
    model = Decoder(decoder_config(config, None), device="meta")
    if case.lora:
        apply_lora(model, adapter_config(case), seed=3)
    apply_tensor(model, mesh, sequence_parallel=case.sequence_parallel)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, "cpu")
    stored = {view.name: view.read(view.local) for view in views(whole_model(case))}
    for name, layer, part in adapted_modules(model):
        if part is layer.adapted[0]:
            holder = name.removesuffix(part.name)
            layer.reset(3, {part.name: holder + part.name for part in layer.adapted})
    for view in views(model):
        if "lora_A" not in view.name:  # which the reset has drawn
            view.write(view.local, stored[view.name][box(view)])
    return model


def views(model):
    """Of all weights, those that adapters train under their names in the adapter's file."""
    trained = list(adapter_views(model))
    names = {view.parameter_name for view in trained}
    return [*trained, *(view for view in hf_views(model) if view.parameter_name not in names)]


def box(view):
    return tuple(slice(start, start + length) for start, length in zip(view.offset, view.shape, strict=True))


def batch(model, trained=True):
    """Two rows of documents of uneven lengths and masks, then padding."""
    draw = np.random.default_rng(0)
    rows = [
        [
            Document(draw.integers(0, 129, n, dtype=np.int32), trained & (draw.random(n) < share))
            for n, share in documents
        ]
        for documents in ([(7, 0.9), (1, 1.0), (13, 0.2)], [(19, 0.6)])
    ]
    layout = model.batch_layout(rows=2, row_tokens=TOKENS // 2, row_documents=3)
    return build_batch(layout, rows, row_ids=[8, 3], seed=11, step=2)


def cubes(logits, labels):
    """A loss on the whole row of logits."""
    probability = torch.log_softmax(logits, dim=1).gather(1, labels[:, None])
    return (-probability).pow(1.5).sum() + 1e-3 * logits.pow(2).sum()


def measure(model):
    """Losses and gradients of the built-in loss, of one on the logits, and of a batch with nothing to train."""
    data, nothing = batch(model), batch(model, trained=False)
    hidden, labels = model.trained_hidden(data)
    logits = model.logits(hidden[: data.num_trained])
    gradients, losses = [], []
    for loss in (model.loss(data), cubes(logits, labels[: data.num_trained].long()), model.loss(nothing)):
        model.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
        gradients.append({id(p): p.grad for p in model.parameters() if p.grad is not None})
    with torch.no_grad():
        losses.append(model.eval().loss(data).item())
    return {"losses": losses, "logits": logits.detach(), "gradients": gradients}


# ---- on the ranks ----


def on_ranks(rank, world, cases):
    mesh = build_mesh(ParallelConfig(tp_size=world), rank=rank, world_size=world)
    return {name: on_one(case, mesh) for name, case in cases.items()}


def on_one(case, mesh):
    """Everything of a case: values and gradients as (name, offset, whole shape, tensor) of each box that is here."""
    model = cut_model(case, mesh)
    trainable = sorted(view.name for view in views(model) if view.parameter.requires_grad)
    pieces = [(view.name, view.offset, view.full_shape, view.read(view.local)) for view in views(model)]
    found = measure(model.train())
    for gradients in found["gradients"]:
        for parameter in partial_parameters(model):
            if id(parameter) in gradients:
                distributed.all_reduce(gradients[id(parameter)])
    found["gradients"] = [
        [
            (view.name, view.offset, view.full_shape, view.read(gradients[id(view.parameter)]))
            for view in views(model)
            if id(view.parameter) in gradients
        ]
        for gradients in found["gradients"]
    ]
    tied = model.head.base_layer().weight is model.embed.weight
    parameters = len(list(model.parameters()))
    return found | {"trainable": trainable, "pieces": pieces, "tied": tied, "parameters": parameters}


def assembled(ranks):
    """Tensors by name from the ranks' boxes, which must cover each exactly, once or all on every rank."""
    tensors, counts = {}, {}
    for boxes in ranks:
        for name, offset, full, value in boxes:
            at = tuple(slice(start, start + length) for start, length in zip(offset, value.shape, strict=True))
            tensor = tensors.setdefault(name, torch.zeros(full))
            count = counts.setdefault(name, torch.zeros(full))
            assert tensor.shape == tuple(full)
            if count[at].any():
                torch.testing.assert_close(tensor[at], value, rtol=0, atol=0)  # the same on every rank
            tensor[at] = value
            count[at] += 1
    for name, count in counts.items():
        assert count.min() == count.max(), name
        assert count.max() in (1, len(ranks)), name
    return tensors


def assert_near(found, expected, what):
    assert (found - expected).norm() <= 1e-5 * expected.norm(), what


def assert_equals_one_process(case, ranks):
    model = whole_model(case)
    all_views = views(model)
    pieces = assembled([rank["pieces"] for rank in ranks])
    assert pieces.keys() == {view.name for view in all_views}
    for view in all_views:
        assert torch.equal(pieces[view.name], view.read(view.local)), view.name
    trainable = sorted(view.name for view in all_views if view.parameter.requires_grad)
    assert sorted({name for rank in ranks for name in rank["trainable"]}) == trainable
    assert all(rank["tied"] == model.config.tied for rank in ranks)
    # Rank 0 has every parameter of the whole model, cut or not, and no other: nothing was untied.
    assert ranks[0]["parameters"] == len(list(model.parameters()))

    expected = measure(model.train())
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert rank["losses"][2] == 0
        assert_near(rank["logits"], expected["logits"], "logits")
    for index, gradients in enumerate(expected["gradients"]):
        found = assembled([rank["gradients"][index] for rank in ranks])
        wanted = {
            view.name: view.read(gradients[id(view.parameter)]) for view in all_views if id(view.parameter) in gradients
        }
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert_near(found[name], gradient, f"{name} of loss {index}")


@pytest.fixture(scope="module")
def on_two():
    return run(2, on_ranks, CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name, on_two):
    assert_equals_one_process(CASES[name], [rank[name] for rank in on_two])


def test_four_ranks_equal_one_process():
    ranks = run(4, on_ranks, ON_FOUR)
    for name, case in ON_FOUR.items():
        assert_equals_one_process(case, [rank[name] for rank in ranks])


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "size", "tokens", "message"),
    [
        ({}, 4, 48, "tp_size = 4 does not divide the model's 2 key-value heads; possible: 1, 2"),
        (
            {"intermediate_size": 81},
            2,
            48,
            "tp_size = 2 does not divide the model's 81 features of the MLP; possible: 1",
        ),
        (
            {"vocab_size": 9, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64},
            8,
            48,
            "tp_size = 8 leaves no token of a vocabulary of 9 to the last rank",
        ),
        ({}, 2, 47, "tp_size = 2 does not divide the 47 tokens .* max_length a multiple of 2, or .*_parallel = false"),
    ],
)
def test_what_does_not_divide_is_refused(fields, size, tokens, message):
    config = decoder_config(tiny_config(**fields), None)
    with pytest.raises(ValueError, match=message):
        check_tensor(config, size, tokens, True)


def test_what_divides_is_not_refused():
    config = decoder_config(tiny_config(vocab_size=129), None)
    check_tensor(config, 2, 48, True)
    check_tensor(config, 2, 47, False)
    check_tensor(config, 1, 47, True)


def test_one_rank_changes_nothing():
    model = tiny_model()
    before = list(model.named_parameters())
    apply_tensor(model, Mesh.single(), sequence_parallel=True)
    assert [(n, id(p)) for n, p in before] == [(n, id(p)) for n, p in model.named_parameters()]
    assert partial_parameters(model) == []
