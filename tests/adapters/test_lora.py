"""LoRA on the decoder: first values, dropout, freezing, sharding, refusals."""

import math

import pytest
import torch

from gapless.adapters.lora import LoraLinear, adapted_modules, adapter_views, apply_lora
from gapless.batch import Document, DropoutCounters, build_batch, segments
from gapless.config import AdapterConfig
from gapless.kernels.dropout import keep_mask
from gapless.models.linear import Linear
from tiny import tiny_model

TOKENS = torch.randint(0, 256, (11,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


def values(model):
    return {view.name: view.read(view.parameter) for view in adapter_views(model)}


def randomise(model):
    generator = torch.Generator().manual_seed(4)
    for view in adapter_views(model):
        view.write(view.parameter, view.shape[1] ** -0.5 * torch.randn(view.shape, generator=generator))


def new(family="llama", dtype="fp32", **settings):
    model = tiny_model(family, dtype=dtype)
    apply_lora(model, AdapterConfig(**{"r": 4, **settings}), seed=3)
    return model


def test_new_adapters_change_nothing_and_follow_from_seed_and_name():
    plain, adapted = tiny_model(), new()
    where = segments([len(TOKENS)])
    assert torch.equal(plain(TOKENS, where), adapted(TOKENS, where))
    first = values(adapted)
    assert len(first) == 3 * 7 * 2
    for name, tensor in first.items():
        bound = tensor.shape[1] ** -0.5
        if "lora_B" in name:
            assert not tensor.any()
        else:  # uniform within the bound: its standard deviation is bound / sqrt 3
            assert tensor.abs().max() <= bound
            assert 0.85 < tensor.std() * math.sqrt(3) / bound < 1.15
    # In another layout (a subset of the modules, other layers' adapters missing) each A is the same.
    some = values(new(target_modules=("v_proj", "down_proj")))
    assert all(torch.equal(tensor, first[name]) for name, tensor in some.items())
    other = tiny_model()
    apply_lora(other, AdapterConfig(r=4), seed=4)
    others = values(other)
    assert not any(torch.equal(others[name], tensor) for name, tensor in first.items() if "lora_A" in name)
    assert len({tensor.sum().item() for name, tensor in first.items() if "lora_A" in name}) == 21


def test_only_adapters_are_trained_and_in_float32():
    model = new(dtype="bf16", modules_to_save=("lm_head",))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {view.parameter_name for view in adapter_views(model)}
    assert {p.dtype for n, p in model.named_parameters() if "lora" in n} == {torch.float32}
    model(TOKENS, segments([len(TOKENS)])).sum().backward()
    grads = [view.parameter.grad for view in adapter_views(model) if "lora_A" in view.name]
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert model.layers["0"].attention.qkv(torch.ones(2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(("use_rslora", "scale"), [(False, 12.0 / 4), (True, 12.0 / 2)])
def test_scale(use_rslora, scale):
    model = new(lora_alpha=12.0, use_rslora=use_rslora)
    assert {layer.scale for _, layer, _ in adapted_modules(model)} == {scale}


def counters(rows, columns, step=0):
    tensors = (torch.tensor(value, dtype=torch.int32) for value in ([7, step], rows, columns))
    return DropoutCounters(*tensors)


def test_dropout_masks_the_adapters_input_only():
    model = new("qwen2", lora_dropout=0.4, target_modules=("q_proj", "v_proj", "down_proj"))
    randomise(model)
    layer = model.layers["1"].mlp.down
    assert isinstance(layer, LoraLinear)
    x, residual = torch.randn(3, layer.in_features), torch.randn(3, 48)
    at = counters([0, 0, 5], [0, 1, 0])
    ours = layer(x, residual, at)
    kept = keep_mask(layer.in_features, 0.4, at, 1, 3)
    a, b = layer.lora_a, layer.lora_b["down_proj"]
    expected = layer.base(x, residual) + layer.scale * (torch.where(kept, x / 0.6, 0) @ a.T) @ b.T
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, layer(x, residual, counters([0, 0, 5], [0, 1, 0], step=1)))
    layer.eval()
    torch.testing.assert_close(layer(x), layer.base(x) + layer.scale * (x @ a.T) @ b.T, rtol=1e-5, atol=1e-5)
    # Sites and layers draw masks of their own.
    sites = {(layer.layer, layer.site) for _, layer, _ in adapted_modules(model)}
    assert len(sites) == 3 * 2


def test_dropout_reaches_every_layer_through_the_batch():
    model = new(lora_dropout=0.5)
    randomise(model)
    documents = [Document(TOKENS.numpy(), TOKENS.numpy() >= 0)]
    layout = model.batch_layout(rows=2, row_tokens=16, row_documents=2)
    losses = [
        model.train(mode).loss(build_batch(layout, rows, row_ids=ids, step=step, seed=1)).item()
        for mode, rows, ids, step in [
            (True, [documents, []], [4, 5], 0),
            (True, [[], documents], [5, 4], 0),
            (True, [documents, []], [4, 5], 1),
            (True, [documents, []], [6, 5], 0),
            (False, [documents, []], [4, 5], 0),
        ]
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len({round(loss, 4) for loss in losses[1:]}) == 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_shards_add_up(family):
    model = new(family, r=3, lora_alpha=7.0)
    randomise(model)
    x = torch.randn(5, 48)
    for layer in (model.layers["0"].attention.qkv, model.layers["0"].mlp.gate_up):
        pieces = [layer.shard(0, rank, 2) for rank in range(2)]
        outputs = [piece(x).unflatten(1, piece.leading) for piece in pieces]
        whole = layer(x)
        torch.testing.assert_close(torch.cat(outputs, dim=1 + layer.shard_dim).flatten(1), whole, rtol=1e-4, atol=1e-4)
        assert (whole - layer.base(x)).abs().max() > 0.1
    down = model.layers["0"].mlp.down
    x = torch.randn(5, 80)
    pieces = [down.shard(1, rank, 2)(part) for rank, part in enumerate(x.split(40, dim=1))]
    torch.testing.assert_close(sum(pieces), down(x), rtol=1e-4, atol=1e-4)


def test_the_effective_weight_gives_the_layers_output():
    model = new(target_modules=("k_proj", "up_proj", "o_proj"))
    randomise(model)
    for layer in (module for module in model.modules() if isinstance(module, LoraLinear)):
        x = torch.randn(4, layer.in_features)
        bias = layer.base_layer().bias.flatten()
        torch.testing.assert_close(x @ layer.dequantize().T + bias, layer(x), rtol=1e-4, atol=1e-4)
        assert isinstance(layer.base_layer(), Linear)
        assert not isinstance(layer.base_layer(), LoraLinear)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, "r must be at least 1, not 0"),
        ({"r": 17}, "r = 17 exceeds the smaller side, 16, of k_proj in layer 0; lower r, or leave k_proj out"),
        ({"target_modules": ()}, "target_modules is empty"),
        (
            {"target_modules": ("q_proj", "c_attn")},
            "no c_attn to adapt; possible: all-linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
        ),
        ({"target_modules": ("lm_head",)}, "no lm_head to adapt"),
        ({"modules_to_save": ("norm",)}, "norm is not possible; possible: embed_tokens, lm_head"),
        ({"lora_alpha": 0.0}, "lora_alpha must be a positive number, not 0.0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, not 1.0"),
    ],
)
def test_settings_are_refused_before_the_model_is_touched(settings, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        apply_lora(model, AdapterConfig(**settings), seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(module, LoraLinear) for module in model.modules())


def test_a_rank_is_compared_with_the_modules_it_is_for():
    assert {layer.r for _, layer, _ in adapted_modules(new(r=17, target_modules=("q_proj", "down_proj")))} == {17}


def test_a_second_adapter_is_refused():
    model = new()
    with pytest.raises(ValueError, match="has an adapter already"):
        apply_lora(model, AdapterConfig(r=2), seed=0)


@pytest.mark.parametrize("world", [2, 16])
def test_pieces_draw_their_part_of_the_first_values_and_masks(world):
    """16 ranks have 5 of down_proj's 80 inputs each: no multiple of the 4 channels that share a random number."""
    whole = new(lora_dropout=0.5, target_modules=("gate_proj", "down_proj"))
    gate_up, down = whole.layers["1"].mlp.gate_up, whole.layers["1"].mlp.down
    a, width = down.lora_a.detach().clone(), 80 // world
    at, x = counters([0, 0, 5], [0, 1, 0]), torch.randn(3, 80)
    randomise(whole)
    expected = down(x, None, at) - down.base(x)
    total = 0
    for rank in range(world):
        piece = down.shard(1, rank, world)
        inputs = x[:, rank * width : (rank + 1) * width]
        total = total + piece(inputs, None, at) - piece.base(inputs)
        piece.reset(3, {"down_proj": "model.layers.1.mlp.down_proj"})
        assert torch.equal(piece.lora_a, a[:, rank * width : (rank + 1) * width])
        output = gate_up.shard(0, rank, world)
        output.reset(3, {"gate_proj": "model.layers.1.mlp.gate_proj"})
        assert torch.equal(output.lora_a, new(target_modules=("gate_proj",)).layers["1"].mlp.gate_up.lora_a)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_pieces_keep_what_is_frozen_and_the_mode():
    layer = new(lora_dropout=0.5).layers["0"].mlp.down.eval()
    layer.lora_a.requires_grad_(False)
    piece = layer.shard(1, 1, 2)
    assert not piece.lora_a.requires_grad
    assert piece.lora_b["down_proj"].requires_grad
    assert not any(parameter.requires_grad for parameter in piece.base.parameters())
    assert not piece.training
