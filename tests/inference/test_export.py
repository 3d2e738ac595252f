"""What export writes is what transformers and PEFT load, with our logits; what it must not write it does not."""

import ast
import errno
import json
import shlex
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import gapless.inference.export as export_module
from gapless.adapters.lora import adapter_views, apply_lora
from gapless.adapters.peft import save_adapter
from gapless.batch import segments
from gapless.config import AdapterConfig
from gapless.data.tokenizer import Tokenizer
from gapless.inference.export import export
from gapless.inference.load import find_model, load_model
from gapless.models.weights import load_weights
from tiny import write_tiny_model
from tiny_tokenizer import write_tiny_tokenizer

VOCAB = 384
CONFIG = AdapterConfig(r=4, lora_alpha=8.0)
TOKENS = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(0))


def write_base(folder, dtype="fp32", **overrides):
    write_tiny_model(folder, "qwen3", dtype=dtype, vocab_size=VOCAB, **overrides)
    write_tiny_tokenizer(folder)
    return folder


def write_adapter(base, folder, config=CONFIG, size=0.3):
    """An adapter with all tensors moved, as training would."""
    model = load_weights(base)
    apply_lora(model, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for view in adapter_views(model):
        value = view.read(view.parameter) + size * torch.randn(view.shape, generator=generator)
        view.write(view.parameter, value)
    save_adapter(model, config, folder, base)
    return folder


@torch.no_grad()
def our_logits(folder):
    model, _ = load_model(folder, dtype="fp32", device="cpu")
    return model.logits(model(TOKENS.int(), segments([len(TOKENS)])))


@torch.no_grad()
def transformers_logits(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS[None]).logits[0]


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path, base):
    return write_adapter(base, tmp_path / "adapter")


def test_merged_folder_loads_in_transformers_with_our_logits(tmp_path, base, adapter, capsys):
    out = tmp_path / "merged"
    exported = export(adapter, out, max_shard_bytes=40_000)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(transformers_logits(out), our_logits(adapter), rtol=0, atol=1e-4)
    torch.testing.assert_close(our_logits(out), our_logits(adapter), rtol=0, atol=1e-4)
    assert (our_logits(adapter) - our_logits(base)).abs().max() > 0.1
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    templates = sorted(path.name for path in base.glob("*.jinja"))
    assert templates == sorted(path.name for path in out.glob("*.jinja"))
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in templates)
    assert AutoTokenizer.from_pretrained(out).eos_token_id == AutoTokenizer.from_pretrained(base).eos_token_id
    assert exported.changed == 3 * 7
    assert str(out) in capsys.readouterr().out
    assert not list(tmp_path.glob(".tmp-*"))


def test_bf16_weights_are_rounded_once_and_config_names_their_dtype(tmp_path):
    base = write_base(tmp_path / "base", dtype="bf16")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    adapter = write_adapter(base, tmp_path / "adapter")
    export(adapter, tmp_path / "merged")
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written == {**config, "torch_dtype": "bfloat16"}
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    exact = weights[f"{name}.weight"].double() + 2.0 * b @ a
    merged = load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    assert (merged == exact.bfloat16()).float().mean() > 0.999


@pytest.mark.parametrize("saved", [("lm_head",), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_a_trained_tied_head_survives(tmp_path, saved):
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    adapter = write_adapter(base, tmp_path / "adapter", AdapterConfig(r=2, modules_to_save=saved))
    export(adapter, tmp_path / "merged")
    ours = our_logits(adapter)
    torch.testing.assert_close(transformers_logits(tmp_path / "merged"), ours, rtol=0, atol=1e-4)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    with torch.no_grad():
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
        torch.testing.assert_close(peft(TOKENS[None]).logits[0], ours, rtol=0, atol=1e-4)
        merged = peft.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS[None]).logits[0], ours, rtol=0, atol=1e-4)
        assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()


def test_adapter_export_is_a_peft_folder(tmp_path, base, adapter):
    exported = export(adapter, tmp_path / "out", kind="adapter")
    assert exported.tensors == 3 * 7 * 2
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    assert "--max-lora-rank 8 " in exported.next_commands[0]
    with torch.no_grad():
        peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
        torch.testing.assert_close(peft(TOKENS[None]).logits[0], our_logits(adapter), rtol=0, atol=1e-4)


def test_an_adapter_with_a_tokenizer_of_its_own_keeps_the_models_generation_config(tmp_path, base, adapter):
    write_tiny_tokenizer(adapter)
    (adapter / "generation_config.json").unlink()
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 4], "top_k": 7}')
    export(adapter, tmp_path / "merged")
    assert (tmp_path / "merged" / "generation_config.json").read_bytes() == (
        base / "generation_config.json"
    ).read_bytes()
    assert {1, 4} <= set(load_model(adapter, dtype="fp32", device="cpu")[1].eos_ids)


def test_an_end_token_that_no_file_lists_is_named(tmp_path, base, adapter, capsys):
    """Base models: vLLM would go on past the end of the turn they were taught."""
    assert export(adapter, tmp_path / "listed").note is None
    (base / "generation_config.json").write_text('{"eos_token_id": 4}')
    end = Tokenizer.from_folder(base).unlisted_end
    assert end == "<|im_end|>"
    assert end in export(adapter, tmp_path / "unlisted").note
    assert f"does not list {end}" in capsys.readouterr().out


def test_next_commands_hold_with_awkward_names(tmp_path, base, adapter):
    out = tmp_path / "it's $a b"
    for kind in ("merged", "adapter"):
        for command in export(adapter, out / kind, kind=kind).next_commands:
            words = shlex.split(command)
            assert any(str(out / kind) in word for word in words)
            if words[0] == "python":
                assert str(out / kind) in [
                    node.value for node in ast.walk(ast.parse(words[2])) if hasattr(node, "value")
                ]


def test_a_full_disk_and_an_unreadable_source_are_told_apart(tmp_path, base, adapter, monkeypatch):
    for error, expected, message in (
        (OSError(errno.ENOSPC, "No space left on device"), ValueError, "cannot write .*merged: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", str(base / "a")), PermissionError, "base/a"),
    ):
        monkeypatch.setattr(export_module, "save_weights", Mock(side_effect=error))
        with pytest.raises(expected, match=message):
            export(adapter, tmp_path / "merged")
        assert not list(tmp_path.glob("*merged*"))


def write_run(folder, base, chat_template=None):
    lines = [f'model.path = "{base}"', 'data.train = ["rows.jsonl"]', f'training.output_dir = "{folder}"']
    if chat_template is not None:
        lines.append(f'data.chat_template = "{chat_template}"')
    folder.mkdir()
    (folder / "config.toml").write_text("\n".join(lines))


def test_a_run_folder_exports_its_adapter_with_the_template_it_was_trained_with(tmp_path, base):
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    run = tmp_path / "run"
    write_run(run, base, template)
    with pytest.raises(FileNotFoundError, match="run without a result"):
        find_model(run)
    write_adapter(base, run / "adapter")
    for kind in ("merged", "adapter"):
        export(run, tmp_path / kind, kind=kind)
        model, tokenizer = load_model(tmp_path / kind, dtype="fp32", device="cpu")
        assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<hi>"
        logits = model.logits(model(TOKENS.int(), segments([len(TOKENS)])))
        torch.testing.assert_close(logits, our_logits(run / "adapter"), rtol=0, atol=1e-4)
    assert (tmp_path / "merged" / "chat_template.jinja").read_bytes() == template.read_bytes()


def test_a_run_of_full_fine_tuning_is_compared_with_its_start(tmp_path, base):
    run = tmp_path / "run"
    write_run(run, base)
    write_base(run / "model")
    with pytest.raises(ValueError, match="would equal its base"):
        export(run, tmp_path / "merged")
    tensors = load_file(run / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, run / "model" / "model.safetensors", metadata={"format": "pt"})
    assert export(run, tmp_path / "merged").changed == 1


@pytest.mark.parametrize("size", [0.0, 1e-12])
def test_a_merged_model_equal_to_its_base_is_refused(tmp_path, size):
    base = write_base(tmp_path / "base", dtype="bf16")
    model = load_weights(base)
    apply_lora(model, CONFIG, seed=0)
    for view in adapter_views(model):
        if "lora_B" in view.name:
            view.write(view.parameter, torch.full(view.shape, size))
    save_adapter(model, CONFIG, tmp_path / "adapter", base)
    with pytest.raises(ValueError, match="would equal its base"):
        export(tmp_path / "adapter", tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_what_does_not_read_back_is_refused(tmp_path, adapter, monkeypatch):
    write = export_module.save_weights

    def damaged(folder, tensors, **settings):
        tensors = dict(tensors)
        tensors["model.layers.2.mlp.up_proj.weight"][7, 5] += 1e-3
        return write(folder, tensors.items(), **settings)

    monkeypatch.setattr(export_module, "save_weights", damaged)
    with pytest.raises(ValueError, match="up_proj.weight did not read back"):
        export(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()

    monkeypatch.setattr(
        export_module, "save_weights", lambda folder, tensors, **settings: write(folder, list(tensors)[:-1], **settings)
    )
    with pytest.raises(
        ValueError, match="do not match config.json: model.norm.weight|do not match config.json: lm_head"
    ):
        export(adapter, tmp_path / "merged")
    assert not list(tmp_path.glob(".tmp-*"))


def test_bad_sources_and_targets_are_refused(tmp_path, base, adapter):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="full is not empty"):
        export(adapter, tmp_path / "full")
    assert (tmp_path / "full" / "note.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="has no adapter"):
        export(base, tmp_path / "out", kind="adapter")
    with pytest.raises(FileNotFoundError, match="no model, adapter or run folder"):
        export(tmp_path / "full", tmp_path / "out")
    with pytest.raises(ValueError, match="not a plain model folder"):
        load_model(adapter, adapter=adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "someone/model"}))
    with pytest.raises(FileNotFoundError, match="trained on someone/model"):
        export(adapter, tmp_path / "out")
    model, _ = load_model(base, adapter=adapter, dtype="fp32", device="cpu")
    assert sum(view.parameter.requires_grad for view in adapter_views(model)) == 42
    (tmp_path / "empty").mkdir()
    export(base, tmp_path / "empty")
    torch.testing.assert_close(our_logits(tmp_path / "empty"), our_logits(base), rtol=0, atol=0)
