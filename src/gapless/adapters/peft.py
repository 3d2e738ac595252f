"""PEFT's adapter folder, in and out: adapter_config.json and adapter_model.safetensors.

Which modules of a file carry adapters follows from its tensors, checked against `target_modules`; what would change
the maths and is not supported is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gapless.adapters.lora import (
    ALL_LINEAR,
    PEFT_PREFIX,
    SAVEABLE,
    adaptable_modules,
    adapted_modules,
    adapter_views,
    apply_to_modules,
    saved_modules,
    select_modules,
)
from gapless.config import AdapterConfig
from gapless.models.decoder import Decoder
from gapless.models.views import TensorView
from gapless.models.weights import read_json, write_safetensors

_EMBED = f"{PEFT_PREFIX}{SAVEABLE['embed_tokens']}.weight"
_HEAD = f"{PEFT_PREFIX}{SAVEABLE['lm_head']}.weight"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_READ = {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "modules_to_save", "peft_type"}
_INERT = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
# Ways to draw the first A and B that leave the base weights alone; the others (PiSSA, OLoRA, ...) rewrite the base.
_PLAIN_INIT = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class AdapterFile:
    """What an adapter folder says of itself."""

    config: AdapterConfig
    targets: tuple[str, ...] | str
    """Names or paths of modules, as PEFT matches them; a string is a regular expression or "all-linear"."""
    base_model: str | None
    """The folder (or hub name) the adapter was trained on."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (Path(folder) / CONFIG_FILE).is_file()


def read_config(folder: str | Path) -> AdapterFile:
    """Reads adapter_config.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: not LoRA, or a field that is not supported, by name.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter: {CONFIG_FILE} is missing")
    fields = read_json(path)
    _refuse_unsupported(fields, path)
    targets = fields.get("target_modules") or ()
    targets = targets if isinstance(targets, str) else tuple(sorted(targets))
    saved = {name.rsplit(".", 1)[-1] for name in fields.get("modules_to_save") or ()}
    numbers: dict[str, Any] = {"lora_dropout": 0.0} | fields
    for name, kind in (("r", int), ("lora_alpha", int | float), ("lora_dropout", int | float)):
        if not isinstance(value := numbers.get(name), kind):
            number = "a whole number" if kind is int else "a number"
            raise ValueError(f"{path}: {name} must be {number}, not {json.dumps(value)}")
    config = AdapterConfig(
        r=numbers["r"],
        lora_alpha=float(numbers["lora_alpha"]),
        lora_dropout=float(numbers["lora_dropout"]),
        use_rslora=bool(fields.get("use_rslora", False)),
        target_modules=(targets,) if isinstance(targets, str) else targets,
        modules_to_save=tuple(sorted(saved)),
    )
    return AdapterFile(config, targets, fields.get("base_model_name_or_path"))


def _refuse_unsupported(fields: dict[str, Any], path: Path) -> None:
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type {fields.get('peft_type')!r} is not supported, only 'LORA'")
    if fields.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias {fields['bias']!r} is not supported, only 'none'")
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"{path}: task_type {fields['task_type']!r} is not supported, only 'CAUSAL_LM'")
    if fields.get("init_lora_weights", True) not in _PLAIN_INIT:
        raise ValueError(
            f"{path}: init_lora_weights {fields['init_lora_weights']!r} changes the base model's weights and is not "
            "supported; convert the adapter to plain LoRA with PEFT"
        )
    known = _READ | _INERT | {"bias", "task_type", "init_lora_weights"}
    active = {name: value for name, value in fields.items() if name not in known and value not in (None, False, {}, [])}
    if active:
        named = ", ".join(f"{name} = {value!r}" for name, value in sorted(active.items()))
        raise ValueError(f"{path}: not supported: {named}")


def save_adapter(
    model: Decoder,
    config: AdapterConfig,
    folder: str | Path,
    base_model_path: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Writes the model's adapter as PEFT does, so that `PeftModel.from_pretrained` gives the same logits.

    Args:
        model: a decoder with `apply_lora` or `load_adapter` applied.
        config: its settings.
        folder: created if missing; files of the same names are overwritten.
        base_model_path: written as base_model_name_or_path.
        tensors: what to write, by the names of `adapter_views`; by default the model's own values. With them the model
            may be on the meta device.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = ((view.name, view.read(view.parameter).cpu()) for view in adapter_views(model))
    stored = dict(own if tensors is None else tensors)
    if _is_head_repeated(model):
        stored[_HEAD] = stored[_EMBED].clone()  # the writer refuses shared memory
    write_safetensors(folder / WEIGHTS_FILE, stored)
    fields = {
        "auto_mapping": None,
        "base_model_name_or_path": str(base_model_path),
        "bias": "none",
        # Tied weights are one parameter here; PEFT is told to keep them one when it merges.
        "ensure_weight_tying": _is_head_repeated(model),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(config.lora_alpha) if float(config.lora_alpha).is_integer() else config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "modules_to_save": saved_modules(model) or None,
        "peft_type": "LORA",
        "r": config.r,
        "revision": None,
        "target_modules": _target_names(model),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": config.use_rslora,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def file_views(model: Decoder) -> Iterator[TensorView]:
    """`adapter_views` as the file has them: a tied weight that is trained under both its names, as PEFT expects."""
    yield from adapter_views(model)
    if _is_head_repeated(model):
        assert model.embed is not None
        weight = model.embed.weight
        yield TensorView(_HEAD, weight, "head.weight", tuple(weight.shape))


def _is_head_repeated(model: Decoder) -> bool:
    return model.config.tied and bool(saved_modules(model))


def _target_names(model: Decoder) -> list[str]:
    """Leaf names if they describe the adapted modules, else full names."""
    adapted = {name for name, _, _ in adapted_modules(model)}
    leaves = {name.rsplit(".", 1)[-1] for name in adapted}
    described = {name for name in adaptable_modules(model) if name.rsplit(".", 1)[-1] in leaves}
    return sorted(leaves if described == adapted else adapted)


def load_adapter(model: Decoder, folder: str | Path) -> AdapterConfig:
    """Applies an adapter folder to a plain decoder; the adapter's tensors become trainable, the rest frozen.

    Returns:
        The adapter's settings.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: something unsupported, a missing, unexpected or misshaped tensor, by name.
    """
    folder = Path(folder)
    file = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a whole adapter: {WEIGHTS_FILE} is missing")
    try:
        with safe_open(path, framework="pt") as tensors:
            _load(model, file, tensors, path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    saved = tuple(saved_modules(model))
    return replace(file.config, target_modules=tuple(_target_names(model)), modules_to_save=saved)


def _load(model: Decoder, file: AdapterFile, tensors: Any, path: Path) -> None:
    stored = set(tensors.keys())
    _check_tied(model, tensors, stored, path)
    apply_to_modules(model, file.config, _targets(model, file.targets))
    views = {view.name: view for view in file_views(model)}
    if missing := sorted(views.keys() - stored):
        raise ValueError(f"{path} lacks {len(missing)} tensors that {CONFIG_FILE} promises, for one {missing[0]}")
    if unexpected := sorted(stored - views.keys()):
        raise ValueError(f"{path} has {len(unexpected)} tensors without a place here, for one {unexpected[0]}")
    for name, view in views.items():
        tensor = tensors.get_tensor(name)
        if tuple(tensor.shape) != view.shape:
            raise ValueError(f"{path}: {name} is {list(tensor.shape)}, this model takes {list(view.shape)}")
        view.write(view.parameter, tensor)


def _targets(model: Decoder, targets: tuple[str, ...] | str) -> list[str]:
    if isinstance(targets, tuple) or targets == ALL_LINEAR:
        return select_modules(model, (targets,) if isinstance(targets, str) else targets)
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise ValueError(f"{CONFIG_FILE}: target_modules {targets!r} is no regular expression: {error}") from error
    return [name for name in adaptable_modules(model) if pattern.fullmatch(name)]


def _check_tied(model: Decoder, tensors: Any, stored: set[str], path: Path) -> None:
    if not model.config.tied or not stored & {_EMBED, _HEAD}:
        return
    if not stored >= {_EMBED, _HEAD} or not torch.equal(tensors.get_tensor(_EMBED), tensors.get_tensor(_HEAD)):
        raise ValueError(
            f"{path} holds an embedding and a head that were trained apart, but the model ties them; train with "
            "ensure_weight_tying = true in PEFT, or on a model with tie_word_embeddings = false"
        )
