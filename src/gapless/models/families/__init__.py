"""The supported families: from a Hugging Face config.json to a DecoderConfig, and the names of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gapless.models.config import DecoderConfig
from gapless.models.families import llama, qwen2, qwen3
from gapless.models.families.fields import Fields

_FAMILIES: Mapping[str, tuple[str, Callable[[Fields, int | None], DecoderConfig]]] = {
    "llama": ("LlamaForCausalLM", llama.decoder_config),
    "qwen2": ("Qwen2ForCausalLM", qwen2.decoder_config),
    "qwen3": ("Qwen3ForCausalLM", qwen3.decoder_config),
}
"""By `model_type`: the name in `architectures`, and the function that reads the config."""


def decoder_config(hf_config: Mapping[str, Any], max_length: int | None = None) -> DecoderConfig:
    """The architecture that a config.json describes.

    Args:
        hf_config: the parsed file.
        max_length: tokens in the longest document of the run, which "dynamic" rotary scaling is chosen for.

    Raises:
        ValueError: an unknown architecture; a field that is missing, wrong, or changes the maths and is not understood.
    """
    model_type = hf_config.get("model_type")
    architectures = hf_config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"config.json: architectures must be a list of names, not {architectures!r}")
    if model_type not in _FAMILIES:
        name = ", ".join(architectures) or model_type or "unnamed"
        raise ValueError(f"architecture {name} is not supported; {', '.join(known_architectures())} are")
    architecture, read = _FAMILIES[model_type]
    if architectures and architecture not in architectures:
        raise ValueError(f"architecture {', '.join(architectures)} is not supported; {architecture} is")
    fields = Fields(hf_config, model_type)
    config = read(fields, max_length)
    fields.finish()
    return config


def known_architectures() -> list[str]:
    """Names that `architectures` in a config.json may have."""
    return [architecture for architecture, _ in _FAMILIES.values()]
