"""Reading a Hugging Face config.json: every field is understood, known not to matter, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gapless.models.config import RotaryConfig
from gapless.models.rotary import yarn_attention_factor

_MISSING = object()

HARMLESS = frozenset(
    # fmt: off
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "length_penalty",
        "max_length",
        "max_position_embeddings",
        "max_sequence_length",
        "min_length",
        "model_max_length",
        "model_type",
        "neftune_noise_alpha",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
        "use_return_dict",
    ]
    # fmt: on
)
"""Fields that do not change what the decoder computes: names, token ids, and defaults of generation."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (0, None),
    "cross_attention_hidden_size": (None,),
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
    "use_mrope": (False, None),
}
"""Fields that change the maths unless they have one of these values, which all families here stand for."""


class Fields:
    """The fields of a config.json, each taken once; `finish` refuses what nobody took."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config, self.family = config, family
        self._left = set(config) - HARMLESS

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The value of a field; a missing one without a default is refused."""
        self._left.discard(name)
        value = self.config.get(name, default)
        if value is _MISSING:
            raise ValueError(f"config.json has no {name}, which a {self.family} model needs")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """A whole number of at least 1."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json: {name} must be a whole number of at least 1, not {value!r}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        """A positive number."""
        return _positive(self.take(name, default), name)

    def flag(self, name: str, default: bool = False) -> bool:
        """One of true and false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def finish(self) -> None:
        """Refuse fields whose meaning is not known here.

        Raises:
            ValueError: naming them.
        """
        for name, allowed in NEUTRAL.items():
            if name in self._left:
                value = self.take(name)
                if not any(value == neutral for neutral in allowed):
                    raise ValueError(f"config.json: {name} = {value!r} is not supported for {self.family} models")
        unknown = sorted(name for name in self._left if self.config[name] is not None)
        if unknown:
            raise ValueError(
                f"config.json has fields that are not understood and may change the model: "
                f"{', '.join(f'{name} = {self.config[name]!r}' for name in unknown)}; remove those that do not"
            )


def head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """D as the config gives it, or H / N."""
    value = fields.take("head_dim", None)
    if value is not None:
        return value
    if hidden % heads:
        raise ValueError(f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads")
    return hidden // heads


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


_ROTARY_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def rotary_config(fields: Fields, max_length: int | None) -> RotaryConfig:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fields: the config.
        max_length: tokens in the longest document of the run; the "dynamic" kind scales for it, once. The model's
            own length by default.
    """
    old, new = fields.take("rope_scaling", None), fields.take("rope_parameters", None)
    # Like transformers, the older spelling wins where a file has both.
    raw = old or new or {}
    if not isinstance(raw, dict):
        raise ValueError(f"config.json: {'rope_scaling' if old else 'rope_parameters'} must be an object, not {raw!r}")
    raw = dict(raw)
    theta = fields.take("rope_theta", 10_000.0)
    theta = _positive(raw.pop("rope_theta", theta), "rope_theta")
    positions = fields.config.get("max_position_embeddings")
    kind, legacy = raw.pop("rope_type", None), raw.pop("type", None)
    kind = kind or legacy or "default"
    if not isinstance(kind, str) or kind not in _ROTARY_KEYS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; {', '.join(_ROTARY_KEYS)} are")
    partial = raw.pop("partial_rotary_factor", 1)
    if partial not in (1, None):
        raise ValueError(f"config.json: partial_rotary_factor = {partial!r} is not supported")
    unknown = sorted(set(raw) - _ROTARY_KEYS[kind])
    if unknown:
        raise ValueError(f"config.json: rope type {kind!r} has fields that are not understood: {', '.join(unknown)}")
    original = fields.take("original_max_position_embeddings", None) or raw.get("original_max_position_embeddings")
    match kind:
        case "linear":
            return RotaryConfig(kind="linear", theta=theta, factor=_value(raw, kind, "factor"))
        case "dynamic":
            trained = _length(positions, "max_position_embeddings")
            length = max(max_length or trained, trained)
            factor = _value(raw, kind, "factor")
            return RotaryConfig(kind="dynamic", theta=theta, factor=factor, trained_length=trained, length=length)
        case "llama3":
            return _llama3(raw, theta, original, positions)
        case "yarn":
            return _yarn(raw, theta, original, positions)
    return RotaryConfig(theta=theta)


def _llama3(raw: dict[str, Any], theta: float, original: Any, positions: Any) -> RotaryConfig:
    low, high = (_value(raw, "llama3", name) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ValueError(f"config.json: low_freq_factor {low} must be under high_freq_factor {high}")
    return RotaryConfig(
        kind="llama3",
        theta=theta,
        factor=_value(raw, "llama3", "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        trained_length=_length(original or positions, "original_max_position_embeddings"),
    )


def _yarn(raw: dict[str, Any], theta: float, original: Any, positions: Any) -> RotaryConfig:
    trained = _length(original or positions, "original_max_position_embeddings")
    factor = raw.get("factor")
    if factor is None:
        factor = _length(positions, "max_position_embeddings") / trained
    factor = _positive(factor, "rope factor")
    attention_factor = raw.get("attention_factor")
    if attention_factor is None:
        # Zero stands for "not set", as it does in transformers.
        scales = (_positive(raw[name], name) if raw.get(name) else None for name in ("mscale", "mscale_all_dim"))
        attention_factor = yarn_attention_factor(factor, *scales)
    return RotaryConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        trained_length=trained,
        beta_fast=_positive(raw.get("beta_fast") or 32, "beta_fast"),
        beta_slow=_positive(raw.get("beta_slow") or 1, "beta_slow"),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_positive(attention_factor, "attention_factor"),
    )


def _value(raw: dict[str, Any], kind: str, name: str) -> float:
    if name not in raw:
        raise ValueError(f"config.json: rope type {kind!r} needs {name}")
    return _positive(raw[name], name)


def _length(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"config.json: {name} must be at least 1, not {value!r}")
    return int(value)


def window_config(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Sliding windows as Qwen2 and Qwen3 spell them: `layer_types`, or all layers from `max_window_layers` on."""
    use = fields.flag("use_sliding_window")
    size, first = fields.take("sliding_window", 4096), fields.take("max_window_layers", 28)
    window = _length(size, "sliding_window") if use and size is not None else None
    types = fields.take("layer_types", None)
    if types is None and window is None:
        return (None,) * layers
    if types is None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"config.json: max_window_layers must be a whole number, not {first!r}")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"config.json: layer_types must be a list of names, not {types!r}")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"config.json: layer_types {', '.join(unknown)} are not supported")
    if len(types) != layers:
        raise ValueError(f"config.json: {len(types)} layer_types for {layers} layers")
    if "sliding_attention" in types and window is None:
        raise ValueError("config.json: layer_types names sliding_attention, but use_sliding_window is not true")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
