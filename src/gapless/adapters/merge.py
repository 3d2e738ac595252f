"""Merging: the weights of the model that base and adapter are together, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gapless.adapters.lora import adapted_modules
from gapless.models.decoder import Decoder
from gapless.models.views import hf_views


@torch.no_grad()
def merged_tensors(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, W + scale * B A where there is an adapter.

    The sum is taken in float32 and cast once. A head tied to the embedding is not repeated. The model is left as it
    is, and only one tensor is made at a time.

    Args:
        model: with or without adapters.

    Yields:
        (name, tensor in the file's shape and the parameter's dtype).
    """
    adapters = {f"{name}.weight": (layer, part) for name, layer, part in adapted_modules(model)}
    for view in hf_views(model):
        tensor = view.read(view.parameter)
        if view.name in adapters:
            layer, part = adapters[view.name]
            tensor = tensor.float().add_(layer.delta(part)).to(tensor.dtype)
        yield view.name, tensor
