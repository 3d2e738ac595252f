"""Reading a training checkpoint, for resuming and for whoever wants its weights.

    checkpoints/step-000100/
      rank0-00001.safetensors   trained weights, float32 masters, moments: "weight/NAME", "master/NAME", "exp_avg/NAME",
                                "exp_avg_sq/NAME", with the names and shapes of Hugging Face and PEFT files
      state.json                step, loader position, what the run must agree on, totals of the metrics
      index.json                format_version; for every tensor its full shape and the slices that files hold; for
                                every file its size and CRC-32

Nothing is read before sizes and checksums of all files agree with the index. `gapless.training.checkpoint` writes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

FORMAT_VERSION = 1
INDEX_FILE = "index.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole."""

    path: Path
    step: int
    """Optimizer steps finished."""
    state: dict
    """state.json."""
    index: dict
    """index.json."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor."""
        return {name: tuple(entry["shape"]) for name, entry in self.index["tensors"].items()}

    def tensors(self, kind: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, or those of one kind, put together from its slices, one at a time on the CPU."""
        for name, entry in self.index["tensors"].items():
            if kind is not None and not name.startswith(f"{kind}/"):
                continue
            slices = [(part, self._read(part["file"], name)) for part in entry["slices"]]
            whole = torch.empty(entry["shape"], dtype=slices[0][1].dtype)
            if sum(value.numel() for _, value in slices) != whole.numel():
                raise CheckpointError(f"{self.path}: the slices of {name} do not cover its shape {entry['shape']}")
            for part, value in slices:
                region = tuple(slice(a, a + n) for a, n in zip(part["start"], value.shape, strict=True))
                whole[region] = value
            yield name, whole

    def _read(self, file: str, name: str) -> Tensor:
        with safe_open(self.path / file, framework="pt") as handle:
            return handle.get_tensor(name)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a training checkpoint."""
    return (folder / INDEX_FILE).is_file() and not (folder / "config.json").exists()


def folder_name(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check index and state of one checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not understood.
    """
    index = _read_json(path / INDEX_FILE)
    version = index.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / 'index.json'} has format_version {version}; this version of gapless reads {FORMAT_VERSION}, "
            "install the one that wrote it"
        )
    if not isinstance(index.get("tensors"), dict) or not isinstance(index.get("files"), dict):
        raise CheckpointError(f"{path / 'index.json'} is damaged: it has no tensors or no files")
    for name, expected in index["files"].items():
        _check_file(path / name, expected)
    state = _read_json(path / "state.json")
    return Checkpoint(path, state["step"], state, index)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return value


def _check_file(path: Path, expected: Mapping[str, int]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path} is damaged: {size} bytes instead of {expected['bytes']}")
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    if checksum != expected["crc32"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not agree with {INDEX_FILE}")
