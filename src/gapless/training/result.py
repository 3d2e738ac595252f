"""What a run leaves for other tools: a PEFT adapter, or a Hugging Face model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from gapless.adapters.merge import merged_tensors
from gapless.adapters.peft import save_adapter
from gapless.config import RunConfig
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import DTYPES
from gapless.models.decoder import Decoder
from gapless.models.weights import save_weights, write_config
from gapless.training import files


def existing_result(config: RunConfig, checkpoint: Path) -> Path | None:
    """The result in the run folder, if it was written after a checkpoint was: an older one is that of fewer steps."""
    target = _target(config, Path(config.training.output_dir))
    newer = target.is_dir() and target.stat().st_mtime_ns >= checkpoint.stat().st_mtime_ns
    return target if newer else None


def write_result(model: Decoder, tokenizer: Tokenizer, config: RunConfig, folder: Path) -> Path:
    """Write `folder`/adapter (LoRA) or `folder`/model (full fine-tuning), whole or not at all.

    Returns:
        The folder written.

    Raises:
        ValueError: it cannot be written.
    """
    lora = config.adapter.type == "lora"
    target = _target(config, folder)
    partial = files.temporary(target)
    try:
        with files.writing(target):
            partial.mkdir()
            if lora:
                save_adapter(model, config.adapter, partial, Path(config.model.path).absolute())
                if config.data.chat_template is not None:
                    tokenizer.save(partial)  # else whoever opens the adapter alone would render with the base's
            else:
                save_weights(partial, merged_tensors(model))
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
