"""Training checkpoints: a folder of safetensors and JSON that is whole or absent.

    checkpoints/step-000100/
      rank0-00001.safetensors   trained weights, float32 masters, moments: "weight/NAME", "master/NAME", "exp_avg/NAME",
                                "exp_avg_sq/NAME", with the names and shapes of Hugging Face and PEFT files
      state.json                step, loader position, what the run must agree on, totals of the metrics
      index.json                format_version; for every tensor its full shape and the slices that files hold; for
                                every file its size and CRC-32

Everything is written into a temporary folder, synced, and renamed: a kill at any instant leaves the previous checkpoint
loadable. Nothing is read before sizes and checksums of all files agree with the index.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gapless.training import files

FORMAT_VERSION = 1
MAX_FILE_BYTES = 1 << 30

Fault = Callable[[str], None]
"""Called with the name of each point between write, sync, rename and prune; tests kill the process there."""


def no_fault(point: str) -> None:
    """The hook of real runs."""


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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, put together from its slices, one at a time on the CPU."""
        for name, entry in self.index["tensors"].items():
            slices = [(part, self._read(part["file"], name)) for part in entry["slices"]]
            whole = torch.empty(entry["shape"], dtype=slices[0][1].dtype)
            if sum(value.numel() for _, value in slices) != whole.numel():
                raise CheckpointError(f"{self.path}: the slices of {name} do not cover its shape {entry['shape']}")
            for part, value in slices:
                region = tuple(slice(a, a + n) for a, n in zip(part["start"], value.shape, strict=True))
                whole[region] = value
            yield name, whole

    def _read(self, file: str, name: str) -> Tensor:
        with safetensors.safe_open(self.path / file, framework="pt") as handle:
            return handle.get_tensor(name)


def folder_name(step: int) -> str:
    """The folder of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Iterable[tuple[str, Tensor]],
    state: Mapping[str, object],
    *,
    keep: int | None = None,
    fault: Fault = no_fault,
) -> Path:
    """Write the checkpoint of `step` into `folder` and remove the oldest ones beyond `keep`.

    Args:
        folder: where checkpoints are kept; made if it is missing.
        step: optimizer steps finished.
        tensors: every tensor with its name; consumed one at a time.
        state: what else a resume needs; plain JSON values.
        keep: how many checkpoints stay, this one included; None for all.
        fault: see `Fault`.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written.
    """
    path = folder / folder_name(step)
    partial = files.temporary(path)
    try:
        partial.mkdir(parents=True)
        index = _write_tensors(partial, tensors, fault)
        sizes = index["files"]
        sizes["state.json"] = _write_bytes(partial / "state.json", _json_bytes({"step": step, **state}))
        fault("state written")
        _write_bytes(partial / "index.json", _json_bytes(index))
        fault("index written")
        files.sync(partial)
        fault("folder synced")
        files.publish(path)
        fault("renamed")
    except OSError as error:
        files.clear_temporary(folder)
        kept = [old.name for old in list_checkpoints(folder)]
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room and run the same command again"
            + (f" (it goes on from {kept[-1]})" if kept else "")
        ) from error
    with files.writing(folder):
        for old in list_checkpoints(folder)[: -keep if keep else 0]:
            files.remove_folder(old)
            fault("pruned one")
    return path


def open_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder`, checked; None if there is none.

    Raises:
        CheckpointError: it is damaged or of a newer format. An older one is named, never taken silently.
    """
    found = list_checkpoints(folder)
    if not found:
        return None
    previous = found[-2].name if len(found) > 1 else None
    try:
        return open_checkpoint(found[-1])
    except CheckpointError as error:
        remedy = f"delete {found[-1]} to go on from {previous}" if previous else f"delete {found[-1]} to start again"
        raise CheckpointError(f"{error}; {remedy}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check index and state of one checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not understood.
    """
    index = _read_json(path / "index.json")
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


def check_names(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint whose tensors are not those of the run, by name.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    found = checkpoint.shapes()
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{checkpoint.path} does not fit the run: {name} is {found.get(name) or 'missing'} in the checkpoint, "
                f"{expected.get(name) or 'not trained'} in the run"
            )


# ---- files ----


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], fault: Fault) -> dict:
    """Write tensors into files of about MAX_FILE_BYTES; only one file's worth is in memory. Returns the index."""
    index: dict = {"format_version": FORMAT_VERSION, "tensors": {}, "files": {}}
    pending: dict[str, Tensor] = {}
    pending_bytes = 0

    def flush() -> None:
        name = f"rank0-{len(index['files']) + 1:05d}.safetensors"
        index["files"][name] = _write_bytes(folder / name, safetensors.torch.save(pending))
        for key, value in pending.items():
            shape = list(value.shape)
            part = {"file": name, "start": [0] * len(shape), "shape": shape}
            index["tensors"][key] = {"shape": shape, "slices": [part]}
        pending.clear()
        fault(f"{name} written")

    for key, value in tensors:
        pending[key] = value.cpu()
        pending_bytes += value.nbytes
        if pending_bytes >= MAX_FILE_BYTES:
            flush()
            pending_bytes = 0
    if pending:
        flush()
    return index


def _write_bytes(path: Path, data: bytes) -> dict[str, int]:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "crc32": zlib.crc32(data)}


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode()


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
        raise CheckpointError(f"{path} is damaged: its checksum does not agree with index.json")
