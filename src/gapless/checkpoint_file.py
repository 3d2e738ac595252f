"""Reading a training checkpoint, for resuming and for whoever wants its weights.

    checkpoints/step-000100/
      rank0-00001.safetensors   trained weights, float32 masters, moments: "weight/NAME", "master/NAME", "exp_avg/NAME",
                                "exp_avg_sq/NAME", with the names and shapes of Hugging Face and PEFT files; each rank
                                of the run that wrote it has files of its own, with its boxes of the tensors
      state.json                step, loader position, what the run must agree on, totals of the metrics
      index.json                format_version; for every tensor its full shape and the slices that files hold; for
                                every file its size and CRC-32

A box is a range of indices in each dimension. The boxes of a tensor fill it without overlap, so that any other box of
it, what a rank of another layout needs, can be put together from them. Nothing is read before sizes and checksums of
all files agree with the index (`open_written`: the sizes). `gapless.training.checkpoint` writes them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT_VERSION = 1
INDEX_FILE = "index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
"""Of what is trained, by safetensors' names."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file and the remedy."""


class Box(NamedTuple):
    """A part of a tensor: a range of indices in each dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of a shape that begins at `start`."""
        return cls(tuple(start), tuple(first + size for first, size in zip(start, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension; 0 where it is empty."""
        return tuple(max(0, last - first) for first, last in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def overlap(self, other: Box) -> Box:
        """What both have; possibly empty."""
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.stop, other.stop)))

    def inside(self, other: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds just `other`, which contains it."""
        ranges = zip(self.start, self.stop, other.start, strict=True)
        return tuple(slice(first - origin, last - origin) for first, last, origin in ranges)


def is_tiled(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether boxes fill `whole`, none reaching out of it and no two overlapping."""
    tiles = sorted(box for box in boxes if box.size)
    if sum(box.size for box in tiles) != whole.size or any(box.overlap(whole) != box for box in tiles):
        return False
    active: list[Box] = []  # those that may still overlap what comes: a sweep along the first dimension
    for box in tiles:
        active = [other for other in active if other.stop[0] > box.start[0]]
        if any(box.overlap(other).size for other in active):
            return False
        active.append(box)
    return True


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole. Files that were read stay open as long as it lives."""

    path: Path
    step: int
    """Optimizer steps finished."""
    state: dict
    """state.json."""
    index: dict
    """index.json."""
    _handles: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor."""
        return {name: tuple(entry["shape"]) for name, entry in self.index["tensors"].items()}

    def tensors(self, kind: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, or those of one kind, put together from its slices, one at a time on the CPU."""
        for name in self.index["tensors"]:
            if kind is None or name.startswith(f"{kind}/"):
                yield name, self.read(name)

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """A box of a tensor, put together from the slices that overlap it; of others nothing is read.

        Args:
            name: of the tensor, its kind included.
            start: where the box begins; by default at the first element.
            shape: of the box; by default as far as the tensor goes.

        Returns:
            A CPU tensor of its own memory, in the dtype of the file.

        Raises:
            CheckpointError: there is no such tensor, its slices do not fill the box, or they are not as the index says.
        """
        entry = self.index["tensors"].get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        full = entry["shape"]
        start = (0,) * len(full) if start is None else start
        shape = [size - first for size, first in zip(full, start, strict=True)] if shape is None else shape
        wanted = Box.at(start, shape)
        stored = [(part["file"], Box.at(part["start"], part["shape"])) for part in entry["slices"]]
        pieces = [(file, box, box.overlap(wanted)) for file, box in stored if box.overlap(wanted).size]
        if not stored or not is_tiled(wanted, (piece for _, _, piece in pieces)):
            raise CheckpointError(
                f"{self.path}: the slices of {name} do not cover its shape {full}"
                + ("" if list(shape) == full else f" from {list(start)} on for {list(shape)}")
            )
        sources = [(box, piece, self._stored(file, box, name)) for file, box, piece in pieces or [(*stored[0], wanted)]]
        dtypes = {source.get_dtype() for _, _, source in sources}
        if len(dtypes) > 1:
            raise CheckpointError(
                f"{self.path}: the slices of {name} have different dtypes: {', '.join(sorted(dtypes))}"
            )
        result = torch.empty(wanted.shape, dtype=DTYPES[dtypes.pop()])
        for box, piece, source in sources if pieces else ():
            result[piece.inside(wanted)] = source[piece.inside(box)]
        return result

    def _stored(self, file: str, box: Box, name: str) -> Any:
        """A slice in its file, of which nothing is read yet."""
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(self.path / file, framework="pt")
            stored = self._handles[file].get_slice(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise CheckpointError(f"{self.path}: {file} does not hold {name}, though {INDEX_FILE} says so") from error
        if tuple(stored.get_shape()) != box.shape:
            raise CheckpointError(
                f"{self.path}: {name} is {stored.get_shape()} in {file}, {INDEX_FILE} says {list(box.shape)}"
            )
        return stored


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


def open_checkpoint(path: Path, *, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Read index and state of one checkpoint and check its files.

    Args:
        path: its folder.
        share: (rank, size) of processes that open it together: each computes the checksums of its share of the files,
            and the sizes of all.

    Raises:
        CheckpointError: a file is missing, truncated, changed or not understood.
    """
    rank, size = share
    return _open(path, lambda number: number % size == rank)


def open_written(path: Path) -> Checkpoint:
    """Open a checkpoint that this job has just written: as `open_checkpoint`, without reading all of it for checksums.

    Raises:
        CheckpointError: a file is missing, truncated or not understood.
    """
    return _open(path, lambda _: False)


def _open(path: Path, is_summed: Callable[[int], bool]) -> Checkpoint:
    """Open a checkpoint; of which files, by number, checksums are computed."""
    index = _read_json(path / INDEX_FILE)
    version = index.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path / 'index.json'} has format_version {version}; this version of gapless reads {FORMAT_VERSION}, "
            "install the one that wrote it"
        )
    if not isinstance(index.get("tensors"), dict) or not isinstance(index.get("files"), dict):
        raise CheckpointError(f"{path / 'index.json'} is damaged: it has no tensors or no files")
    for number, (name, expected) in enumerate(index["files"].items()):
        _check_file(path / name, expected, checksum=is_summed(number))
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


def _check_file(path: Path, expected: Mapping[str, int], *, checksum: bool) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path} is damaged: {size} bytes instead of {expected['bytes']}")
    if checksum and _crc32(path) != expected["crc32"]:
        raise CheckpointError(f"{path} is damaged: its checksum does not agree with {INDEX_FILE}")


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
