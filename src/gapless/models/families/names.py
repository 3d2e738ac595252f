"""Hugging Face names of the modules that hold weights. The three families share one scheme."""

from __future__ import annotations

EMBED = "model.embed_tokens"
NORM = "model.norm"
HEAD = "lm_head"

# Inside "model.layers.<i>.":
ATTENTION = "self_attn"
MLP = "mlp"
ATTENTION_NORM = "input_layernorm"
MLP_NORM = "post_attention_layernorm"
Q_NORM = "self_attn.q_norm"
K_NORM = "self_attn.k_norm"


def layer_name(layer: str) -> str:
    """Name of a layer's module."""
    return f"model.layers.{layer}"


def is_computed(name: str) -> bool:
    """Whether a tensor of a file is a buffer that is computed here (files of early Llama conversions carry it)."""
    return name.endswith("rotary_emb.inv_freq")
