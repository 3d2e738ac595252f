"""Qwen3 (dense): query and key heads normalised before the rotation, head_dim of its own."""

from __future__ import annotations

from gapless.models.config import DecoderConfig
from gapless.models.families.fields import Fields, rotary_config, window_config


def decoder_config(fields: Fields, max_length: int | None) -> DecoderConfig:
    """Read a Qwen3ForCausalLM config."""
    heads, layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
    attention_bias = fields.flag("attention_bias")
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        hidden=fields.count("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", 32) or heads,
        head_dim=fields.count("head_dim", 128),
        ffn=fields.count("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary_config(fields, max_length),
        windows=window_config(fields, layers),
        qk_norm=True,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        tied=fields.flag("tie_word_embeddings"),
    )
