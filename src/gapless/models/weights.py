"""Hugging Face safetensors in and out, one tensor at a time.

Files keep Hugging Face's names and shapes; `gapless.models.views` says where their tensors live in the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config, names
from gapless.models.views import EMBED_WEIGHT, HEAD_WEIGHT, TensorView, hf_views

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = ("F32", "BF16", "F16")
_COMPARED_ROWS = 4096


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
    model = meta_decoder(path, dtype=dtype, max_length=max_length)
    stored = StoredWeights(path)
    stored.check(model)
    if torch.device(device).type != "meta":
        materialise(model, device)
        model.rotary_frequencies = model.rotary_frequencies.to(device)
        stored.fill(hf_views(model))
    return model


def meta_decoder(path: str | Path, *, dtype: torch.dtype, max_length: int | None = None) -> Decoder:
    """The model that a folder's config.json describes, without memory for its weights.

    Raises:
        ValueError: a config that is not understood.
        FileNotFoundError: there is none.
    """
    return Decoder(decoder_config(read_json(Path(path) / "config.json"), max_length), dtype=dtype, device="meta")


def materialise(module: nn.Module, device: torch.device | str) -> None:
    """Give every parameter on the meta device memory, parameters that are shared staying shared."""
    real: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in real:
                real[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(owner, name, real[id(parameter)])


class StoredWeights:
    """The tensors in a Hugging Face folder's safetensors files; only what is asked for is read."""

    def __init__(self, folder: str | Path) -> None:
        """Open the files' headers.

        Raises:
            ValueError: a file is truncated or no safetensors file, a tensor is stored twice.
            FileNotFoundError: no such file.
        """
        self._folder = Path(folder)
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for file in _weight_files(self._folder):
            try:
                # The handle is a mapping of the file into memory; it closes with this object.
                self._opened[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from None
            for name in self._opened[file].keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise ValueError(
                        f"{file}: {name} is in {self._files[name].name} too; fetch the model's files again"
                    )
                self._files[name] = file

    def check(self, model: Decoder) -> None:
        """Refuse files that are not the weights of a model.

        Args:
            model: whole, on any device, without adapters.

        Raises:
            ValueError: a tensor is missing, unexpected, of another shape or quantised, by name; a tied head is stored
                and differs from the embedding.
        """
        views = {view.name: view for view in hf_views(model)}
        missing = views.keys() - self._files.keys()
        if model.config.tied:
            views[HEAD_WEIGHT] = views[EMBED_WEIGHT]
            if HEAD_WEIGHT in self._files:
                missing -= {EMBED_WEIGHT}
        for name, file in self._files.items():
            if names.is_computed(name):
                continue
            stored = self._opened[file].get_slice(name)
            if name not in views:
                raise ValueError(f"{file}: {name} is not a weight of the model that config.json describes")
            if tuple(stored.get_shape()) != views[name].shape:
                raise ValueError(
                    f"{file}: {name} has shape {stored.get_shape()}, config.json says {list(views[name].shape)}"
                )
            if stored.get_dtype() not in STORED_DTYPES:
                raise ValueError(
                    f"{file}: {name} is quantised ({stored.get_dtype()}); only float16, bfloat16 and float32 are read"
                )
        if missing:
            raise ValueError(f"{self._folder}: {len(missing)} weights are missing: {_listed(missing)}")
        if model.config.tied:
            self._check_tied()

    def _check_tied(self) -> None:
        """Some tools store a tied head beside the embedding; only an equal one can be honoured."""
        if not self._files.keys() >= {HEAD_WEIGHT, EMBED_WEIGHT}:
            return
        head, embed = (self._opened[self._files[name]].get_slice(name) for name in (HEAD_WEIGHT, EMBED_WEIGHT))
        rows = head.get_shape()[0]
        for start in range(0, rows, _COMPARED_ROWS):
            pair = [stored[start : start + _COMPARED_ROWS].float() for stored in (head, embed)]
            if not torch.equal(*pair):
                raise ValueError(
                    f"{self._files[HEAD_WEIGHT]}: {HEAD_WEIGHT} and {EMBED_WEIGHT} differ, but config.json has "
                    "tie_word_embeddings = true"
                )

    def read(self, view: TensorView) -> torch.Tensor:
        """The view's box of its tensor, as stored."""
        # A tied weight may be stored as the head alone.
        name = view.name if view.name in self._files or view.name != EMBED_WEIGHT else HEAD_WEIGHT
        stored = self._opened[self._files[name]].get_slice(name)
        return stored[tuple(slice(a, a + n) for a, n in zip(view.offset, view.shape, strict=True))]

    @torch.no_grad()
    def fill(self, views: Iterable[TensorView]) -> None:
        """Read the views' boxes into their parameters, one at a time, in the order of the files."""
        files = list(self._opened)
        for view in sorted(views, key=lambda view: files.index(self._files.get(view.name, files[0]))):
            view.write(view.local, self.read(view))


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
