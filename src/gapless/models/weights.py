"""Hugging Face safetensors in and out, one tensor at a time.

Files keep Hugging Face's names and shapes; `TensorView` is the one adapter between them and the fused parameters. It
fits anything shaped like a parameter: the weight, its gradient, an optimizer's moment.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from gapless.models.decoder import Decoder, DecoderLayer, Embedding
from gapless.models.families import decoder_config, names
from gapless.models.linear import DenseLinear, Linear, Part
from gapless.models.norm import RMSNorm

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBED_WEIGHT, HEAD_WEIGHT = f"{names.EMBED}.weight", f"{names.HEAD}.weight"


@dataclass(frozen=True)
class TensorView:
    """Where a tensor of a Hugging Face file lives in the model."""

    name: str
    """Its name in the file, for instance "model.layers.0.self_attn.q_proj.weight"."""
    parameter: nn.Parameter
    parameter_name: str
    """Dotted name of the parameter in the model."""
    shape: tuple[int, ...]
    """Its shape in the file."""
    part: Part | None = None
    """The part of a fused parameter; None for the whole."""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements that belong to the file's tensor, in any tensor shaped like the parameter (not `shape`)."""
        return tensor if self.part is None else self.part.select(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same as a contiguous copy in the file's shape, detached."""
        return self.view(tensor.detach()).clone(memory_format=torch.contiguous_format).view(self.shape)

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value in the file's shape into a tensor shaped like the parameter, converting dtype and device."""
        target = self.view(tensor.detach())
        target.copy_(value.view(target.shape))


def hf_views(model: Decoder) -> Iterator[TensorView]:
    """Every weight of the base model under its Hugging Face name, a tied head not repeated.

    Weights that adapters added are not among them; layers an adapter wraps are seen through.
    """
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter, part, shape in _weights(model):
        yield TensorView(name, parameter, parameter_names[id(parameter)], shape, part)


_Weight = tuple[str, nn.Parameter, Part | None, tuple[int, ...]]


def _weights(model: Decoder) -> Iterator[_Weight]:
    if model.embed is not None:
        yield _whole(names.EMBED, model.embed)
    for index, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        for name, parameter, part, shape in _layer_weights(layer):
            yield f"{names.layer_name(index)}.{name}", parameter, part, shape
    if model.norm is not None:
        yield _whole(names.NORM, model.norm)
    if model.head is not None and not model.config.tied:
        yield from _parts(model.head)


def _layer_weights(layer: DecoderLayer) -> Iterator[_Weight]:
    attention, mlp = layer.attention, layer.mlp
    yield _whole(names.ATTENTION_NORM, layer.attention_norm)
    yield from _parts(attention.qkv, f"{names.ATTENTION}.")
    if attention.q_norm is not None and attention.k_norm is not None:
        yield _whole(names.Q_NORM, attention.q_norm)
        yield _whole(names.K_NORM, attention.k_norm)
    yield from _parts(attention.out, f"{names.ATTENTION}.")
    yield _whole(names.MLP_NORM, layer.mlp_norm)
    yield from _parts(mlp.gate_up, f"{names.MLP}.")
    yield from _parts(mlp.down, f"{names.MLP}.")


def _whole(name: str, module: RMSNorm | Embedding) -> _Weight:
    return f"{name}.weight", module.weight, None, tuple(module.weight.shape)


def _parts(linear: Linear, prefix: str = "") -> Iterator[_Weight]:
    base = linear.base_layer()
    assert isinstance(base, DenseLinear)
    for part in base.parts:
        features = part.features(base.leading)
        yield f"{prefix}{part.name}.weight", base.weight, part, (features, base.in_features)
        if base.bias is not None:
            yield f"{prefix}{part.name}.bias", base.bias, part, (features,)


# ---- reading ----


def load_weights(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    max_length: int | None = None,
) -> Decoder:
    """The model in a Hugging Face folder, its tensors streamed in one at a time.

    Args:
        path: folder with config.json and model.safetensors, or shards and their index.
        dtype: of the weights in memory; values are converted as they are read.
        device: of the weights; on "meta" only the headers of the files are read, and all is checked but values.
        max_length: tokens in the longest document of the run (see `families.decoder_config`).

    Raises:
        ValueError: a config that is not understood; weights that are missing, unexpected, of another shape or not
            readable, by name.
        FileNotFoundError: no such file.
    """
    folder = Path(path)
    config = decoder_config(read_json(folder / "config.json"), max_length)
    model = Decoder(config, dtype=dtype, device="meta")
    _materialise(model, device)
    views = {view.name: view for view in hf_views(model)}
    missing = set(views)
    if config.tied:
        views[HEAD_WEIGHT] = views[EMBED_WEIGHT]
    with torch.no_grad():
        for name, tensor, file in _stored_tensors(folder):
            if not names.is_computed(name):
                _load(name, tensor, file, views, missing)
    if missing:
        raise ValueError(f"{folder}: {len(missing)} weights are missing: {_listed(missing)}")
    return model


def _load(name: str, tensor: torch.Tensor, file: Path, views: dict[str, TensorView], missing: set[str]) -> None:
    """Put a stored tensor in its place, or refuse it."""
    view = views.get(name)
    if view is None:
        raise ValueError(f"{file}: {name} is not a weight of the model that config.json describes")
    if tuple(tensor.shape) != view.shape:
        raise ValueError(f"{file}: {name} has shape {list(tensor.shape)}, config.json says {list(view.shape)}")
    if tensor.dtype not in STORED_DTYPES:
        raise ValueError(f"{file}: {name} is quantised ({tensor.dtype}); only float16, bfloat16 and float32 are read")
    if view.name in missing:
        view.write(view.parameter, tensor)
        missing.discard(view.name)
    elif not view.parameter.is_meta and not torch.equal(view.view(view.parameter), tensor.to(view.parameter)):
        # Some tools store a tied head beside the embedding; only an equal one can be honoured.
        raise ValueError(
            f"{file}: {HEAD_WEIGHT} and {EMBED_WEIGHT} differ, but config.json has tie_word_embeddings = true"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _materialise(model: Decoder, device: torch.device | str) -> None:
    """Give every parameter on the meta device memory, parameters that are shared staying shared."""
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in real:
                real[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, real[id(parameter)])
    model.rotary_frequencies = model.rotary_frequencies.to(device)


def _stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor, Path]]:
    """(name, tensor, file) of each tensor in the folder, one in memory at a time."""
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - not a mapping
                    yield name, stored.get_tensor(name), file
        except SafetensorError as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from None


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index} has no weight_map of names and files; fetch it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / WEIGHTS_FILE]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"{file} does not exist{_why_missing(folder, index)}")
    return files


def _why_missing(folder: Path, index: Path) -> str:
    if index.exists():
        return f", but {index.name} names it; fetch the model's files again"
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles:
        return (
            f", only {pickles[0]}, a pickle, which is never loaded; write safetensors with transformers: "
            f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto").save_pretrained("{folder}")'
        )
    return ""


def _listed(missing: set[str], most: int = 5) -> str:
    listed = ", ".join(sorted(missing)[:most])
    return listed + (", ..." if len(missing) > most else "")


# ---- writing ----


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors as one file, with the permissions that new files have here.

    Raises:
        OSError: the disk is full or fails.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error  # a full disk, which callers expect as Python reports it
    path.chmod(mode)  # safetensors leaves 0600: no other user or container could load the model


def write_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy config.json byte for byte, unless it names another dtype than the weights now have, or none."""
    config = read_json(source)
    name = str(dtype).removeprefix("torch.")
    fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["torch_dtype"]
    if all(config.get(field) == name for field in fields):
        shutil.copyfile(source, target)
        return
    text = json.dumps(config | dict.fromkeys(fields, name), indent=2, ensure_ascii=False)
    target.write_text(text + "\n", encoding="utf-8")


def save_weights(
    folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], *, max_shard_bytes: int = 5_000_000_000
) -> list[Path]:
    """Write tensors as model.safetensors, or as shards with an index if they exceed one.

    At most one shard of tensors is held at a time. The caller makes the folder and, if it must appear at once, renames
    it afterwards.

    Args:
        folder: an existing folder.
        tensors: (name, tensor), consumed one at a time.
        max_shard_bytes: most bytes of tensors in a file; a larger single tensor gets a file of its own.

    Returns:
        The files written, the index last.

    Raises:
        ValueError: a name comes twice.
    """
    folder = Path(folder)
    weight_map: dict[str, int] = {}
    parts: list[Path] = []
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = total_bytes = 0

    def flush() -> None:
        part = folder / f"model-part{len(parts)}.safetensors"
        write_safetensors(part, shard)
        parts.append(part)
        shard.clear()

    for name, tensor in tensors:
        if name in weight_map:
            raise ValueError(f"{name} is written twice")
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        weight_map[name] = len(parts)
        shard[name] = tensor.detach().cpu().contiguous()
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    return _name_shards(folder, parts, weight_map, total_bytes)


def _name_shards(folder: Path, parts: list[Path], weight_map: dict[str, int], total_bytes: int) -> list[Path]:
    """Rename the parts to their final names, which hold their number, and write the index."""
    if len(parts) == 1:
        return [parts[0].rename(folder / WEIGHTS_FILE)]
    files = [
        part.rename(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors")
        for number, part in enumerate(parts, start=1)
    ]
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: files[number].name for name, number in sorted(weight_map.items())},
    }
    index_file = folder / INDEX_FILE
    index_file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, index_file]
