"""Training checkpoints: a folder of safetensors and JSON that is whole or absent, written by all ranks together.

Everything is written into a temporary folder, synced, and renamed: a kill at any instant leaves the previous checkpoint
loadable. `gapless.checkpoint_file` has the format, and reads it.

    rank 0          makes the temporary folder, and tells its name, which no other save has
    every rank      writes its pieces into files of its own, then rank 1, 2, ... their part of the index: rank1.json
    rank 0          merges the parts, adds state.json and index.json, renames the folder, removes the oldest checkpoints

Ranks wait for each other on the store, without a collective: a slow disk runs into no time-out, and a thread can do it
while the training goes on. A run that ends before its thread cancels it: the checkpoint is then absent.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gapless.checkpoint_file import (
    DTYPES,
    FORMAT_VERSION,
    INDEX_FILE,
    Box,
    Checkpoint,
    CheckpointError,
    folder_name,
    is_tiled,
    list_checkpoints,
    open_checkpoint,
)
from gapless.parallel.watch import OtherRankFailed
from gapless.parallel.world import World
from gapless.training import files

MAX_FILE_BYTES = 1 << 30

Fault = Callable[[str], None]
"""Called with the name of each point between write, sync, rename and prune; tests kill the process there."""


def no_fault(point: str) -> None:
    """The hook of real runs."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, to be written by this rank."""

    name: str
    """Of the tensor, its kind included: "weight/model.norm.weight"."""
    tensor: Tensor
    """The elements of the box."""
    start: tuple[int, ...]
    """Where the box begins in the tensor."""
    full_shape: tuple[int, ...]
    """The shape of the tensor."""

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """A tensor that is here as a whole."""
        return cls(name, tensor, (0,) * tensor.dim(), tuple(tensor.shape))


class CheckpointWriter:
    """Writes the checkpoints of a run; every rank has one, and calls it at the same steps.

    As a context manager it waits at the end for what is being written. After an error only one process alone does: of
    several, the others may hang because of the error, and must hear of it first. After an interrupt (a second Ctrl-C)
    none does. What is not waited for is given up.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep: int | None = None,
        fault: Fault = no_fault,
        asynchronous: bool = False,
    ) -> None:
        """Nothing is written yet.

        Args:
            folder: where checkpoints are kept, on a file system that all ranks share; made if it is missing.
            world: the ranks.
            keep: how many checkpoints stay; None for all.
            fault: see `Fault`.
            asynchronous: whether a thread writes, from a copy in host memory, while the training goes on.
        """
        self._folder, self._world, self._keep = folder, world, keep
        self._fault, self._asynchronous = fault, asynchronous
        self._task: _Task | None = None
        self._cancelled = threading.Event()
        self._saves = 0

    def save(self, step: int, pieces: Iterable[Piece], state: Mapping[str, object]) -> Path:
        """Write the checkpoint of `step` and remove the oldest ones beyond `keep`.

        Args:
            step: optimizer steps finished.
            pieces: what this rank writes, consumed one at a time; there may be none. The pieces of all ranks fill
                every tensor without overlap.
            state: what else a resume needs, plain JSON values, taken before any piece; that of rank 0 is written.

        Returns:
            Where it is, once it is published: at the return of this method, or of `finish` if asynchronous.

        Raises:
            CheckpointError: the disk is full, the folder cannot be written, or the pieces do not fill a tensor; with
                an asynchronous writer perhaps of the save before.
        """
        self.finish()
        self._saves += 1
        path = self._folder / folder_name(step)
        text = _json_bytes({"step": step, **state})
        if self._asynchronous:
            copies = _copies(pieces)
            self._task = _Task(lambda: self._write(path, _drained(copies), text))
            self._task.start()
        else:
            self._write(path, pieces, text)
        return path

    def finish(self) -> None:
        """Wait until what is being written is published.

        Raises:
            CheckpointError: see `save`.
        """
        task, self._task = self._task, None
        if task is not None:
            task.result()

    @property
    def idle(self) -> bool:
        """Whether all that was given to `save` is published."""
        return self._task is None

    def poll(self) -> None:
        """Raise what went wrong in the thread, if it has ended; never waits."""
        if self._task is not None and not self._task.is_alive():
            self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                self.finish()
            elif self._task is not None and self._world.size == 1 and issubclass(kind, Exception):
                self._task.join()
        finally:
            # Soon the folder is another run's: from here on a thread that is still there only has files of its own.
            self._cancelled.set()
            self._task = None

    # ---- one save, in the thread if asynchronous ----

    def _write(self, path: Path, pieces: Iterable[Piece], state: bytes) -> None:
        try:
            if self._world.rank == 0:
                self._write_first(path, pieces, state)
            else:
                (name,) = self._world.wait([self._key("begun")])
                self._write_part(self._folder / name, pieces)
                self._world.wait([self._key("published")])
        except OSError as error:
            raise self._failure(path, error) from error

    def _write_first(self, path: Path, pieces: Iterable[Piece], state: bytes) -> None:
        """What rank 0 does."""
        # Ranks of a job that was killed, and a thread of a run that was interrupted, may still write for a while.
        folder = files.temporary(path, secrets.token_hex(4))
        try:
            folder.mkdir(parents=True)
            self._world.mark(self._key("begun"), folder.name)
            self._publish(path, folder, self._write_pieces(folder, pieces), state)
        finally:
            if self._world.size == 1:  # elsewhere others may be writing; the next start clears it
                shutil.rmtree(folder, ignore_errors=True)

    def _write_pieces(self, folder: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Write files of about MAX_FILE_BYTES; only one file's worth is in memory. Returns this rank's index."""
        rank = self._world.rank
        index: dict[str, Any] = {"format_version": FORMAT_VERSION, "tensors": {}, "files": {}}
        pending: dict[str, Tensor] = {}
        pending_bytes = 0

        def flush() -> None:
            nonlocal pending_bytes
            self._check_wanted()
            name = f"rank{rank}-{len(index['files']) + 1:05d}.safetensors"
            index["files"][name] = _write_file(folder / name, _safetensors(pending))
            for key, tensor in pending.items():
                index["tensors"][key]["slices"][-1] |= {"file": name, "shape": list(tensor.shape)}
            pending.clear()
            pending_bytes = 0
            self._fault(f"{name} written")

        for piece in pieces:
            if piece.name in pending:
                flush()  # a file holds one box of a tensor
            if piece.tensor.numel():
                pending[piece.name] = piece.tensor.detach().cpu().contiguous()
                pending_bytes += piece.tensor.nbytes
                entry = index["tensors"].setdefault(piece.name, {"shape": list(piece.full_shape), "slices": []})
                entry["slices"].append({"start": list(piece.start)})
            if pending_bytes >= MAX_FILE_BYTES:
                flush()
        if pending:
            flush()
        return index

    def _write_part(self, folder: Path, pieces: Iterable[Piece]) -> None:
        """What every other rank does."""
        rank = self._world.rank
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see {folder}, which rank 0 has made; training.output_dir must be on a file "
                "system that all nodes share"
            )
        _write_file(_part_file(folder, rank), [_json_bytes(self._write_pieces(folder, pieces))])
        files.sync(folder)
        self._fault("rank index written")
        self._world.mark(self._key("written", rank))
        self._fault("rank done")

    def _publish(self, path: Path, folder: Path, index: dict[str, Any], state: bytes) -> None:
        index = self._merge(folder, index)
        self._forget(self._saves - 1)
        index["files"]["state.json"] = _write_file(folder / "state.json", [state])
        self._fault("state written")
        _write_file(folder / INDEX_FILE, [_json_bytes(index)])
        self._fault("index written")
        files.sync(folder)
        self._fault("folder synced")
        self._check_wanted()
        files.publish(path, folder)
        self._fault("renamed")
        with files.writing(self._folder):
            for old in list_checkpoints(self._folder)[: -self._keep if self._keep else 0]:
                self._check_wanted()
                files.remove_folder(old)
                self._fault("pruned one")
        self._world.mark(self._key("published"))

    def _merge(self, folder: Path, index: dict[str, Any]) -> dict[str, Any]:
        """The index of all ranks' files, once they are written; `index` is that of rank 0's."""
        others = range(1, self._world.size)
        if others:
            self._world.wait([self._key("written", rank) for rank in others])
            self._fault("all ranks done")
        for rank in others:
            part = json.loads(_part_file(folder, rank).read_bytes())
            index["files"] |= part["files"]
            for name, entry in part["tensors"].items():
                known = index["tensors"].setdefault(name, {"shape": entry["shape"], "slices": []})
                assert known["shape"] == entry["shape"], f"rank {rank} has another shape of {name}"
                known["slices"] += entry["slices"]
            _part_file(folder, rank).unlink()
        if others:
            self._fault("index merged")
        for name, entry in index["tensors"].items():
            _check_filled(name, entry)
        return index

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise _CancelledError

    def _key(self, what: str, rank: int = 0) -> str:
        return f"checkpoint {self._saves}/{what}/{rank}"

    def _forget(self, save: int) -> None:
        """Remove the marks of a save that every rank has left behind."""
        keys = ["begun/0", "published/0", *(f"written/{rank}" for rank in range(1, self._world.size))]
        self._world.forget([f"checkpoint {save}/{key}" for key in keys])

    def _failure(self, path: Path, error: OSError) -> CheckpointError:
        kept = [old.name for old in list_checkpoints(self._folder)]
        return CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make room and run the same command again"
            + (f" (it goes on from {kept[-1]})" if kept else "")
        )


def open_newest(folder: Path, world: World | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder`, checked; None if there is none.

    Args:
        folder: where checkpoints are kept.
        world: ranks that open it together. Each reads its share of the files to check them.

    Raises:
        CheckpointError: it is damaged or of a newer format; on all ranks if one finds it so. An older one is named,
            never taken silently.
    """
    world = world or World.single()
    found = world.first("checkpoints", lambda: [path.name for path in list_checkpoints(folder)])
    if not found:
        return None
    path, problem = folder / found[-1], None
    try:
        checkpoint = open_checkpoint(path, share=(world.rank, world.size))
    except CheckpointError as error:
        checkpoint, problem = None, str(error)
    if problems := [text for text in world.share("damage of a checkpoint", problem) if text]:
        remedy = f"to go on from {found[-2]}" if len(found) > 1 else "to start again"
        raise CheckpointError(f"{problems[0]}; delete {path} {remedy}")
    return checkpoint


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


# ---- the thread ----


class _CancelledError(Exception):
    """Ends a thread whose checkpoint is not wanted any more."""


class _Task(threading.Thread):
    """A function that runs in a thread; a process that ends does not wait for it."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._function = function
        self._error: BaseException | None = None
        self._done = False

    def run(self) -> None:
        try:
            self._function()
            self._done = True
        except (ValueError, OSError, RuntimeError, OtherRankFailed, _CancelledError) as error:
            self._error = error

    def result(self) -> None:
        """Wait for the end, and raise what the function raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._done, "the thread that writes a checkpoint ended early; see its traceback above"


def _copies(pieces: Iterable[Piece]) -> deque[Piece]:
    """The pieces as they are now, in host memory."""
    copies: deque[Piece] = deque()
    for piece in pieces:
        source = piece.tensor.detach()
        copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
        copies.append(replace(piece, tensor=copy.copy_(source, non_blocking=True)))
    if torch.cuda.is_initialized():
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    return copies


def _drained(copies: deque[Piece]) -> Iterator[Piece]:
    """One after the other, so that the memory of those written is free again."""
    while copies:
        yield copies.popleft()


# ---- files ----

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _part_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _check_filled(name: str, entry: Mapping[str, Any]) -> None:
    boxes = [Box.at(part["start"], part["shape"]) for part in entry["slices"]]
    if not is_tiled(Box.at([0] * len(entry["shape"]), entry["shape"]), boxes):
        raise CheckpointError(f"the pieces of {name} that the ranks wrote do not fill its shape {entry['shape']}")


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file of contiguous CPU tensors.

    `safetensors.torch.save` would copy them twice and hold up every other thread of the process meanwhile.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # large items first keep all aligned
    header, end = {}, 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        dtype, shape = _DTYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].flatten().view(torch.uint8).numpy().data


def _write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> dict[str, int]:
    size = checksum = 0
    with path.open("wb") as file:
        for block in blocks:
            size += file.write(block)
            checksum = zlib.crc32(block, checksum)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": checksum}


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, allow_nan=False) + "\n").encode()
