"""Reading config.json: understood, known not to matter, or refused by name."""

import pytest
from tests.tiny import tiny_config

from gapless.models.families import decoder_config

SLIDING = {"use_sliding_window": True, "sliding_window": 8}
YARN = {"type": "yarn", "factor": 2.0}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

REFUSED = [
    ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel"),
    ("llama", {"model_type": None, "architectures": None}, "architecture unnamed"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architecture LlamaForSequenceClassification"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "} is not supported for llama models"),
    ("qwen2", {"use_mrope": True}, "use_mrope = True is not supported"),
    ("llama", {"sliding_window": 128}, "sliding_window = 128"),
    ("llama", {"logit_scale": 0.1}, "logit_scale = 0.1; remove those that do not"),
    ("qwen2", {"attention_bias": False}, "attention_bias = False"),
    ("qwen2", {"mlp_bias": True}, "mlp_bias = True"),
    ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    ("qwen3", {"num_experts": 8}, "num_experts = 8"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}}, "not understood: extra"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor must be a positive number, not -2.0"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None}, "max_position"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
    ("llama", {"hidden_size": None}, "no hidden_size"),
    ("llama", {"hidden_size": "48"}, "hidden_size must be a whole number"),
    ("llama", {"num_key_value_heads": 4}, "4 key-value heads do not divide 6"),
    ("llama", {"head_dim": 7}, "head_dim 7 is odd"),
    ("llama", {"hidden_size": 50}, "hidden_size 50 is not a multiple of 6"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("qwen2", {**SLIDING, "layer_types": ["full_attention"]}, "1 layer_types for 3 layers"),
    ("qwen2", {**SLIDING, "layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is not true"),
    ("qwen2", {**SLIDING, "sliding_window": 0}, "sliding_window must be"),
    ("qwen2", {**SLIDING, "max_window_layers": "all"}, "max_window_layers must be a whole number, not 'all'"),
    (
        "qwen2",
        {**SLIDING, "layer_types": "full_attention"},
        "layer_types must be a list of names, not 'full_attention'",
    ),
    ("llama", {"architectures": "FooForCausalLM"}, "architectures must be a list of names, not 'FooForCausalLM'"),
    ("llama", {"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, not inf"),
    ("llama", {"rope_scaling": {"type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
    ("llama", {"rope_scaling": {**YARN, "mscale": "a", "mscale_all_dim": 1}}, "mscale must be a positive number"),
    (
        "llama",
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "low_freq_factor 4.0 must be under high_freq_factor",
    ),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused_by_name(family, change, message):
    with pytest.raises(ValueError, match=r".") as error:
        decoder_config(tiny_config(family, **change))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_fields_that_do_not_matter_are_accepted():
    extra = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "transformers_version": "4.42.3",
        "attention_dropout": 0.0,
        "pad_token_id": 2,
        "_name_or_path": "somewhere",
    }
    assert decoder_config(tiny_config("llama", **extra)) == decoder_config(tiny_config("llama"))


def test_old_and_new_spelling_of_rope_agree():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = tiny_config("llama", rope_theta=5e5, rope_scaling=scaling)
    new = tiny_config("llama", rope_theta=None, rope_parameters={**scaling, "rope_theta": 5e5})
    assert decoder_config(old) == decoder_config(new)
    assert decoder_config(old).rotary.trained_length == 512


def test_dynamic_is_chosen_once_from_max_length():
    config = tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    assert [decoder_config(config, length).rotary.length for length in (None, 32, 64, 200)] == [64, 64, 64, 200]


def test_windows():
    by_layer = {**SLIDING, "max_window_layers": 2}
    assert decoder_config(tiny_config("qwen2", **by_layer)).windows == (None, None, 8)
    assert decoder_config(tiny_config("qwen3", **by_layer, layer_types=["sliding_attention"] * 3)).windows == (8, 8, 8)
    assert decoder_config(tiny_config("qwen2", **{**by_layer, "use_sliding_window": False})).windows == (None,) * 3
