"""Rows from files or from any sequence of dicts, by index, without holding a file in memory.

Files are indexed once (offsets of their rows) and read through a memory map; parquet is read a row group at a time. A
row that cannot be read is one ValueError that names the file, the line and the remedy.
"""

from __future__ import annotations

import bisect
import csv
import hashlib
import io
import json
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

Row = Mapping[str, Any]
_CHUNK = 1 << 24
_BOM = b"\xef\xbb\xbf"


@runtime_checkable
class Rows(Protocol):
    """Rows by index, with their place for messages and an identity for caches."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...
    def where(self, index: int) -> str:
        """The place of a row for messages, for instance train.jsonl:12."""
        ...

    def origin(self) -> str:
        """Where the rows come from, for messages: the files' paths."""
        ...

    def identity(self) -> list[Any]:
        """JSON-able; equal when the rows are known to be the same."""
        ...


def open_rows(source: str | Path | Sequence[Any]) -> Rows:
    """Open files of rows, or take rows that are in memory.

    Args:
        source: a path, a sequence of paths (read one after the other), or a sequence of dicts: a list or anything with
            `len` and integer indexing, such as a Hugging Face dataset. Files: .jsonl (also .ndjson), .json (an array of
            objects, or one object a line), .csv (first line holds the column names), .parquet, .txt (a line is a row
            with the column "text"; blank lines are skipped).

    Raises:
        ValueError: a file is missing, empty, of an unknown kind, or cannot be indexed.
    """
    if isinstance(source, str | Path):
        return _open_file(Path(source))
    if not len(source):
        raise ValueError("there are no rows: the list of files or rows is empty")
    if isinstance(source[0], str | Path):
        parts = [_open_file(Path(path)) for path in source]
        return parts[0] if len(parts) == 1 else _Concatenated(parts)
    return _InMemory(source)


def _open_file(path: Path) -> Rows:
    kinds = {".jsonl": _JsonLines, ".ndjson": _JsonLines, ".json": _open_json, ".csv": _Csv, ".txt": _TextLines}
    kinds[".parquet"] = _Parquet
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name the files in it")
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"{path} has an unknown ending; rows are read from {', '.join(kinds)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    rows = kind(path)
    if not len(rows):
        raise ValueError(f"{path} holds no rows")
    return rows


class _InMemory:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise _no_object(row, self.where(index))
        return row

    def where(self, index: int) -> str:
        return f"row {index}"

    def origin(self) -> str:
        return "the list"

    def identity(self) -> list[Any]:
        digest = hashlib.sha256()
        for index in range(len(self._rows)):
            digest.update(json.dumps(self._rows[index], sort_keys=True, default=repr).encode())
            digest.update(b"\n")
        return ["rows", len(self._rows), digest.hexdigest()]


class _Concatenated:
    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[Rows, int]:
        part = bisect.bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]

    def __getitem__(self, index: int) -> Row:
        part, within = self._find(_in_range(index, len(self)))
        return part[within]

    def where(self, index: int) -> str:
        part, within = self._find(index)
        return part.where(within)

    def origin(self) -> str:
        shown = ", ".join(part.origin() for part in self._parts[:3])
        return shown if len(self._parts) <= 3 else f"{shown} and {len(self._parts) - 3} more files"

    def identity(self) -> list[Any]:
        return [part.identity() for part in self._parts]


class _File:
    """A memory-mapped file and the offsets of its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stat = path.stat()
        self._identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._ends = self._index()

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._starts)

    def _bytes(self, index: int) -> bytes:
        index = _in_range(index, len(self))
        return self._map[self._starts[index] : self._ends[index]]

    def _text(self, index: int) -> str:
        try:
            return self._bytes(index).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where(index)}: not UTF-8 ({error.reason}); convert the file") from error

    def where(self, index: int) -> str:
        return f"{self.path.name}:{self._line(int(self._starts[index]))}"

    def _line(self, offset: int) -> int:
        """The number of the line that holds a byte, counted from 1; costs a pass over the file the first time."""
        chunk = offset // _CHUNK
        return 1 + self._breaks[chunk] + self._map[chunk * _CHUNK : offset].count(b"\n")

    @cached_property
    def _breaks(self) -> list[int]:
        """Line ends before each chunk."""
        counts = [self._map[start : start + _CHUNK].count(b"\n") for start in range(0, len(self._map), _CHUNK)]
        return [0, *accumulate(counts)]

    def origin(self) -> str:
        return str(self.path)

    def identity(self) -> list[Any]:
        return self._identity

    def _first(self) -> int:
        return len(_BOM) if self._map[: len(_BOM)] == _BOM else 0


class _Lines(_File):
    """A row is a line that is not blank."""

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        breaks = [
            np.flatnonzero(np.frombuffer(self._map[start : start + _CHUNK], dtype=np.uint8) == ord("\n")) + start
            for start in range(0, len(self._map), _CHUNK)
        ]
        ends = np.concatenate([*breaks, [len(self._map)]]).astype(np.int64)
        starts = np.concatenate([[self._first()], ends[:-1] + 1]).astype(np.int64)
        keep = ends > starts
        for index in np.flatnonzero(keep & (ends - starts < 64)):
            keep[index] = not self._map[starts[index] : ends[index]].isspace()
        return starts[keep], ends[keep]


class _TextLines(_Lines):
    def __getitem__(self, index: int) -> Row:
        return {"text": self._text(index).rstrip("\r")}


class _JsonRows(_File):
    def __getitem__(self, index: int) -> Row:
        text = self._text(index)
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            shown = text if len(text) <= 60 else text[:60] + "..."
            raise ValueError(
                f"{self.where(index)}: not valid JSON ({error.msg}, column {error.colno}): {shown!r}; "
                "correct or remove the row"
            ) from error
        if not isinstance(row, Mapping):
            raise _no_object(row, self.where(index))
        return row


class _JsonLines(_JsonRows, _Lines):
    pass


# A string, or a bracket outside of strings. Possessive, so that a long string takes no stack.
_JSON_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


class _JsonArray(_JsonRows):
    """The elements of one JSON array, found by counting brackets outside of strings."""

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        starts, ends, depth, start, end = [], [], 0, 0, self._first()
        for token in _JSON_TOKEN.finditer(self._map):
            first = self._map[token.start()]
            if first in b"[{":
                depth += 1
                if depth == 2:
                    start = token.start()
                if depth <= 2:
                    self._check_gap(end, token.start())
                    end = token.end()
            elif first in b"]}":
                depth -= 1
                if depth == 0:
                    self._check_gap(end, token.start())
                    self._check_gap(token.end(), len(self._map))
                    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
                if depth == 1:
                    end = token.end()
                    starts.append(start)
                    ends.append(end)
        where = f"{self.path.name}:{self._line(start)}"
        raise ValueError(f"{where}: the array is not closed (row {len(starts)} begins here); is the file cut off?")

    def _check_gap(self, start: int, end: int) -> None:
        """Between the elements there are only commas and white space."""
        if between := self._map[start:end].strip(b" \t\r\n,"):
            where = f"{self.path.name}:{self._line(start)}"
            raise ValueError(f"{where}: {between[:40].decode(errors='replace')!r} stands where a row {{...}} should be")


def _open_json(path: Path) -> Rows:
    with path.open("rb") as file:
        head = file.read(1 << 16).removeprefix(_BOM).lstrip()
    if head.startswith(b"["):
        return _JsonArray(path)
    if not head.startswith(b"{"):
        raise ValueError(f"{path} must hold a JSON array of objects, or one object a line")
    return _JsonLines(path)


class _Csv(_File):
    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        # The module's default refuses fields over 128 KiB, which documents exceed.
        csv.field_size_limit(2**31 - 1)
        position, bounds = [self._first()], []

        def lines() -> Iterator[str]:
            self._map.seek(position[0])
            while line := self._map.readline():
                position[0] += len(line)
                # latin-1 keeps every byte; only quotes, commas and line ends matter here.
                yield line.decode("latin-1")

        start = position[0]
        try:
            for record in csv.reader(lines(), strict=True):
                if record:
                    bounds.append((start, position[0]))
                start = position[0]
        except csv.Error as error:
            where = f"{self.path.name}:{self._line(start)}"
            raise ValueError(f"{where}: not valid CSV ({error}); quote fields that hold quotes or line ends") from error
        table = np.array(bounds, dtype=np.int64).reshape(-1, 2)
        try:
            self._columns = self._record(self._map[table[0, 0] : table[0, 1]].decode("utf-8")) if len(table) else []
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path.name}:1: not UTF-8 ({error.reason}); convert the file") from error
        if len(set(self._columns)) < len(self._columns):
            raise ValueError(f"{self.path.name}:1: a column name occurs twice: {self._columns}")
        return table[1:, 0], table[1:, 1]

    @staticmethod
    def _record(text: str) -> list[str]:
        return next(csv.reader(io.StringIO(text, newline=""), strict=True))

    def __getitem__(self, index: int) -> Row:
        fields = self._record(self._text(index))
        if len(fields) != len(self._columns):
            raise ValueError(
                f"{self.where(index)}: {len(fields)} fields where the first line names {len(self._columns)} columns; "
                "quote fields that hold commas"
            )
        return dict(zip(self._columns, fields, strict=True))


class _Parquet:
    _BLOCK = 256

    def __init__(self, path: Path) -> None:
        # pyarrow takes a while to import, and most data is not parquet.
        import pyarrow
        import pyarrow.parquet

        self.path = path
        stat = path.stat()
        self._identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a readable parquet file: {error}") from error
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = [0, *np.cumsum(counts).tolist()]
        self._group: tuple[int, Any] = (-1, None)
        self._block: tuple[int, int, list[Row]] = (-1, -1, [])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        index = _in_range(index, len(self))
        group = bisect.bisect_right(self._starts, index) - 1
        block, within = divmod(index - self._starts[group], self._BLOCK)
        if self._block[:2] != (group, block):
            self._block = (group, block, self._read_block(group, block))
        return self._block[2][within]

    def _read_block(self, group: int, block: int) -> list[Row]:
        if self._group[0] != group:
            try:
                self._group = (group, self._file.read_row_group(group))
            except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
                first, last = self._starts[group], self._starts[group + 1] - 1
                raise ValueError(f"{self.path.name}: rows {first} to {last} are damaged: {error}") from error
        rows = self._group[1].slice(block * self._BLOCK, self._BLOCK).to_pylist()
        if (block + 1) * self._BLOCK >= self._starts[group + 1] - self._starts[group]:
            # Rows are read in order: the group has been used up and would only take memory while the run goes on.
            self._group = (-1, None)
        return rows

    def where(self, index: int) -> str:
        return f"{self.path.name}:row {index}"

    def origin(self) -> str:
        return str(self.path)

    def identity(self) -> list[Any]:
        return self._identity


def _in_range(index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"row {index} of {count}")
    return index


def _no_object(row: Any, where: str) -> ValueError:
    return ValueError(f"{where}: a row must be an object with named columns, not {type(row).__name__}")
