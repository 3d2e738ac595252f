"""Training checkpoints: a folder of safetensors and JSON that is whole or absent.

Everything is written into a temporary folder, synced, and renamed: a kill at any instant leaves the previous checkpoint
loadable. `gapless.checkpoint_file` has the format, and reads it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from gapless.checkpoint_file import (
    FORMAT_VERSION,
    INDEX_FILE,
    Checkpoint,
    CheckpointError,
    folder_name,
    list_checkpoints,
    open_checkpoint,
)
from gapless.training import files

MAX_FILE_BYTES = 1 << 30

Fault = Callable[[str], None]
"""Called with the name of each point between write, sync, rename and prune; tests kill the process there."""


def no_fault(point: str) -> None:
    """The hook of real runs."""


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
        _write_bytes(partial / INDEX_FILE, _json_bytes(index))
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


def check_names(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], kind: str | None = None) -> None:
    """Refuse a checkpoint whose tensors are not those of the run, by name.

    Args:
        checkpoint: the checkpoint.
        expected: full shapes by name, the kind included.
        kind: of which nothing else may be there; by default every kind.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape.
    """
    found = {name: shape for name, shape in checkpoint.shapes().items() if not kind or name.startswith(f"{kind}/")}
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
