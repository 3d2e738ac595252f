"""A model to generate with or to export, from whatever folder holds one: a model, an adapter, a run, a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gapless.adapters.peft import CONFIG_FILE, is_adapter, load_adapter, read_config
from gapless.checkpoint_file import is_checkpoint, list_checkpoints
from gapless.config import AdapterConfig, RunConfig
from gapless.config_file import load_config
from gapless.data.tokenizer import Tokenizer
from gapless.inference.checkpoint import load_checkpoint
from gapless.models.decoder import Decoder
from gapless.models.weights import load_weights, read_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class ModelSource:
    """The folders a model is made of."""

    model: Path
    """The Hugging Face folder with the weights (of the base, if there is an adapter)."""
    adapter: Path | None = None
    """The PEFT folder."""
    checkpoint: Path | None = None
    """The training checkpoint whose weights go on or into the model's."""
    run: RunConfig | None = None
    """Of the checkpoint's run."""
    trained_from: Path | None = None
    """What the full fine-tuning started from that wrote `model`."""
    chat_template: str | None = None
    """The template file that the run used instead of the tokenizer's own."""

    @property
    def lora(self) -> AdapterConfig | None:
        """The adapter's settings if a checkpoint holds one."""
        return self.run.adapter if self.run is not None and self.run.adapter.type == "lora" else None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, that of the adapter folder if it has one."""
        own = self.adapter is not None and (self.adapter / "tokenizer.json").is_file()
        folder = self.adapter if own and self.adapter else self.model
        return Tokenizer.from_folder(folder, self.chat_template, base=self.model)

    def made_for(self) -> int | None:
        """Tokens of the longest text the model was made for; None if its config does not say."""
        positions = read_json(self.model / "config.json").get("max_position_embeddings")
        return positions if isinstance(positions, int) else None


def find_model(path: str | Path, adapter: str | Path | None = None) -> ModelSource:
    """What a folder is and where the rest of the model lies.

    Args:
        path: a Hugging Face model folder, a PEFT adapter folder, a run folder (without a result yet, its newest
            checkpoint is taken, and stderr says so), or a training checkpoint in a run folder.
        adapter: an adapter folder to put on the model folder `path`.

    Raises:
        FileNotFoundError: nothing there, or the adapter's base model is not.
        ValueError: `adapter` given with a folder that has one.
    """
    folder = Path(path)
    if adapter is not None:
        if is_adapter(folder) or is_checkpoint(folder) or (folder / "config.toml").is_file():
            raise ValueError(f"{folder} is not a plain model folder; give the adapter's base model, or no adapter")
        return ModelSource(_model_folder(folder), _adapter_folder(Path(adapter)))
    if is_adapter(folder):
        return ModelSource(_base_of(folder), folder)
    if (folder / "config.toml").is_file():
        return _find_in_run(folder)
    if is_checkpoint(folder):
        return _find_checkpoint(folder, folder.resolve().parent.parent)
    return ModelSource(_model_folder(folder))


def load_model(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: Literal["bf16", "fp32"] = "bf16",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    max_length: int | None = None,
) -> tuple[Decoder, Tokenizer]:
    """Loads a model for generation, with its adapter if there is one, and its tokenizer.

    Args:
        path: a Hugging Face model folder, a PEFT adapter folder, a run folder (without a result yet, its newest
            checkpoint is taken, and stderr says so), or a training checkpoint in a run folder.
        adapter: an adapter folder to put on the model folder `path`.
        dtype: of weights and activations.
        device: auto takes the GPU if there is one.
        max_length: longest text in tokens, where the model's rotary scaling depends on it.

    Returns:
        The decoder in eval mode, and the tokenizer.

    Raises:
        FileNotFoundError: a folder or file is missing.
        ValueError: a file is damaged or not supported.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    source = find_model(path, adapter)
    model = load_source(source, dtype=DTYPES[dtype], device=pick_device(device), max_length=max_length)
    return model, source.tokenizer()


def load_source(
    source: ModelSource, *, dtype: torch.dtype, device: torch.device | str = "cpu", max_length: int | None = None
) -> Decoder:
    """The decoder of a source, in eval mode."""
    model = load_weights(source.model, dtype=dtype, device=device, max_length=max_length)
    if source.adapter is not None:
        load_adapter(model, source.adapter)
    if source.checkpoint is not None and source.run is not None:
        load_checkpoint(model, source.checkpoint, source.run.adapter)
    return model.eval()


def _find_in_run(folder: Path) -> ModelSource:
    config = load_config(folder / "config.toml")
    template = config.data.chat_template
    if is_adapter(folder / "adapter"):
        return ModelSource(_base_of(folder / "adapter"), folder / "adapter", chat_template=template)
    if (folder / "model" / "config.json").is_file():
        return ModelSource(folder / "model", trained_from=Path(config.model.path), chat_template=template)
    if checkpoints := list_checkpoints(folder / "checkpoints"):
        newest = checkpoints[-1]
        print(f"note: {folder} has no result yet; this is its newest checkpoint, {newest.name}", file=sys.stderr)
        return _find_checkpoint(newest, folder)
    raise FileNotFoundError(
        f"{folder} is a run without a result or a checkpoint yet; train on: gapless train {folder / 'config.toml'}"
    )


def _find_checkpoint(folder: Path, run: Path) -> ModelSource:
    if not (run / "config.toml").is_file():
        raise FileNotFoundError(
            f"{folder} is a checkpoint, and {run} above it is no run folder: it has no config.toml; a checkpoint is "
            "read in its run folder"
        )
    config = load_config(run / "config.toml")
    base = Path(config.model.path)
    if not (base / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} was trained on {base}, which is no model folder here; correct model.path in "
            f"{run / 'config.toml'}"
        )
    return ModelSource(base, checkpoint=folder, run=config, chat_template=config.data.chat_template)


def _base_of(adapter: Path) -> Path:
    named = read_config(adapter).base_model
    if not named:
        raise ValueError(
            f"{adapter} does not name its base model; give both: gapless generate BASE --adapter {adapter}"
        )
    if not (Path(named) / "config.json").is_file():
        raise FileNotFoundError(
            f"{adapter} was trained on {named}, which is no model folder here; give the base model: gapless generate "
            f"BASE --adapter {adapter}, or correct base_model_name_or_path in {adapter / CONFIG_FILE}"
        )
    return Path(named)


def _model_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} is no model, adapter or run folder, nor a checkpoint: it has no config.json or config.toml"
        )
    return folder


def _adapter_folder(folder: Path) -> Path:
    read_config(folder)
    return folder


def pick_device(name: str) -> torch.device:
    """The device that auto, cpu or cuda means here.

    Raises:
        ValueError: another name, or there is no GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is cuda, but torch sees no GPU; use auto or cpu")
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, not {name}")
    return torch.device("cuda" if name != "cpu" and available else "cpu")
