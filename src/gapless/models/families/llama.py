"""Llama 2 and 3, and models of the same architecture such as SmolLM2."""

from __future__ import annotations

from gapless.models.config import DecoderConfig
from gapless.models.families.fields import Fields, head_dim, rotary_config


def decoder_config(fields: Fields, max_length: int | None) -> DecoderConfig:
    """Read a LlamaForCausalLM config."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = fields.count("num_hidden_layers")
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.take("num_key_value_heads", None) or heads,
        head_dim=head_dim(fields, hidden, heads),
        ffn=fields.count("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary_config(fields, max_length),
        windows=(None,) * layers,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        tied=fields.flag("tie_word_embeddings"),
    )
