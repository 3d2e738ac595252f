"""What a run leaves for other tools: a PEFT adapter, or a Hugging Face model folder.

It is made from the files of the last checkpoint, one tensor at a time: it is the same for every layout of ranks, and no
rank needs room for more than its part of the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gapless.adapters.lora import adapter_views
from gapless.adapters.peft import save_adapter
from gapless.checkpoint_file import Checkpoint
from gapless.config import RunConfig
from gapless.data.tokenizer import Tokenizer
from gapless.inference.checkpoint import KIND
from gapless.inference.load import DTYPES
from gapless.models.decoder import Decoder
from gapless.models.views import hf_views
from gapless.models.weights import save_weights, write_config
from gapless.training import files
from gapless.training.checkpoint import check_names


def existing_result(config: RunConfig, checkpoint: Path) -> Path | None:
    """The result in the run folder, if it was written after a checkpoint was: an older one is that of fewer steps."""
    target = _target(config, Path(config.training.output_dir))
    newer = target.is_dir() and target.stat().st_mtime_ns >= checkpoint.stat().st_mtime_ns
    return target if newer else None


def write_result(checkpoint: Checkpoint, model: Decoder, tokenizer: Tokenizer, config: RunConfig, folder: Path) -> Path:
    """Write `folder`/adapter (LoRA) or `folder`/model (full fine-tuning), whole or not at all; in one process.

    Args:
        checkpoint: the last of the run.
        model: the whole model with its adapters, on the meta device: only its names and shapes are used.
        tokenizer: of the run.
        config: of the run.
        folder: the run folder.

    Returns:
        The folder written.

    Raises:
        ValueError: it cannot be written, or the checkpoint is not that of the model.
    """
    lora = config.adapter.type == "lora"
    views = list(adapter_views(model) if lora else hf_views(model))
    check_names(checkpoint, {f"{KIND}/{view.name}": view.shape for view in views}, KIND)
    tensors = ((view.name, checkpoint.read(f"{KIND}/{view.name}")) for view in views)
    target = _target(config, folder)
    partial = files.temporary(target)
    try:
        with files.writing(target):
            partial.mkdir()
            if lora:
                save_adapter(model, config.adapter, partial, Path(config.model.path).absolute(), tensors)
                if config.data.chat_template is not None:
                    tokenizer.save(partial)  # else whoever opens the adapter alone would render with the base's
            else:
                save_weights(partial, tensors)
                write_config(
                    Path(config.model.path, "config.json"), partial / "config.json", DTYPES[config.model.dtype]
                )
                tokenizer.save(partial)
            files.sync_tree(partial)
            files.publish(target)
    finally:
        # Half a result on a disk that is full would only be in the way.
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _target(config: RunConfig, folder: Path) -> Path:
    return folder / ("adapter" if config.adapter.type == "lora" else "model")
