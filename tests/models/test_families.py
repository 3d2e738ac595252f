"""Each family against transformers: packed documents of unlike lengths here, one document at a time there."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import tiny_config, write_tiny_model

from gapless.batch import segments
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.models.views import hf_views
from gapless.models.weights import load_weights

LENGTHS = (5, 1, 70, 7)
TOKENS = 90

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24}
YARN_ALL = {
    **YARN,
    "original_max_position_embeddings": 80,
    "beta_fast": 9.0,
    "beta_slow": 0.4,
    "mscale": 0.8,
    "mscale_all_dim": 0.3,
    "truncate": False,
}
WIDE = {"head_dim": 24}

# name: (family, config overrides, max_length)
CASES = {
    "llama": ("llama", {}, None),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False}, None),
    "llama-head-dim": ("llama", {"head_dim": 14}, None),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}, None),
    "llama-no-kv-field": ("llama", {"num_key_value_heads": None}, None),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, None),
    "llama-dynamic-short": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 70),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32}, 70),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3, **WIDE}, None),
    "llama-parameters": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 777.0}, "rope_theta": None}, None),
    "llama-yarn": ("llama", {"rope_scaling": YARN_ALL, **WIDE}, None),
    "qwen2": ("qwen2", {}, None),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}, None),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}, None),
    "qwen2-yarn-factor": ("qwen2", {"rope_scaling": {**YARN, "attention_factor": 1.3}, **WIDE}, None),
    "qwen2-yarn-short": ("qwen2", {"rope_scaling": {**YARN, "original_max_position_embeddings": 4}}, None),
    "qwen2-yarn-long-waves": ("qwen2", {"rope_scaling": YARN, "rope_theta": 1.5}, None),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, None),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}, None),
    "qwen3": ("qwen3", {}, None),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": False, "head_dim": 20}, None),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        None,
    ),
}


@functools.cache
def stream():
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (TOKENS,), generator=generator, dtype=torch.int32)


def documents():
    start = 0
    for length in LENGTHS:
        yield slice(start, start + length)
        start += length


def logits_of(model):
    with torch.no_grad():
        return model.logits(model(stream(), segments(LENGTHS, tokens=TOKENS)))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """For a case: the folder and transformers' logits of each document."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    @functools.cache
    def of(case):
        family, overrides, _ = CASES[case]
        folder = write_tiny_model(tmp_path_factory.mktemp(case), family, seed=3, **overrides)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return folder, [model(stream()[None, part].long()).logits[0] for part in documents()]

    return of


def compared(case):
    """Documents that both sides scale alike: transformers chooses "dynamic" anew for each document's length."""
    return [2] if case == "llama-dynamic" else range(len(LENGTHS))


def difference(logits, expected, case):
    parts = list(documents())
    return max((logits[parts[i]] - expected[i]).abs().max().item() for i in compared(case))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, reference):
    folder, expected = reference(case)
    model = load_weights(folder, max_length=CASES[case][2])
    assert difference(logits_of(model), expected, case) < 1e-4
    assert max(part.abs().max() for part in expected) > 1


# (case, changes to its config.json; a dotted name goes into a nested object)
CHANGES = [
    ("llama", {"rope_theta": 9000.0}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama", {"attention_bias": False}),
    ("llama", {"mlp_bias": False}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama-tied", {"tie_word_embeddings": False}),
    ("llama", {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 4}),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
    ("llama", {"num_hidden_layers": 2}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1.1}}),
    ("llama-linear", {"rope_scaling.factor": 2.4}),
    ("llama-linear", {"rope_scaling.type": "dynamic"}),
    ("llama-dynamic", {"rope_scaling.factor": 1.9}),
    ("llama-dynamic", {"max_position_embeddings": 34}),
    ("llama-llama3", {"rope_scaling.factor": 4.4}),
    ("llama-llama3", {"rope_scaling.low_freq_factor": 1.3}),
    ("llama-llama3", {"rope_scaling.high_freq_factor": 4.0}),
    ("llama-llama3", {"rope_scaling.original_max_position_embeddings": 60}),
    ("llama-parameters", {"rope_parameters.rope_theta": 770.0}),
    ("llama-yarn", {"rope_scaling.factor": 3.3}),
    ("llama-yarn", {"rope_scaling.beta_fast": 7.0}),
    ("llama-yarn", {"rope_scaling.beta_slow": 0.3}),
    ("llama-yarn", {"rope_scaling.mscale": 0.9}),
    ("llama-yarn", {"rope_scaling.mscale_all_dim": 0.4}),
    ("llama-yarn", {"rope_scaling.truncate": True}),
    ("llama-yarn", {"rope_scaling.original_max_position_embeddings": 90}),
    ("qwen2-yarn-factor", {"rope_scaling.attention_factor": 1.2}),
    ("qwen2-window", {"sliding_window": 10}),
    ("qwen2-window", {"sliding_window": 8}),
    ("qwen2-window", {"use_sliding_window": False}),
    ("qwen2-window", {"max_window_layers": 2}),
    ("qwen3-window", {"layer_types": ["full_attention"] * 3}),
    ("qwen3-window", {"layer_types": ["sliding_attention"] * 3}),
    ("qwen3", {"attention_bias": False}),
    ("qwen3", {"rms_norm_eps": 1e-3}),
    ("qwen3", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
]


def changed_config(case, changes):
    family, overrides, _ = CASES[case]
    config = json.loads(json.dumps(tiny_config(family, **overrides)))
    for name, value in changes.items():
        *path, leaf = name.split(".")
        holder = functools.reduce(dict.__getitem__, path, config)
        assert holder.get(leaf) != value
        holder[leaf] = value
    if config["model_type"] == "llama":
        config = {name: value for name, value in config.items() if "window" not in name}
    return config


@pytest.mark.parametrize(("case", "changes"), CHANGES, ids=[f"{case}-{list(changes)[-1]}" for case, changes in CHANGES])
def test_each_feature_matters(case, changes, reference):
    """A feature of the config read wrongly moves the logits far over the tolerance of the test above."""
    folder, expected = reference(case)
    stored = load_file(folder / "model.safetensors")
    model = Decoder(decoder_config(changed_config(case, changes), CASES[case][2]))
    with torch.no_grad():
        for view in hf_views(model):
            if view.name in stored:
                view.write(view.parameter, stored[view.name])
    assert difference(logits_of(model), expected, case) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bf16_error_is_that_of_bf16(family, reference):
    """In bf16 we are at most twice as far from float32 as transformers is in bf16."""
    transformers = pytest.importorskip("transformers")
    folder, expected = reference(family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = logits_of(load_weights(folder, dtype=torch.bfloat16))
    for part, exact in zip(documents(), expected, strict=True):
        with torch.no_grad():
            rounded = theirs(stream()[None, part].long()).logits[0].float()
        budget = 2 * (rounded - exact).square().mean().sqrt() + 1e-3
        assert (ours[part] - exact).square().mean().sqrt() <= budget


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_equal_transformers(family, reference):
    transformers = pytest.importorskip("transformers")
    folder, _ = reference(family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_weights(folder)
    weights = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(1)) / 100
    hidden = ours(stream(), segments(LENGTHS, tokens=TOKENS))
    parts = list(documents())
    sum((ours.logits(hidden)[part] * weights[part]).sum() for part in parts).backward()
    sum((theirs(stream()[None, part].long()).logits[0] * weights[part]).sum() for part in parts).backward()
    expected = dict(theirs.named_parameters())
    for view in hf_views(ours):
        torch.testing.assert_close(view.read(view.parameter.grad), expected[view.name].grad, rtol=1e-4, atol=1e-4)
