"""config.json as published models carry it: read, and read as transformers reads it, in every spelling."""

import importlib
import json

import pytest
import torch
from tests.tiny import tiny_config

from gapless.models.families import decoder_config
from gapless.models.rotary import rotary_frequencies

transformers = pytest.importorskip("transformers")

# What every file of that time holds; sizes and the rest follow per model.
COMMON = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
}
LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA3 = {
    **COMMON,
    **LLAMA2,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
SMOLLM2 = {
    **LLAMA3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
QWEN2 = {
    **COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = {
    **QWEN2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
}
QWEN3_LARGE = {"num_attention_heads": 64, "num_hidden_layers": 64, "max_window_layers": 64, "hidden_size": 5120}

PUBLISHED = {
    "Llama-1 conversion": {
        **{name: value for name, value in LLAMA2.items() if name not in ("num_key_value_heads", "pretraining_tp")},
        "max_sequence_length": 2048,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-06,
    },
    "Llama-2-7b": LLAMA2,
    "Llama-2 with linear scaling": {**LLAMA2, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "Llama-2 with dynamic scaling": {**LLAMA2, "rope_scaling": {"factor": 2.0, "type": "dynamic"}},
    "Llama-3-8B": {**LLAMA3, "max_position_embeddings": 8192, "eos_token_id": 128001},
    "Llama-3.1-8B": {**LLAMA3, "rope_scaling": LLAMA3_ROPE},
    "Llama-3.2-1B": {
        **LLAMA3,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
        "unsloth_fixed": True,
    },
    "Llama-3.2-3B": {
        **LLAMA3,
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": SMOLLM2,
    "Qwen2-0.5B": {**QWEN2, "max_position_embeddings": 131072, "max_window_layers": 24, "sliding_window": 131072},
    "Qwen2.5-0.5B": QWEN2,
    "Qwen2.5-1.5B": {
        **QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_mrope": False,
    },
    "Qwen2.5 with YaRN": {
        **QWEN2,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Qwen2 with windows": {**QWEN2, "use_sliding_window": True, "sliding_window": 4096},
    "Qwen3-0.6B": QWEN3,
    "Qwen3-32B": {**QWEN3, **QWEN3_LARGE, "intermediate_size": 25600, "tie_word_embeddings": False},
    "Qwen3 with YaRN": {
        **QWEN3,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
}


def rotary_of(hf_config):
    """transformers' frequencies and its factor on cosine and sine."""
    family = hf_config.model_type
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(module, f"{family.capitalize()}RotaryEmbedding")(hf_config)
    return rotary.inv_freq, rotary.attention_scaling


@pytest.mark.parametrize("name", PUBLISHED)
def test_read_as_transformers_reads_it(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = decoder_config(PUBLISHED[name])
    sizes = (ours.vocab, ours.hidden, ours.layers, ours.heads, ours.kv_heads, ours.ffn, ours.norm_eps, ours.tied)
    assert sizes == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.intermediate_size,
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    assert ours.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    frequencies, scaling = rotary_of(theirs)
    assert torch.equal(rotary_frequencies(ours.rotary, ours.head_dim), frequencies)
    assert ours.rotary.attention_factor == scaling


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_spelling_of_transformers_5_means_the_same(name, tmp_path):
    """rope_parameters, dtype and layer_types instead of rope_theta, rope_scaling and torch_dtype."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    assert new.keys() >= {"rope_parameters", "dtype"}
    assert not new.keys() & {"rope_theta", "rope_scaling", "torch_dtype"}
    assert decoder_config(new) == decoder_config(PUBLISHED[name])
    assert decoder_config(json.loads(json.dumps({**new, "layer_types": None}))) == decoder_config(PUBLISHED[name])


def test_fields_of_training_tools_do_not_matter():
    extra = {
        "model_max_length": 2048,
        "neftune_noise_alpha": 5,
        "unsloth_version": "2024.9",
        "quantization_config": None,
    }
    assert decoder_config({**tiny_config(), **extra}) == decoder_config(tiny_config())
