"""The trained weights of a training checkpoint, without its optimizer state; docs/checkpoints.md has the format."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.config import AdapterConfig
from gapless.models.decoder import Decoder
from gapless.models.weights import hf_views, read_json

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
_WEIGHT = "weight/"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a training checkpoint."""
    return (folder / INDEX_FILE).is_file() and not (folder / "config.json").exists()


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint of a run folder with the most steps; None if there is none."""
    found = [path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def load_checkpoint(model: Decoder, folder: Path, adapter: AdapterConfig) -> None:
    """Puts a checkpoint's weights into the model that its training began with, adapters around it included.

    Args:
        model: with the base weights, without adapters.
        folder: the checkpoint.
        adapter: of the run; of type none, the base weights themselves are replaced.

    Raises:
        ValueError: a file is missing, damaged or of another format; a tensor is missing, unexpected or misshaped.
    """
    if adapter.type == "lora":
        apply_lora(model, adapter, seed=0)
    views = {view.name: view for view in (hf_views(model) if adapter.type == "none" else adapter_views(model))}
    entries = _trained_entries(folder)
    if difference := sorted(views.keys() ^ entries.keys()):
        raise ValueError(f"{folder} does not fit its run's config.toml: {', '.join(difference[:5])}")
    for name, tensor in _tensors(folder, entries):
        if tuple(tensor.shape) != views[name].shape:
            raise ValueError(f"{folder}: {name} is {list(tensor.shape)}, this model takes {list(views[name].shape)}")
        views[name].write(views[name].parameter, tensor)


def _trained_entries(folder: Path) -> dict[str, Any]:
    """What the index says of each trained tensor, once all files are known to be whole."""
    index = read_json(folder / INDEX_FILE)
    if index.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder / INDEX_FILE} has format_version {index.get('format_version')}; this version of gapless reads "
            f"{FORMAT_VERSION}, install the one that wrote it"
        )
    if not isinstance(index.get("tensors"), dict) or not isinstance(index.get("files"), dict):
        raise ValueError(f"{folder / INDEX_FILE} is damaged: it has no tensors or no files")
    for name, expected in index["files"].items():
        _check_file(folder / name, expected)
    return {name.removeprefix(_WEIGHT): entry for name, entry in index["tensors"].items() if name.startswith(_WEIGHT)}


def _check_file(path: Path, expected: dict[str, int]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing; take another checkpoint")
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    if (path.stat().st_size, checksum) != (expected["bytes"], expected["crc32"]):
        raise ValueError(f"{path} is damaged: it is not what {INDEX_FILE} says; take another checkpoint")


def _tensors(folder: Path, entries: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor put together from its slices, one at a time."""
    with ExitStack() as stack:
        names = {part["file"] for entry in entries.values() for part in entry["slices"]}
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in sorted(names)}
        for name, entry in entries.items():
            slices = [(part["start"], files[part["file"]].get_tensor(_WEIGHT + name)) for part in entry["slices"]]
            whole = torch.empty(entry["shape"], dtype=slices[0][1].dtype)
            if sum(value.numel() for _, value in slices) != whole.numel():
                raise ValueError(f"{folder}: the slices of {name} do not cover its shape {entry['shape']}")
            for start, value in slices:
                whole[tuple(slice(a, a + n) for a, n in zip(start, value.shape, strict=True))] = value
            yield name, whole
