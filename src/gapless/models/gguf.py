"""GGUF to a Hugging Face folder: Llama-architecture files with a byte-level BPE tokenizer, such as SmolLM2.

A GGUF file (github.com/ggml-org/ggml, docs/gguf.md) holds everything such a folder holds, in other words: typed
metadata instead of config.json, the tokens and merges instead of tokenizer.json, and quantised tensors. Each tensor is
dequantised, rounded to bf16 and written; the quantisation is not kept. What the file says and this module does not
understand is refused by name, so that a converted model never computes something else than its source.

Two facts are not in the file as a Hugging Face model needs them: rows of q and k are interleaved for the other rotary
convention and have to be sorted back, and the pre-tokenizer is only named.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gapless.models.weights import save_weights

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Metadata under "llama." that is read here; the rest may change the maths, so it is refused.
KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
CONTROL, USER_DEFINED = 3, 4  # token types of gguf.md


def hf_folder_from_gguf(gguf_path: str | Path, folder: str | Path) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder with bf16 weights, one tensor in memory at a time.

    The folder appears under its name only when it is complete; one that is there already is taken as it is.

    Args:
        gguf_path: file of the llama architecture, of any tensor types that the package `gguf` can dequantise.
        folder: where the model goes: config.json, generation_config.json, model.safetensors, tokenizer.json,
            tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

    Returns:
        The folder.

    Raises:
        ValueError: the package `gguf` is missing, `folder` holds something else, or the file has another architecture,
            a tensor, a setting or a pre-tokenizer that is not understood.
        FileNotFoundError: there is no such file.
    """
    gguf_path, folder = Path(gguf_path), Path(folder)
    if (folder / "config.json").exists():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds files but no config.json: remove it or name another folder")
    if not gguf_path.is_file():
        raise FileNotFoundError(f"{gguf_path}: no such file")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading GGUF files needs the package gguf: pip install 'gapless[demo]'")
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(metadata, {tensor.name for tensor in reader.tensors}, gguf_path)
    tokenizer = _tokenizer(metadata, gguf_path)

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        save_weights(partial, _tensors(reader, config))
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(metadata))
        _write_json(partial / "special_tokens_map.json", _special_tokens(metadata))
        _write_json(partial / "generation_config.json", _token_ids(metadata))
        _write_json(partial / "config.json", config)
        if "tokenizer.chat_template" in metadata:
            (partial / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


# ---- config.json ----


def _config(metadata: dict[str, Any], tensor_names: set[str], path: Path) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{path}: architecture {architecture!r} cannot be converted, only 'llama'")
    settings = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    if unknown := sorted(settings.keys() - KNOWN_KEYS):
        raise ValueError(f"{path}: setting llama.{unknown[0]} is not understood")
    heads = settings["attention.head_count"]
    head_dim = settings.get("attention.key_length", settings["embedding_length"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.get(key, head_dim) != head_dim:
            raise ValueError(f"{path}: llama.{key} = {settings[key]} differs from the heads' {head_dim} channels")
    layers = settings["block_count"]
    _check_tensors(tensor_names, layers, path)
    rope = _rope_parameters(settings, path)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": settings["embedding_length"],
        "intermediate_size": settings["feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(settings["attention.layer_norm_rms_epsilon"]),
        "rope_theta": rope["rope_theta"],  # read by transformers 4, rope_parameters by 5
        "rope_parameters": rope,
        "max_position_embeddings": settings["context_length"],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        **_token_ids(metadata),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _rope_parameters(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    theta = _decimal(settings.get("rope.freq_base", 10000.0))
    scaling = settings.get("rope.scaling.type", "none")
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": _decimal(settings["rope.scaling.factor"])}
    raise ValueError(f"{path}: llama.rope.scaling.type = {scaling!r} is not understood, only 'none' and 'linear'")


def _check_tensors(names: set[str], layers: int, path: Path) -> None:
    expected = {f"blk.{layer}.{name}" for layer in range(layers) for name in LAYER_TENSORS} | MODEL_TENSORS.keys()
    if unknown := sorted(names - expected):
        raise ValueError(f"{path}: tensor {unknown[0]} is not understood")
    if missing := sorted(expected - names - {"output.weight"}):
        raise ValueError(f"{path}: tensor {missing[0]} is missing")


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32 (GGUF stores 1e-5 as 9.999999747378752e-06)."""
    return float(str(np.float32(value)))


# ---- weights ----


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        weight = _dequantize(tensor)
        block, _, rest = tensor.name.partition(".")
        if block != "blk":
            yield MODEL_TENSORS[tensor.name], weight
            continue
        layer, _, name = rest.partition(".")
        if name == "attn_q.weight":
            weight = _sort_rotary_rows(weight, config["num_attention_heads"])
        elif name == "attn_k.weight":
            weight = _sort_rotary_rows(weight, config["num_key_value_heads"])
        yield f"model.layers.{layer}.{LAYER_TENSORS[name]}", weight


def _dequantize(tensor: ReaderTensor) -> torch.Tensor:
    from gguf import dequantize

    values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


def _sort_rotary_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the interleaving of q or k [heads * D, H]: from pairs (2i, 2i + 1) to pairs (i, i + D/2)."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


# ---- tokenizer ----


def _tokenizer(metadata: dict[str, Any], path: Path) -> Tokenizer:
    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    if kind != "gpt2" or pre not in known:
        raise ValueError(
            f"{path}: tokenizer {kind!r} with pre-tokenizer {pre!r} cannot be converted, only 'gpt2' with {list(known)}"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = known[pre]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata)
    added = [
        AddedToken(t, special=k == CONTROL, normalized=False)
        for t, k in zip(tokens, types, strict=True)
        if k in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _post_processor(metadata: dict[str, Any]) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=True)
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return byte_level
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = metadata["tokenizer.ggml.tokens"][bos_id]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
    return processors.Sequence([byte_level, template])


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id, as far as the file names them."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {f"{name}_token_id": f"tokenizer.ggml.{source}_token_id" for name, source in names.items()}
    return {name: metadata[key] for name, key in keys.items() if key in metadata}


def _special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {name.removesuffix("_id"): tokens[index] for name, index in _token_ids(metadata).items()}
    if "tokenizer.ggml.unknown_token_id" in metadata:
        special["unk_token"] = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    return special


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(metadata),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
