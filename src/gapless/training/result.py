"""What a run leaves for other tools: a PEFT adapter, or a Hugging Face model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from gapless.adapters.merge import merged_tensors
from gapless.adapters.peft import save_adapter
from gapless.config import RunConfig
from gapless.data.tokenizer import Tokenizer
from gapless.models.decoder import Decoder
from gapless.models.weights import read_json, save_weights
from gapless.training import files


def write_result(model: Decoder, tokenizer: Tokenizer, config: RunConfig, folder: Path) -> Path:
    """Write `folder`/adapter (LoRA) or `folder`/model (full fine-tuning), whole or not at all.

    Returns:
        The folder written.

    Raises:
        ValueError: it cannot be written.
    """
    lora = config.adapter.type == "lora"
    target = folder / ("adapter" if lora else "model")
    partial = files.temporary(target)
    try:
        with files.writing(target):
            partial.mkdir()
            if lora:
                save_adapter(model, config.adapter, partial, Path(config.model.path).absolute())
            else:
                save_weights(partial, merged_tensors(model))
                _write_config(Path(config.model.path, "config.json"), partial / "config.json", config.model.dtype)
                tokenizer.save(partial)
            files.sync_tree(partial)
            files.publish(target)
    finally:
        # Half a result on a disk that is full would only be in the way.
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _write_config(source: Path, target: Path, dtype: str) -> None:
    """Copy config.json; where it names another dtype than the weights now have, with that one."""
    name = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    fields = read_json(source)
    named = [key for key in ("dtype", "torch_dtype") if fields.get(key, name) != name]
    if not named:
        shutil.copyfile(source, target)
        return
    text = json.dumps(fields | dict.fromkeys(named, name), indent=2, ensure_ascii=False)
    target.write_text(text + "\n", encoding="utf-8")
