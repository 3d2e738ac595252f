"""Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows in the upper layers if switched on."""

from __future__ import annotations

from gapless.models.config import DecoderConfig
from gapless.models.families.fields import Fields, head_dim, rotary_config, window_config


def decoder_config(fields: Fields, max_length: int | None) -> DecoderConfig:
    """Read a Qwen2ForCausalLM config."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", 32) or heads,
        head_dim=head_dim(fields, hidden, heads),
        ffn=fields.count("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary_config(fields, max_length),
        windows=window_config(fields, layers),
        qkv_bias=True,
        tied=fields.flag("tie_word_embeddings"),
    )
