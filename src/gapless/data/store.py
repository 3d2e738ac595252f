"""Tokenised documents: made once, kept in memory or in a spool on disk.

A token is stored as its id where it is trained and as the bitwise complement of it (a negative number) where it is not:
one int32 file holds tokens and mask. Lengths, trained labels and source rows are three small arrays beside it.

A spool is a folder named by the fingerprint of all that its content follows from (the rows, the tokenizer's files, the
template, the settings). It is written under a temporary name and renamed when complete, so a killed writer leaves
nothing that could be mistaken for one; a spool whose sizes or checksum do not match is thrown away and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from gapless.batch import Document
from gapless.config import DataConfig
from gapless.data.chat import RowEncoder
from gapless.data.sources import Rows, open_rows
from gapless.data.tokenizer import Tokenizer

FORMAT_VERSION = 2
_TEMPORARY = "writing-"
_BATCH_ROWS = 256
_HASH_CHUNK = 1 << 22

Progress = Callable[[int, int], None]
"""Told the rows done and the rows in all."""

TOO_LONG = "longer than max_length"
CUT = "cut before its first trained token"
UNTRAINED = "nothing to train on (no assistant turn or completion)"
EMPTY = "empty"


@dataclass
class TokenReport:
    """What became of the rows."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    """Rows kept, but cut to max_length."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    tokens: int = 0
    trained: int = 0
    """Trained labels."""
    longest: int = 0
    """Tokens of the longest row read, before any cut."""
    unended_turns: int = 0
    """Trained assistant turns that the chat template closes without an end token."""
    shortened_turns: int = 0
    """Trained assistant turns of which the chat template leaves out the beginning or the reasoning."""
    empty_answers: int = 0
    """Trained assistant turns and completions without content, read."""
    untemplated: int = 0
    """Rows read of a prompt and a completion as plain texts, although the tokenizer has a chat template."""
    max_length: int = 0

    def lines(self) -> list[str]:
        """The report for people, a fact a line."""
        lines = [f"{self.kept:,} of {self.rows:,} rows, {self.tokens:,} tokens, {self.trained:,} of them trained"]
        if self.truncated:
            lines.append(f"{self.truncated:,} rows cut to max_length {self.max_length:,} (longest {self.longest:,})")
        for reason, count in self.dropped.items():
            length = f" {self.max_length:,} (longest {self.longest:,})" if reason == TOO_LONG else ""
            lines.append(f"{count:,} rows left out: {reason}{length}")
        if self.unended_turns:
            lines.append(
                f"{self.unended_turns:,} answers end without an end token in the chat template: the model will not "
                "learn to stop"
            )
        if self.shortened_turns:
            lines.append(
                f"{self.shortened_turns:,} answers are trained without their thinking, which the chat template leaves "
                "out"
            )
        if self.empty_answers:
            lines.append(f"{self.empty_answers:,} answers are empty: the model learns to stop at once")
        if self.untemplated:
            lines.append(
                f"note: {self.untemplated:,} rows have prompt and completion as plain texts, which are trained without "
                "the chat template; ask with `gapless generate --raw` (sample_prompts use the template), or make both "
                "lists of messages to train the chat format"
            )
        return lines


class TokenStore:
    """Tokenised documents by index.

    Attributes:
        lengths: int32 [n], tokens per document.
        trained: int32 [n], trained labels per document (predictions the loss is taken on; at least 1).
        fingerprint: hex digest of the content.
        report: what became of the rows.
    """

    def __init__(self, tokens: np.ndarray, index: _Index, rows: Rows, report: TokenReport, fingerprint: str) -> None:
        self.lengths = index.lengths
        self.trained = index.trained
        self.report = report
        self.fingerprint = fingerprint
        self._tokens = tokens
        self._row_of = index.rows
        self._rows = rows
        self._starts = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> Document:
        """Document `index`: copies, safe to keep."""
        stored = np.asarray(self._tokens[self._starts[index] : self._starts[index + 1]])
        trained = stored >= 0
        return Document(np.where(trained, stored, ~stored), trained)

    def where(self, index: int) -> str:
        """The place of the row that document `index` was made of, for instance train.jsonl:12."""
        return self._rows.where(int(self._row_of[index]))


@dataclass(frozen=True)
class _Index:
    lengths: np.ndarray
    trained: np.ndarray
    rows: np.ndarray

    def table(self) -> np.ndarray:
        """int64 [n, 3], as it is on disk."""
        return np.stack([self.lengths, self.trained, self.rows], axis=1).astype("<i8")

    @classmethod
    def of(cls, table: np.ndarray) -> _Index:
        return cls(table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), table[:, 2].copy())


def tokenize(
    source: str | Path | Sequence[Any] | Rows,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> TokenStore:
    """Tokenise rows, or reuse the spool of an earlier run.

    Args:
        source: paths or rows, see `gapless.data.sources.open_rows`, or what it returned.
        tokenizer: of the model.
        config: format, columns, max_length, long_rows and train_on are read.
        cache_dir: folder for spools; None keeps the tokens in memory.
        progress: called with the rows done and the rows in all after each few hundred rows; never for a spool that is
            reused.

    Raises:
        ValueError: a row cannot be read (its place is named), or no row has anything to train on (with counts).
    """
    rows = source if isinstance(source, Rows) else open_rows(source)
    if cache_dir is None:
        sink = _MemorySink()
        report = _fill(sink, rows, tokenizer, config, progress)
        return TokenStore(sink.tokens(), sink.index(), rows, report, sink.digest())
    cache_dir = Path(cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = cache_dir / f"tokens-{_fingerprint(rows, tokenizer, config)[:20]}"
    store = _open_spool(folder, rows)
    if store is None:
        _write_spool(folder, rows, tokenizer, config, progress)
        store = _open_spool(folder, rows)
        if store is None:
            raise ValueError(f"the spool {folder} was damaged while it was written; is the disk sound?")
    return store


# ---- rows to documents ----


class _Sink(Protocol):
    def add(self, document: Document, row: int) -> None: ...


def _fill(sink: _Sink, rows: Rows, tokenizer: Tokenizer, config: DataConfig, progress: Progress | None) -> TokenReport:
    encoder = RowEncoder(tokenizer, format=config.format, columns=config.columns, train_on=config.train_on)
    report = TokenReport(max_length=config.max_length)
    for row, document in enumerate(_documents(rows, encoder)):
        report.rows += 1
        if progress and (report.rows % _BATCH_ROWS == 0 or report.rows == len(rows)):
            progress(report.rows, len(rows))
        report.longest = max(report.longest, len(document.tokens))
        kept, reason = _fit(document, config.max_length, config.long_rows)
        if kept is None:
            report.dropped[reason] = report.dropped.get(reason, 0) + 1
            continue
        report.truncated += len(kept.tokens) < len(document.tokens)
        report.kept += 1
        report.tokens += len(kept.tokens)
        report.trained += int(kept.trained[1:].sum())
        sink.add(kept, row)
    report.unended_turns, report.shortened_turns = encoder.unended_turns, encoder.shortened_turns
    report.empty_answers = encoder.empty_answers
    report.untemplated = encoder.plain_prompts if tokenizer.chat_templates else 0
    if not report.kept:
        counts = "; ".join(f"{count:,} {reason}" for reason, count in report.dropped.items())
        raise ValueError(
            f"none of the {report.rows:,} rows of {rows.origin()} has anything to train on ({counts}); the longest has "
            f"{report.longest:,} tokens, max_length is {config.max_length:,}{_remedy(report)}"
        )
    return report


def _remedy(report: TokenReport) -> str:
    if TOO_LONG in report.dropped:
        return '; raise data.max_length, or set data.long_rows = "truncate"'
    return "; raise data.max_length" if CUT in report.dropped else ""


def _documents(rows: Rows, encoder: RowEncoder) -> Iterator[Document]:
    for start in range(0, len(rows), _BATCH_ROWS):
        prepared = []
        for index in range(start, min(start + _BATCH_ROWS, len(rows))):
            row = rows[index]
            try:
                prepared.append(encoder.prepare(row))
            except ValueError as error:
                raise ValueError(f"{rows.where(index)}: {error}") from error
        encodings = encoder.tokenizer.encode_batch([entry.text for entry in prepared])
        for entry, encoding in zip(prepared, encodings, strict=True):
            yield encoder.finish(entry, encoding)


def _fit(document: Document, max_length: int, long_rows: Literal["drop", "truncate"]) -> tuple[Document | None, str]:
    """The document as it is kept, or None and the reason."""
    if not len(document.tokens):
        return None, EMPTY
    # The first token has no prediction.
    if not document.trained[1:].any():
        return None, UNTRAINED
    if len(document.tokens) <= max_length:
        return document, ""
    if long_rows == "drop":
        return None, TOO_LONG
    if not document.trained[1:max_length].any():
        return None, CUT
    return Document(document.tokens[:max_length], document.trained[:max_length]), ""


# ---- sinks ----


class _IndexSink:
    """Collects what is known of each document and the digest of the content."""

    def __init__(self) -> None:
        self._entries: list[np.ndarray] = []
        self._pending: list[tuple[int, int, int]] = []
        self._digest = hashlib.sha256()

    def note(self, stored: np.ndarray, document: Document, row: int) -> None:
        self._digest.update(stored.tobytes())
        self._pending.append((len(stored), int(document.trained[1:].sum()), row))
        if len(self._pending) >= 65536:
            self._flush()

    def _flush(self) -> None:
        self._entries.append(np.array(self._pending, dtype=np.int64).reshape(-1, 3))
        self._pending = []

    def index(self) -> _Index:
        self._flush()
        table = np.concatenate(self._entries)
        self._entries = [table]
        return _Index.of(table)

    def digest(self) -> str:
        digest = self._digest.copy()
        digest.update(self.index().table().tobytes())
        return digest.hexdigest()


def _stored(document: Document) -> np.ndarray:
    return np.where(document.trained, document.tokens, ~document.tokens).astype("<i4")


class _MemorySink(_IndexSink):
    def __init__(self) -> None:
        super().__init__()
        self._parts: list[np.ndarray] = []

    def add(self, document: Document, row: int) -> None:
        stored = _stored(document)
        self.note(stored, document, row)
        self._parts.append(stored)

    def tokens(self) -> np.ndarray:
        return np.concatenate(self._parts)


class _DiskSink(_IndexSink):
    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def add(self, document: Document, row: int) -> None:
        stored = _stored(document)
        self.note(stored, document, row)
        self._file.write(stored.tobytes())


# ---- the spool ----


def _fingerprint(rows: Rows, tokenizer: Tokenizer, config: DataConfig) -> str:
    """What the content of a spool follows from."""
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tokenizer.files}
    facts = {
        "format_version": FORMAT_VERSION,
        "rows": rows.identity(),
        "tokenizer": files,
        "templates": tokenizer.chat_templates,
        "format": config.format,
        "columns": config.columns,
        "max_length": config.max_length,
        "long_rows": config.long_rows,
        "train_on": config.train_on,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _write_spool(folder: Path, rows: Rows, tokenizer: Tokenizer, config: DataConfig, progress: Progress | None) -> None:
    _remove_abandoned(folder.parent)
    name = f"{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    # Not by mkdtemp, which closes the folder to everyone else: a cache may be shared.
    temporary = folder.parent / name
    temporary.mkdir()
    try:
        with (temporary / "tokens.bin").open("wb") as file:
            sink = _DiskSink(file)
            report = _fill(sink, rows, tokenizer, config, progress)
            file.flush()
            os.fsync(file.fileno())
        np.save(temporary / "index.npy", sink.index().table())
        meta = {"format_version": FORMAT_VERSION, "digest": sink.digest(), "report": asdict(report)}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.rename(folder)
        except OSError:
            # Another process finished the same spool first; its content is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(cache_dir: Path) -> None:
    """Delete what killed writers of this host left; others may be at work on theirs."""
    prefix = f"{_TEMPORARY}{socket.gethostname()}-"
    for folder in cache_dir.glob(f"{_TEMPORARY}*"):
        process = folder.name.removeprefix(prefix).partition("-")[0]
        if folder.name.startswith(prefix) and process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _open_spool(folder: Path, rows: Rows) -> TokenStore | None:
    """The store of a complete and undamaged spool, or None."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        table = np.load(folder / "index.npy", allow_pickle=False)
        tokens = np.memmap(folder / "tokens.bin", dtype="<i4", mode="r")
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION or table.shape[1:] != (3,):
        return None
    index = _Index.of(table)
    if len(tokens) != table[:, 0].sum() or _digest(tokens, index) != meta.get("digest"):
        return None
    return TokenStore(tokens, index, rows, TokenReport(**meta["report"]), meta["digest"])


def _digest(tokens: np.ndarray, index: _Index) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _HASH_CHUNK):
        digest.update(tokens[start : start + _HASH_CHUNK].tobytes())
    digest.update(index.table().tobytes())
    return digest.hexdigest()
