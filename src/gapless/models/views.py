"""The one adapter between Hugging Face's tensors and the parameters here: fused, cut over ranks, sharded.

A `TensorView` says which box of a file's tensor is here and where in which parameter it lies. It fits anything shaped
like the parameter: the weight, its gradient, an optimizer's moment. Three things may stand between the two: fusion (a
`Part` of the parameter), tensor parallelism (`Linear.cut`), and FSDP2 (a DTensor, sharded along one axis). Each leaves
a contiguous box of the file's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gapless.models.decoder import Decoder, DecoderLayer, Embedding
from gapless.models.families import names
from gapless.models.linear import Cut, DenseLinear, Linear, Part
from gapless.models.norm import RMSNorm

EMBED_WEIGHT, HEAD_WEIGHT = f"{names.EMBED}.weight", f"{names.HEAD}.weight"


@dataclass(frozen=True)
class TensorView:
    """Where a tensor of a Hugging Face file, or the box of it that is here, lives in the model."""

    name: str
    """Its name in the file, for instance "model.layers.0.self_attn.q_proj.weight"."""
    parameter: nn.Parameter
    parameter_name: str
    """Dotted name of the parameter in the model."""
    shape: tuple[int, ...]
    """Shape of the box, with the dimensions of the file."""
    part: Part | None = None
    """The part of a fused parameter; None for the whole."""
    start: tuple[int, ...] | None = None
    """Where in the file's tensor the box begins; None for all zeros."""
    full: tuple[int, ...] | None = None
    """Shape of the file's tensor; None if that is `shape`."""
    dtype: torch.dtype | None = None
    """What the weight has in files; None for the parameter's own."""

    @property
    def offset(self) -> tuple[int, ...]:
        """`start`, never None."""
        return self.start if self.start is not None else (0,) * len(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """`full`, never None."""
        return self.full if self.full is not None else self.shape

    @property
    def local(self) -> torch.Tensor:
        """The parameter's own storage on this rank, detached: the shard of a DTensor, else the whole."""
        return local_tensor(self.parameter)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements that belong to the file's tensor, in any tensor shaped like `local` (not `shape`)."""
        return tensor if self.part is None else self.part.select(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a contiguous copy in the file's dimensions, detached."""
        return self.view(tensor.detach()).clone(memory_format=torch.contiguous_format).view(self.shape)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value of `shape` into a tensor shaped like `local`, converting dtype and device."""
        target = self.view(tensor.detach())
        target.copy_(value.view(target.shape))

    def shard(self, axis: int, start: int, length: int) -> TensorView | None:
        """The view of a shard, entries from `start` on along an axis of the parameter; None if it has nothing of this.

        The result fits tensors shaped like the shard.
        """
        dims = list(self.parameter.shape)
        first, part = 0, self.part
        if part is not None:
            dims[part.dim] = part.length
            first = part.start if part.dim == axis else 0
        low, high = max(start, first), min(start + length, first + dims[axis])
        if low >= high:
            return None
        if part is not None and part.dim == axis:
            part = replace(part, start=low - start, length=high - low)
        return replace(self, part=part, **self._box(dims, axis, low - first, high - low))

    def cut(self, cut: Cut | None, axis: int) -> TensorView:
        """The view of a layer that is a piece of a larger one, cut along an axis of its output, or along its input."""
        if cut is None or (cut.dim == 1 and len(self.shape) == 1):  # a bias has no input side
            return self
        dims = list(self.parameter.shape)
        if self.part is not None:
            dims[self.part.dim] = self.part.length
        axis = len(dims) - 1 if cut.dim == 1 else axis
        length, dims[axis] = dims[axis], cut.total
        return replace(self, **self._box(dims, axis, cut.start, length))

    def _box(self, dims: list[int], axis: int, start: int, length: int) -> dict[str, Any]:
        """Shape, start and full shape of entries along an axis of `dims`, which are the file's dimensions unfolded.

        The last axis is the input, those before are folded into rows (a bias has rows only).
        """
        shape, offset, full = list(self.shape), list(self.offset), list(self.full_shape)
        inputs = len(shape) > 1 and axis == len(dims) - 1
        leading = dims if len(shape) == 1 else dims[:-1]
        assert inputs or math.prod(leading[:axis]) == 1, f"{self.name}: a shard along axis {axis} is no box"
        unit = 1 if inputs else math.prod(leading[axis + 1 :])
        column = 1 if inputs else 0
        whole = dims[axis] * unit
        full[column] = max(full[column], whole)
        shape[column] = length * unit
        offset[column] += start * unit
        return {"shape": tuple(shape), "start": tuple(offset), "full": tuple(full)}


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's storage of a parameter, detached."""
    parameter = parameter.detach()
    # By its method: importing DTensor takes longer than all else here, and only runs on many ranks have any.
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def hf_views(model: Decoder) -> Iterator[TensorView]:
    """Every weight of the base model that is here, under its Hugging Face name, a tied head not repeated.

    Weights that adapters added are not among them; layers that adapters wrap are seen through. A pipeline stage that
    has the tied head alone gives it under the embedding's name.
    """
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter, part, shape, cut, axis in _weights(model):
        view = TensorView(name, parameter, parameter_names[id(parameter)], shape, part, dtype=model.dtype)
        view = sharded_view(view.cut(cut, axis))
        if view is not None:
            yield view


def sharded_view(view: TensorView) -> TensorView | None:
    """The view of what this rank has of a parameter; None if FSDP2 gave it nothing of the tensor."""
    placements = getattr(view.parameter, "placements", ())
    for mesh_dim, placement in enumerate(placements):
        if placement.is_shard():
            mesh, axis = view.parameter.device_mesh, placement.dim  # pyrefly: ignore
            # Not get_local_rank: DTensor keeps meshes longer than their groups live.
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            size = view.parameter.shape[axis]
            piece = -(-size // mesh.size(mesh_dim))
            start = min(piece * coordinate[mesh_dim], size)
            return view.shard(axis, start, min(piece, size - start))
    return view


_Weight = tuple[str, nn.Parameter, Part | None, tuple[int, ...], Cut | None, int]


def _weights(model: Decoder) -> Iterator[_Weight]:
    if model.embed is not None:
        yield _whole(names.EMBED, model.embed)
    for index, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        for name, *weight in _layer_weights(layer):
            yield f"{names.layer_name(index)}.{name}", *weight  # pyrefly: ignore
    if model.norm is not None:
        yield _whole(names.NORM, model.norm)
    if model.head is not None and not (model.config.tied and model.embed is not None):
        for name, *weight in _parts(model.head):
            yield EMBED_WEIGHT if model.config.tied else name, *weight  # pyrefly: ignore


def _layer_weights(layer: DecoderLayer) -> Iterator[_Weight]:
    attention, mlp = layer.attention, layer.mlp
    yield _whole(names.ATTENTION_NORM, layer.attention_norm)
    yield from _parts(attention.qkv, f"{names.ATTENTION}.")
    if attention.q_norm is not None and attention.k_norm is not None:
        yield _whole(names.Q_NORM, attention.q_norm)
        yield _whole(names.K_NORM, attention.k_norm)
    yield from _parts(attention.out, f"{names.ATTENTION}.")
    yield _whole(names.MLP_NORM, layer.mlp_norm)
    yield from _parts(mlp.gate_up, f"{names.MLP}.")
    yield from _parts(mlp.down, f"{names.MLP}.")


def _whole(name: str, module: RMSNorm | Embedding) -> _Weight:
    cut = module.cut if isinstance(module, Embedding) else None
    return f"{name}.weight", module.weight, None, tuple(module.weight.shape), cut, 0


def _parts(linear: Linear, prefix: str = "") -> Iterator[_Weight]:
    base = linear.base_layer()
    assert isinstance(base, DenseLinear)
    for part in base.parts:
        features = part.features(base.leading)
        shape, axis = (features, base.in_features), base.shard_dim
        yield f"{prefix}{part.name}.weight", base.weight, part, shape, base.cut, axis
        if base.bias is not None:
            yield f"{prefix}{part.name}.bias", base.bias, part, (features,), base.cut, axis
