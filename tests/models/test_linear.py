import pytest
import torch

from gapless.models.linear import DenseLinear, Part, plain_linear

K, G, D, F, H = 4, 3, 2, 6, 5


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    qkv = DenseLinear(
        H,
        (K, G + 2, D),
        (Part("q_proj", 1, 0, G), Part("k_proj", 1, G, 1), Part("v_proj", 1, G + 1, 1)),
        bias=True,
        dtype=dtype,
    )
    gate_up = DenseLinear(
        H, (2, F), (Part("gate_proj", 0, 0, 1), Part("up_proj", 0, 1, 1)), bias=True, shard_dim=1, dtype=dtype
    )
    layers = {"qkv": qkv, "gate_up": gate_up, "out": plain_linear("o_proj", 2 * H, 8, bias=True, dtype=dtype)}
    for layer in layers.values():
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
    return layers


@pytest.mark.parametrize("name", ["qkv", "gate_up", "out"])
def test_parts_are_the_projections(name):
    """Each part of the output is its own part of the weight times the input; together they are everything."""
    layer = layers()[name]
    x, residual = torch.randn(7, layer.in_features).double(), torch.randn(7, layer.out_features).double()
    y = layer(x)
    torch.testing.assert_close(layer(x, residual), y + residual)
    torch.testing.assert_close(y, x @ layer.dequantize().t() + layer.bias.flatten())
    seen = 0
    for part in layer.parts:
        weight, bias = part.select(layer.weight), part.select(layer.bias)
        features = part.features(layer.leading)
        assert weight.numel() == features * layer.in_features
        expected = x @ weight.reshape(features, -1).t() + bias.reshape(features)
        torch.testing.assert_close(part.select(y.unflatten(1, layer.leading), 1).reshape(7, features), expected)
        seen += features
    assert seen == layer.out_features


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["qkv", "gate_up", "out"])
def test_output_shards_recombine(name, world):
    layer = layers()[name]
    pieces = [layer.shard(0, rank, world) for rank in range(world)]
    for tensor in ("weight", "bias"):
        together = torch.cat([getattr(piece, tensor) for piece in pieces], dim=layer.shard_dim)
        assert torch.equal(together, getattr(layer, tensor))
    x = torch.randn(7, layer.in_features).double()
    outputs = [piece(x).unflatten(1, piece.leading) for piece in pieces]
    torch.testing.assert_close(torch.cat(outputs, dim=1 + layer.shard_dim).flatten(1), layer(x))
    for index, part in enumerate(layer.parts):
        halves = [piece.parts[index].select(piece.weight) for piece in pieces]
        assert torch.equal(torch.cat(halves, dim=layer.shard_dim), part.select(layer.weight))
        assert sum(piece.parts[index].features(piece.leading) for piece in pieces) == part.features(layer.leading)


@pytest.mark.parametrize("name", ["qkv", "gate_up", "out"])
def test_input_shards_add_up(name):
    layer = layers()[name]
    world = layer.in_features
    x = torch.randn(7, layer.in_features).double()
    pieces = [layer.shard(1, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([piece.weight for piece in pieces], dim=-1), layer.weight)
    total = sum(piece(part) for piece, part in zip(pieces, x.chunk(world, dim=1), strict=True))
    torch.testing.assert_close(total, layer(x))


def test_shards_are_copies_and_keep_requires_grad():
    layer = layers()["qkv"]
    layer.weight.requires_grad_(False)
    piece = layer.shard(0, 0, 1)
    assert not piece.weight.requires_grad
    assert piece.bias.requires_grad
    assert piece.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize(("name", "dim", "message"), [("qkv", 0, "4 groups of rows"), ("gate_up", 1, "5 inputs")])
def test_indivisible_shards_are_refused(name, dim, message):
    with pytest.raises(ValueError, match=f"{message} do not divide by 3"):
        layers()[name].shard(dim, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_gradients_without_values(added, bias, dtype):
    """The bits of those of a forward that has made its values."""
    torch.manual_seed(0)
    layer = plain_linear("down_proj", 24, 16, bias=bias, dtype=dtype)
    x, residual, grad = (torch.randn(10, size, dtype=dtype) for size in (24, 16, 16))
    found = []
    for value in (True, False):
        inputs = [x.clone().requires_grad_(), residual.clone().requires_grad_() if added else None]
        out = layer(*inputs, value=value)
        assert out.shape == (10, 16)
        wanted = [tensor for tensor in (*inputs, *layer.parameters()) if tensor is not None]
        found.append(torch.autograd.grad(out, wanted, grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
