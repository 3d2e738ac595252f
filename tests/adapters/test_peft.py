"""Adapters against PEFT on transformers' model of the same folder: files both ways, logits, gradients."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.adapters.merge import merged_tensors
from gapless.adapters.peft import file_views, load_adapter, save_adapter
from gapless.batch import Document, build_batch, segments
from gapless.config import AdapterConfig
from gapless.models.views import hf_views
from gapless.models.weights import load_weights
from tiny import tiny_model, write_tiny_model

TOKENS = torch.randint(0, 256, (21,), generator=torch.Generator().manual_seed(0))
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = {
    "all": ({}, {"r": 4, "lora_alpha": 8.0}),
    "subset": ({}, {"r": 3, "lora_alpha": 5.0, "target_modules": ("v_proj", "up_proj")}),
    "rslora": (
        {},
        {"r": 5, "lora_alpha": 5.0, "use_rslora": True, "target_modules": ("q_proj", "k_proj", "down_proj")},
    ),
    "saved": ({}, {"r": 2, "target_modules": ("q_proj", "o_proj"), "modules_to_save": ("embed_tokens", "lm_head")}),
    "saved head": ({}, {"r": 2, "target_modules": ("gate_proj",), "modules_to_save": ("lm_head",)}),
    "saved tied": (
        {"tie_word_embeddings": True},
        {"r": 2, "lora_alpha": 4.0, "modules_to_save": ("embed_tokens", "lm_head")},
    ),
}


@pytest.fixture(params=CASES, ids=[name.replace(" ", "-") for name in CASES])
def case(request, tmp_path):
    overrides, settings = CASES[request.param]
    return write_tiny_model(tmp_path / "base", **overrides), AdapterConfig(**settings)


def oracle_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def peft_config(config):
    return LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        target_modules=config.target_modules[0] if config.target_modules == ("all-linear",) else config.target_modules,
        modules_to_save=list(config.modules_to_save) or None,
        ensure_weight_tying=len(config.modules_to_save) == 2,
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def logits_of(model):
    return model.logits(model(TOKENS.int(), segments([len(TOKENS)])))


def move(views, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for view in views:
        noise = torch.randn(view.shape, generator=generator)
        value = view.read(view.parameter) + 0.3 * view.shape[1] ** -0.5 * noise
        view.write(view.parameter, value)


def trained(folder, config):
    model = load_weights(folder)
    apply_lora(model, config, seed=0)
    move(adapter_views(model))
    return model


def test_peft_loads_our_adapter(case, tmp_path):
    folder, config = case
    model = trained(folder, config)
    save_adapter(model, config, tmp_path / "adapter", folder)
    oracle = PeftModel.from_pretrained(oracle_of(folder), tmp_path / "adapter")
    with torch.no_grad():
        theirs = oracle(TOKENS[None]).logits[0]
        base = logits_of(load_weights(folder))
        merged = oracle.merge_and_unload()(TOKENS[None]).logits[0]
    ours = logits_of(model)
    assert (ours - base).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, merged, rtol=1e-4, atol=1e-4)


def test_we_load_pefts_adapter(case, tmp_path):
    folder, config = case
    torch.manual_seed(1)
    oracle = get_peft_model(oracle_of(folder), peft_config(config))
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * parameter.shape[1] ** -0.5 * torch.randn_like(parameter))
        theirs = oracle(TOKENS[None]).logits[0]
    oracle.save_pretrained(tmp_path / "adapter")
    model = load_weights(folder)
    loaded = load_adapter(model, tmp_path / "adapter")
    assert (loaded.r, loaded.lora_alpha, loaded.use_rslora) == (config.r, config.lora_alpha, config.use_rslora)
    assert set(loaded.modules_to_save) == set(config.modules_to_save)
    assert set(loaded.target_modules) == set(ALL if config.target_modules == ("all-linear",) else config.target_modules)
    torch.testing.assert_close(logits_of(model), theirs, rtol=1e-4, atol=1e-4)
    # Written again, nothing is lost.
    save_adapter(model, loaded, tmp_path / "again", folder)
    first, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_gradients_equal_pefts(case, tmp_path):
    folder, config = case
    model = trained(folder, config)
    save_adapter(model, config, tmp_path / "adapter", folder)
    oracle = PeftModel.from_pretrained(oracle_of(folder), tmp_path / "adapter", is_trainable=True)
    split = (9, 12)
    documents = [Document(part.int().numpy(), part.numpy() >= 0) for part in TOKENS.split(split)]
    layout = model.batch_layout(rows=1, row_tokens=32, row_documents=4)
    model.loss(build_batch(layout, [documents])).backward()
    for part in TOKENS.split(split):
        logits = oracle(part[None]).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").backward()
    theirs = {name.replace(".default", ""): p.grad for name, p in oracle.named_parameters() if p.requires_grad}
    theirs = {name.replace(".modules_to_save", ""): grad for name, grad in theirs.items()}
    views = list(adapter_views(model))
    if model.config.tied:
        head = theirs.pop("base_model.model.lm_head.weight", None)
        if head is not None:
            theirs["base_model.model.model.embed_tokens.weight"] += head
    assert {view.name for view in views} == theirs.keys()
    for view in views:
        assert view.parameter.grad is not None
        ours, scale = view.read(view.parameter.grad), theirs[view.name].abs().max()
        assert scale > 0
        torch.testing.assert_close(ours, theirs[view.name], rtol=1e-5, atol=1e-5 * float(scale))
    trained_ids = {id(view.parameter) for view in views}
    assert all((p.grad is not None) == (id(p) in trained_ids) for p in model.parameters())


def test_merged_tensors_are_the_live_model(case):
    folder, config = case
    model = trained(folder, config)
    before = {view.name: view.read(view.parameter) for view in file_views(model)}
    fresh = load_weights(folder)
    views = {view.name: view for view in hf_views(fresh)}
    merged = dict(merged_tensors(model))
    assert merged.keys() == views.keys()
    for name, tensor in merged.items():
        views[name].write(views[name].parameter, tensor)
    torch.testing.assert_close(logits_of(fresh), logits_of(model), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[view.name], view.read(view.parameter)) for view in file_views(model))


def test_adapters_on_some_layers_go_both_ways(tmp_path):
    folder = write_tiny_model(tmp_path / "base")
    oracle = get_peft_model(oracle_of(folder), LoraConfig(r=2, target_modules=r".*\.[02]\..*(q_proj|down_proj)"))
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        theirs = oracle(TOKENS[None]).logits[0]
    oracle.save_pretrained(tmp_path / "adapter")
    model = load_weights(folder)
    config = load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(model), theirs, rtol=1e-4, atol=1e-4)
    save_adapter(model, config, tmp_path / "again", folder)
    again = PeftModel.from_pretrained(oracle_of(folder), tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS[None]).logits[0], theirs, rtol=1e-4, atol=1e-4)
    assert sum("lora_A" in name for name, _ in again.named_parameters()) == 4


# ---- what is refused ----


@pytest.fixture
def adapter(tmp_path):
    model = tiny_model()
    config = AdapterConfig(r=2, target_modules=("q_proj",))
    apply_lora(model, config, seed=0)
    save_adapter(model, config, tmp_path / "adapter", "base")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora = True"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern = {'q_proj': 4}"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"some_new_thing": 3}, "some_new_thing = 3"),
        ({"target_modules": ["q_proj", "c_attn"]}, "no c_attn to adapt; possible: .*q_proj"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lacks 6 tensors"),
        ({"target_modules": ["1.self_attn.q_proj"]}, "has 4 tensors without a place"),
        ({"r": 3}, r"lora_A.weight is \[2, 48\], this model takes \[3, 48\]"),
        ({"r": 0}, "r must be at least 1, not 0"),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_name(adapter, fields, message):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=message):
        load_adapter(tiny_model(), adapter)


def test_damaged_adapters_are_refused(adapter):
    path, name = adapter / "adapter_model.safetensors", "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors = load_file(path)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ValueError, match=f"lacks 1 tensors .*{name}"):
        load_adapter(tiny_model(), adapter)
    save_file({**tensors, "base_model.model.extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"has 1 tensors without a place here, for one base_model\.model\.extra"):
        load_adapter(tiny_model(), adapter)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_adapter(tiny_model(), adapter)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors is missing"):
        load_adapter(tiny_model(), adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_adapter(tiny_model(), adapter)


def test_a_head_trained_apart_from_its_embedding_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "base", tie_word_embeddings=True)
    oracle = get_peft_model(oracle_of(folder), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    oracle.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="trained apart, but the model ties them"):
        load_adapter(load_weights(folder), tmp_path / "adapter")


def test_an_adapter_of_a_rank_beyond_its_modules_is_read(tmp_path):
    folder = write_tiny_model(tmp_path / "base")
    model = get_peft_model(oracle_of(folder), peft_config(AdapterConfig(r=40, target_modules=("k_proj",))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        expected = model(TOKENS[None]).logits[0]
    model.save_pretrained(tmp_path / "adapter")
    ours = load_weights(folder)
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours), expected, rtol=0, atol=1e-4)
    assert (logits_of(load_weights(folder)) - expected).abs().max() > 0.1
