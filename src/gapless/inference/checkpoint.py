"""The trained weights of a training checkpoint, without its optimizer state."""

from __future__ import annotations

from pathlib import Path

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.checkpoint_file import CheckpointError, open_checkpoint
from gapless.config import AdapterConfig
from gapless.models.decoder import Decoder
from gapless.models.views import hf_views

KIND = "weight"


def load_checkpoint(model: Decoder, folder: Path, adapter: AdapterConfig) -> None:
    """Puts a checkpoint's weights into the model that its training began with, adapters around it included.

    Args:
        model: with the base weights, without adapters.
        folder: the checkpoint.
        adapter: of the run; of type none, the base weights themselves are replaced.

    Raises:
        CheckpointError: a file is missing, damaged or of another format; a tensor is missing, unexpected or misshaped.
    """
    checkpoint = open_checkpoint(folder)
    if adapter.type == "lora":
        apply_lora(model, adapter, seed=0)
    views = {view.name: view for view in (hf_views(model) if adapter.type == "none" else adapter_views(model))}
    shapes = {f"{KIND}/{view.name}": view.shape for view in views.values()}
    stored = {name: shape for name, shape in checkpoint.shapes().items() if name.startswith(f"{KIND}/")}
    if different := sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name)):
        raise CheckpointError(f"{folder} does not fit its run's config.toml: {', '.join(different[:5])}")
    for name, tensor in checkpoint.tensors(KIND):
        view = views[name.removeprefix(f"{KIND}/")]
        view.write(view.parameter, tensor)
