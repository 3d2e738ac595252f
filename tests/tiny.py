"""Tiny random models in Hugging Face's format, written without transformers."""

import json
from pathlib import Path

import torch

from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import hf_views
from gapless.models.weights import save_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FAMILY_FIELDS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "pretraining_tp": 1},
    "qwen2": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2},
    "qwen3": {
        "attention_bias": True,
        "head_dim": 16,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
}


def tiny_config(family="llama", **overrides):
    """A config.json: 3 layers, hidden 48, 6 heads on 2 key-value heads, vocabulary 256; a None drops a field."""
    config = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 256,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
        **_FAMILY_FIELDS[family],
        **overrides,
    }
    return {name: value for name, value in config.items() if value is not None}


def randomise(model, seed=0):
    """Fill every weight, biases and norms included, so that none of them can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for view in hf_views(model):
            noise = torch.randn(view.shape, generator=generator)
            if "norm" in view.name:
                value = 1 + 0.3 * noise
            elif len(view.shape) == 1:
                value = 0.3 * noise
            else:
                value = noise * (0.5 if "embed" in view.name else 1.2 * view.shape[1] ** -0.5)
            view.write(view.parameter, value)


def tiny_model(family="llama", seed=0, dtype="fp32", max_length=None, **overrides):
    """The model that `write_tiny_model` writes."""
    model = Decoder(decoder_config(tiny_config(family, **overrides), max_length), dtype=DTYPES[dtype])
    randomise(model, seed)
    return model


def write_tiny_model(folder, family="llama", seed=0, dtype="fp32", **overrides):
    """Write config.json and model.safetensors; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    config["torch_dtype"] = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model = tiny_model(family, seed, dtype, **overrides)
    save_weights(folder, ((view.name, view.read(view.parameter)) for view in hf_views(model)))
    return folder
