"""Linear layers: one protocol for dense, quantised and adapted weights, fused from several projections on disk.

Projections that read the same input are one matrix here and several under their Hugging Face names on disk. The
fused output has leading dimensions (for queries, keys and values [K, G + 2, D]; for the gated MLP [2, F]) and each
projection is a range of one of them, its `Part`. Cutting the fused weight along `shard_dim` cuts every part alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gapless.batch import DropoutCounters
from gapless.kernels.runtime import Recipe


@dataclass(frozen=True)
class Part:
    """One projection inside a fused linear layer."""

    name: str
    """Leaf name in Hugging Face files, for instance "q_proj"."""
    dim: int
    """Leading dimension of the fused output that the range is taken from."""
    start: int
    length: int

    def select(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The part of a tensor whose leading dimensions begin at axis `dim` (weight, bias, gradient: 0; output: 1)."""
        return tensor.narrow(dim + self.dim, self.start, self.length)

    def features(self, leading: tuple[int, ...]) -> int:
        """Output features of the part."""
        return math.prod(leading) // leading[self.dim] * self.length


@dataclass(frozen=True)
class Cut:
    """Which piece of a larger layer a layer is: the entries from `start` on of `total`."""

    dim: int
    """0: of the output, along `Linear.shard_dim` (of an embedding: along its rows); 1: of the input."""
    start: int
    total: int


class Linear(nn.Module):
    """The protocol of a linear layer; subclasses store the weight and implement the methods below."""

    in_features: int
    leading: tuple[int, ...]
    """Leading dimensions of the output; their product is `out_features`."""
    parts: tuple[Part, ...]
    shard_dim: int
    """Leading dimension along which tensor parallelism may cut the output."""
    cut: Cut | None = None
    """Of a layer that `shard` returned."""

    @property
    def out_features(self) -> int:
        """Features of the fused output."""
        return math.prod(self.leading)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Compute x W^T + bias (+ residual): x [T, in], residual [T, out] -> [T, out], features in storage order.

        An adapter that drops out reads `counters`, those of the batch's tokens. The `spare` columns behind x's rows are
        scratch memory that may be overwritten: whoever made x has left them there. Without `value` the result is there
        to be differentiated alone: a layer may leave out what only its values need. With a `recipe` of x a layer may
        make x again in the backward rather than keep it.
        """
        raise NotImplementedError

    @property
    def spare(self) -> int:
        """Columns of scratch memory that `forward` would like behind the rows of x (`kernels.runtime.empty_rows`).

        Who leaves them there passes their number on to `forward`.
        """
        return 0

    def dequantize(self) -> torch.Tensor:
        """The weight as [out, in], rows in storage order."""
        raise NotImplementedError

    def shard(self, dim: int, rank: int, world: int) -> Linear:
        """A layer with piece `rank` of `world` of the weight, copied: dim 0 cuts the output, dim 1 the input.

        Concatenating the outputs (dim 0, along `shard_dim`) or adding them (dim 1) gives this layer's output.
        """
        raise NotImplementedError

    def base_layer(self) -> Linear:
        """The layer that stores the model's own weight; a wrapper (an adapter) returns that of what it wraps."""
        return self

    def local_layer(self) -> Linear:
        """The layer itself; a wrapper that only adds communication returns what it wraps."""
        return self


class _Differentiable(torch.autograd.Function):
    """Residual + x W^T without its values: the gradients are those of `torch.addmm`, by the same products."""

    @staticmethod
    def forward(ctx: Any, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        _, needs_x, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return residual.new_empty(()).expand_as(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_residual, needs_x, needs_weight = ctx.needs_input_grad
        return (
            grad if needs_residual else None,
            grad @ weight if needs_x else None,
            grad.t() @ x if needs_weight else None,
        )


class DenseLinear(Linear):
    """A weight in a floating dtype, [*leading, in], and an optional bias [*leading]."""

    def __init__(
        self,
        in_features: int,
        leading: tuple[int, ...],
        parts: tuple[Part, ...],
        *,
        bias: bool = False,
        shard_dim: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.leading, self.parts, self.shard_dim = in_features, leading, parts, shard_dim
        self.weight = random_weight(*leading, in_features, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.zeros(leading, dtype=dtype, device=device)) if bias else None

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """See `Linear.forward`."""
        weight = self.dequantize()
        bias = None if self.bias is None else self.bias.flatten()
        if residual is None and value:
            return functional.linear(x, weight, bias)
        if residual is None:
            residual = x.new_zeros(()).expand(len(x), len(weight))
        if bias is not None:
            residual = residual + bias
        if not value:
            return _Differentiable.apply(residual, x, weight)
        return torch.addmm(residual, x, weight.t())

    def dequantize(self) -> torch.Tensor:
        """The parameter itself, viewed as [out, in]."""
        return self.weight.flatten(0, -2)

    def shard(self, dim: int, rank: int, world: int) -> DenseLinear:
        """See `Linear.shard`. With dim 1 only rank 0 keeps the bias, as the pieces are added.

        Raises:
            ValueError: the features do not divide by `world`.
        """
        size = self.leading[self.shard_dim] if dim == 0 else self.in_features
        names = ", ".join(part.name for part in self.parts)
        if size % world:
            raise ValueError(f"{names}: {size} {'groups of rows' if dim == 0 else 'inputs'} do not divide by {world}")
        piece = size // world
        leading, parts, in_features = self.leading, self.parts, self.in_features
        if dim == 0:
            leading = tuple(piece if axis == self.shard_dim else length for axis, length in enumerate(leading))
            parts = tuple(Part(part.name, part.dim, 0, piece) if part.dim == self.shard_dim else part for part in parts)
        else:
            in_features = piece
        bias = self.bias is not None and (dim == 0 or rank == 0)
        assert self.cut is None, "a piece is not cut again"
        shard = DenseLinear(
            in_features, leading, parts, bias=bias, shard_dim=self.shard_dim, dtype=self.weight.dtype, device="meta"
        )
        shard.cut = Cut(dim, rank * piece, size)
        axis = self.shard_dim if dim == 0 else -1
        shard.weight = _copied(self.weight.narrow(axis, rank * piece, piece), self.weight)
        if shard.bias is not None:
            assert self.bias is not None
            cut = self.bias.narrow(self.shard_dim, rank * piece, piece) if dim == 0 else self.bias
            shard.bias = _copied(cut, self.bias)
        return shard


def _copied(piece: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(piece.detach().clone(memory_format=torch.contiguous_format), parameter.requires_grad)


def random_weight(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """A new weight, normal with a standard deviation of 0.02; on the meta device only its shape."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    if weight.device.type != "meta":  # drawing there imports torch._dynamo: 1.2 s of every start
        weight.normal_(std=0.02)
    return nn.Parameter(weight)


def plain_linear(
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> DenseLinear:
    """A dense layer of one projection."""
    parts = (Part(name, 0, 0, out_features),)
    return DenseLinear(in_features, (out_features,), parts, bias=bias, dtype=dtype, device=device)
