"""Weights in and out: bytes stay, nothing is doubled, everything out of place is refused by name."""

import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import DTYPES, tiny_model, write_tiny_model

from gapless.models.views import TensorView, hf_views
from gapless.models.weights import load_weights, save_weights


def stored(folder):
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def bits(tensor):
    return tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def assert_same_bytes(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(bits(tensor), bits(right[name])), name


def all_tensors(model):
    return ((view.name, view.read(view.parameter)) for view in hf_views(model))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "overrides"), [("llama", {}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {"head_dim": 20})]
)
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000, 1])
def test_round_trip(tmp_path, family, overrides, dtype, shard_bytes):
    source = write_tiny_model(tmp_path / "source", family, dtype=dtype, **overrides)
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded/config.json").write_bytes((source / "config.json").read_bytes())
    files = save_weights(
        tmp_path / "sharded", all_tensors(load_weights(source, dtype=DTYPES[dtype])), max_shard_bytes=shard_bytes
    )
    again = load_weights(tmp_path / "sharded", dtype=DTYPES[dtype])
    assert_same_bytes(stored(source), dict(all_tensors(again)))
    assert_same_bytes(stored(source), stored(tmp_path / "sharded"))
    if shard_bytes < 5_000_000_000:
        assert len(files) > 3
        index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files[:-1]}
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(source).values())
        assert all(name in load_file(tmp_path / "sharded" / file) for name, file in index["weight_map"].items())
    assert sorted(tmp_path.glob("sharded/*.safetensors")) == sorted(f for f in files if f.suffix == ".safetensors")


def test_transformers_names(tmp_path):
    """transformers finds every weight it wants, and no other."""
    transformers = pytest.importorskip("transformers")
    for family in ("llama", "qwen2", "qwen3"):
        folder = write_tiny_model(tmp_path / family, family)
        with torch.device("meta"):
            expected = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.state_dict().items()}
        assert shapes == {view.name: view.shape for view in hf_views(tiny_model(family))}


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "any").touch()
    (written,) = save_weights(tmp_path, [("a", torch.ones(2))])
    assert written.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_views_cover_every_element_once():
    for family in ("llama", "qwen2", "qwen3"):
        model = tiny_model(family)
        counts = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        for view in hf_views(model):
            view.view(counts[view.parameter_name]).add_(1)
            assert dict(model.named_parameters())[view.parameter_name] is view.parameter
        assert all((count == 1).all() for count in counts.values())


def test_views_fit_gradients_and_do_not_alias():
    model = tiny_model()
    view = next(view for view in hf_views(model) if view.name.endswith("k_proj.weight"))
    moment = torch.zeros(view.parameter.shape, dtype=torch.float64)
    value = torch.arange(16 * 48, dtype=torch.float32).view(16, 48)
    view.write(moment, value)
    copy = view.read(moment)
    assert copy.is_contiguous()
    assert torch.equal(copy, value.double())
    copy.zero_()
    assert torch.equal(view.read(moment), value.double())


def test_tied_head_is_the_embedding(tmp_path):
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    model = load_weights(folder)
    assert model.head.weight is model.embed.weight
    assert "lm_head.weight" not in stored(folder)
    tensors = stored(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(load_weights(folder).head.weight, model.head.weight)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ"):
        load_weights(folder)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_second_copy_in_memory(tmp_path, monkeypatch):
    """While loading and saving, private memory grows by the model and a tensor, not by two models."""
    size = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4000}
    folder = write_tiny_model(tmp_path / "model", **size)
    model_bytes = (folder / "model.safetensors").stat().st_size
    peak = 0

    def note():
        nonlocal peak
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = max(peak, int(fields["RssAnon"].split()[0]) * 1024)

    # Memory freed before may be used again unnoticed: give it back first.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    write = TensorView.write
    monkeypatch.setattr(TensorView, "write", lambda *args: (write(*args), note()))
    note()
    before, peak = peak, 0
    model = load_weights(folder)
    assert 0.5 * model_bytes < peak - before < 1.3 * model_bytes
    note()
    before, peak = peak, 0

    def noted():
        for name, tensor in all_tensors(model):
            note()
            yield name, tensor

    (tmp_path / "copy").mkdir()
    save_weights(tmp_path / "copy", noted(), max_shard_bytes=model_bytes // 8)
    assert peak - before < 0.5 * model_bytes


def broken(folder, change):
    tensors = stored(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.bias"), "1 weights are missing: model.layers.1.mlp.up_proj.bias"),
        (lambda t: t.pop("lm_head.weight"), "1 weights are missing: lm_head.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(80, 48)}),
            "model.layers.3.mlp.up_proj.weight is not a weight of the model",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(48, 16)}),
            r"k_proj.weight has shape \[48, 16\], config.json says \[16, 48\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)}),
            r"model.norm.weight is quantised \(F8_E4M3\); only float16",
        ),
    ],
    ids=["missing", "missing-head", "unexpected", "misshaped", "quantised"],
)
def test_misfitting_weights_are_refused(tmp_path, change, message):
    folder = write_tiny_model(tmp_path)
    broken(folder, change)
    with pytest.raises(ValueError, match=message) as error:
        load_weights(folder)
    assert "\n" not in str(error.value)


def test_computed_buffers_of_old_files_are_skipped(tmp_path):
    folder = write_tiny_model(tmp_path)
    broken(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_weights(folder)


def test_truncated_and_missing_files_are_refused(tmp_path):
    folder = write_tiny_model(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 500, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model.safetensors is truncated or not a safetensors file") as error:
            load_weights(folder)
        assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist$"):
        load_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin, a pickle, which is never loaded; write safetens"):
        load_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "a.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"a.safetensors does not exist, but model.safetensors.index.json"):
        load_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 3}}')
    with pytest.raises(ValueError, match=r"index.json has no weight_map of names and files"):
        load_weights(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_weights(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        load_weights(folder)


def test_a_name_written_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="x is written twice"):
        save_weights(tmp_path, [("x", torch.zeros(1)), ("x", torch.ones(1))])


def test_dtype_of_the_file_is_converted(tmp_path):
    folder = write_tiny_model(tmp_path, dtype="bf16")
    model = load_weights(folder, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for name, tensor in all_tensors(model):
        assert torch.equal(tensor.bfloat16(), stored(folder)[name])
