"""The batch: packed rows of tokens and everything the host knows about them, built once and shared by all layers.

A micro-batch is one stream of T tokens: the documents of its rows, one after the other, then one tail of padding. There
is no batch axis and no padding between documents; a padded batch is a packed batch whose documents are its rows.

Everything a layer may ask about the stream (where documents start, positions, which tokens are trained, the order in
which attention tiles run, the counters of dropout) is computed here with numpy on the host, laid out in one int32
buffer, and copied to the device once. The device tensors are views of that copy and live exactly as long as the batch:
nothing is cached elsewhere, so nothing can go stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from types import MappingProxyType

import numpy as np
import torch

IGNORE = -100
"""Label of a token that is not trained."""
POSITIONS = 2**30
"""Positions are below this: the sum of two, as kernels form it, is an int32."""
TAIL = -2
"""In place of a document in the rows of a tile table that cover the stream's tail."""


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """One kind of attention tile table: the tile sizes of a kernel and the window of the layers that use it."""

    query_tile: int
    """Queries per tile, in tokens."""
    key_tile: int
    """Keys per tile, in tokens."""
    window: int | None = None
    """Keys a token sees, itself included; None for all earlier ones."""

    def __post_init__(self) -> None:
        if self.query_tile < 1 or self.key_tile < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"tiles and window must be at least 1, not {self}")


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """The fixed sizes of a run's micro-batches, declared once by the model and handed to the loader.

    All device tensors of a batch have sizes that follow from the layout alone (and, for `PackedBatch.trained`, from one
    of eight buckets), so a captured step can replay on a batch of any composition.
    """

    rows: int
    """Packed rows in a micro-batch (`per_device_train_batch_size`)."""
    row_tokens: int
    """Tokens in a row (`max_length`)."""
    row_documents: int
    """Most documents in a row; the packer closes a row that would exceed it."""
    tiles: tuple[TileSpec, ...] = ()
    """The tile tables that the model's kernels need on the run's device; none for the reference kernels."""

    def __post_init__(self) -> None:
        for name in ("rows", "row_tokens", "row_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.tokens >= 2**31:
            raise ValueError(f"{self.rows} rows of {self.row_tokens} tokens exceed 2^31 - 1 tokens a micro-batch")

    @property
    def tokens(self) -> int:
        """T, the tokens of a micro-batch, padding included."""
        return self.rows * self.row_tokens

    @property
    def max_documents(self) -> int:
        """Most documents in a micro-batch; the tail of padding counts as one."""
        return self.rows * self.row_documents + 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """The sizes `PackedBatch.trained` can have: eighths of T, rounded up."""
        return tuple(sorted({-(-self.tokens * eighth // 8) for eighth in range(1, 9)}))

    def bucket(self, num_trained: int) -> int:
        """The smallest bucket that holds `num_trained` indices."""
        return next(size for size in self.buckets if size >= num_trained)

    def document_bucket(self, count: int) -> int:
        """Room for at least `count` documents: a 64th, a 16th, a quarter or all of `max_documents`.

        A captured step launches work for as many as there may be. Most batches have far fewer than the layout allows.
        """
        sizes = (-(-self.max_documents // share) for share in (64, 16, 4, 1))
        return next(size for size in sizes if size >= count)

    @property
    def buffer_size(self) -> int:
        """Elements of the largest batch's buffer."""
        return sum(_batch_fields(self, self.buckets[-1]).values())


@dataclass(frozen=True)
class TileTables:
    """Work lists of a varlen attention kernel, each int32 [ceil(T / tile) + max_documents, 2], longest first.

    A row of `forward` is (document, first query) of a tile of queries, one of `backward` (document, first key) of a
    tile of keys, tokens counted from the start of the stream. What a tile meets follows from the segments on the
    device; the order is by what it would meet in causal attention of a document with itself. Then come the tiles of the
    tail, (-2, first token), which a kernel clears; the rows left are unused and have document -1.
    """

    forward: torch.Tensor
    backward: torch.Tensor
    forward_used: int
    """Rows of `forward` in use (host): what an eager launch needs; a captured one takes all rows."""
    backward_used: int


@dataclass(frozen=True)
class DropoutCounters:
    """What counter-based dropout needs to know of a batch; the rest (layer, site, feature) is the caller's.

    A token's random bits follow from the run's seed, the step, and the token's place in the global order of rows: they
    do not depend on how rows are cut into micro-batches and ranks, and a recomputed forward draws the same ones.
    """

    key: torch.Tensor
    """int32 [2]: the run's seed and the step."""
    row: torch.Tensor
    """int32 [T]: index of the token's row in the global order of the step's epoch."""
    column: torch.Tensor
    """int32 [T]: index of the token in its row."""


@dataclass(frozen=True)
class Segments:
    """The documents of a stream of T tokens. Built by `segments` or `build_batch`, never changed.

    Document i holds the tokens starts[i] .. starts[i] + lengths[i] - 1. In a packed batch documents follow one another
    and what is left of the stream is its tail, which belongs to no document: attention returns zeros there. In a KV
    cache every document has a span of its own and fills a part of it.
    """

    tokens: int
    """T, the length of the stream."""
    lengths: tuple[int, ...]
    """Tokens per document (host); 0 is allowed."""
    starts: tuple[int, ...]
    """First token of each document (host)."""
    offsets: tuple[int, ...]
    """Position of each document's first token (host): 0 in training, > 0 where a chunk continues a document."""
    cu_seqlens: torch.Tensor
    """int32 [max_documents + 1]: first token of each document, tail filled with T."""
    seqused: torch.Tensor
    """int32 [max_documents]: tokens of each document, tail filled with 0."""
    offset: torch.Tensor
    """int32 [max_documents]: `offsets`, tail filled with 0."""
    positions: torch.Tensor
    """int32 [T]: position of each token in its document, offset included; 0 in the tail."""
    tiles: Mapping[TileSpec, TileTables] = field(default_factory=lambda: MappingProxyType({}))
    dropout: DropoutCounters | None = None
    finite_gaps: bool = False
    """Whether what lies between documents is known to be finite, so that a weight of 0 makes 0 of it (host)."""

    @cached_property
    def has_gaps(self) -> bool:
        """Whether tokens before or between documents belong to none (host), as in a KV cache."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        return self.starts != (0, *ends)[: len(ends)]

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document (host)."""
        return max(self.lengths, default=0)

    def tile_tables(self, spec: TileSpec) -> TileTables:
        """The tables for one kernel and window.

        Raises:
            KeyError: the layout did not declare `spec`; tables are built with the batch, never on demand.
        """
        if spec not in self.tiles:
            raise KeyError(
                f"{spec} was not declared (declared: {list(self.tiles) or 'none'}): give the BatchLayout or `segments` "
                "what kernels.attention.attention_tiles returns for these head dims, windows, dtype and device"
            )
        return self.tiles[spec]


@dataclass(frozen=True)
class StepScalars:
    """What changes from step to step, as 0-d tensors on the device, so that a captured step can replay."""

    num_trained: torch.Tensor
    """int32: N, the trained tokens of the whole optimizer step over all its micro-batches and ranks."""
    learning_rate: torch.Tensor
    """float32."""
    step: torch.Tensor
    """int32: optimizer steps before this one."""
    seed: torch.Tensor
    """int32: the run's seed."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. All tensors are views of one buffer."""

    tokens: torch.Tensor
    """int32 [T]."""
    labels: torch.Tensor
    """int32 [T]: the next token of the same document, or -100 where it is not trained. Shifted here, nowhere else."""
    trained: torch.Tensor
    """int32 [bucket]: indices of the tokens with a label, ascending, padded with T (gather and scatter mask it)."""
    num_trained: int
    """Tokens with a label in this micro-batch (host)."""
    num_tokens: int
    """Tokens that are not padding (host)."""
    step_trained: int
    """N (host): trained tokens of the whole optimizer step."""
    segments: Segments
    scalars: StepScalars
    row_ids: tuple[int, ...]
    """Global indices of the rows (host), for messages and for dropout."""
    layout: BatchLayout
    buffer: torch.Tensor
    """The int32 buffer all tensors are views of."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on `device`, by one copy that does not block when this one is pinned."""
        return self._in(self.buffer.to(device, non_blocking=True))

    def pin_memory(self) -> PackedBatch:
        """The same batch in page-locked host memory."""
        return self._in(self.buffer.pin_memory())

    @property
    def room(self) -> int:
        """The layout's `document_bucket` for this batch."""
        return self.layout.document_bucket(len(self.segments.lengths))

    def in_buffer(self, buffer: torch.Tensor) -> PackedBatch:
        """The same batch as views of the start of a buffer, which holds a copy of this one's by the time it is read.

        Its tables and lists of documents are as long as any batch needs that has as much `room`.
        """
        return self._in(buffer[: len(self.buffer)], self.room)

    def _in(self, buffer: torch.Tensor, room: int | None = None) -> PackedBatch:
        lengths = self.segments.lengths
        return _view_batch(buffer, self.layout, lengths, self.num_trained, self.step_trained, self.row_ids, room)


@dataclass(frozen=True)
class Document:
    """A tokenised document, or a part of one that stands alone."""

    tokens: np.ndarray
    """int32 [n]."""
    trained: np.ndarray
    """bool [n]: whether the loss is taken on predicting this token; the first token has no prediction."""


def segments(
    lengths: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    tokens: int | None = None,
    max_documents: int | None = None,
    tiles: Sequence[TileSpec] = (),
    device: torch.device | str = "cpu",
) -> Segments:
    """Segments for documents of the given lengths, without a batch (inference, tests).

    Args:
        lengths: tokens per document.
        offsets: position of each document's first token; 0 by default.
        starts: first token of each document; by default documents follow one another. Must be ascending and leave room
            for each document (the spans of a KV cache).
        tokens: T; by default just enough.
        max_documents: size of the per-document tensors; by default just enough for the documents and a tail.
        tiles: tile tables to build.
        device: where the tensors go.

    Raises:
        TypeError: lengths, offsets or starts that are not sequences of integers on the host.
        ValueError: documents overlap or exceed T or max_documents; there are more or fewer offsets or starts than
            lengths, or negative ones; positions reach 2^30, or T 2^31.
    """
    lengths = _integers("lengths", lengths)
    starts = _integers("starts", starts) if starts is not None else _running_starts(lengths)
    offsets = _integers("offsets", offsets) if offsets is not None else (0,) * len(lengths)
    _check_places(lengths, starts, offsets)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tokens = max(ends, default=0) if tokens is None else tokens
    if not 0 <= tokens < 2**31:
        raise ValueError(f"a stream has 0 to 2^31 - 1 tokens, not {tokens}")
    max_documents = len(lengths) + 1 if max_documents is None else max_documents
    tiles = tuple(tiles)
    if any(end > start for end, start in zip(ends, [*starts, tokens][1:], strict=True)) or min(lengths, default=0) < 0:
        raise ValueError(f"documents of {list(lengths)} tokens at {list(starts)} overlap or exceed {tokens} tokens")
    if len(lengths) > max_documents:
        raise ValueError(f"{len(lengths)} documents exceed max_documents = {max_documents}")
    sizes = _segment_fields(tokens, max_documents, tiles)
    buffer = np.zeros(sum(sizes.values()), dtype=np.int32)
    _fill_segments(_numpy_views(buffer, sizes), lengths, starts, offsets, tokens, tiles)
    views = _torch_views(torch.from_numpy(buffer).to(device), sizes)
    return _view_segments(views, lengths, starts, offsets, tokens, tiles)


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(values, Sequence | np.ndarray) or not all(isinstance(value, Integral) for value in values):
        raise TypeError(f"{name} must be a sequence of integers on the host, not {values!r}")
    return tuple(int(value) for value in values)


def _check_places(lengths: tuple[int, ...], starts: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    for name, values in (("starts", starts), ("offsets", offsets)):
        if len(values) != len(lengths):
            raise ValueError(f"{len(values)} {name} for {len(lengths)} documents")
        if min(values, default=0) < 0:
            raise ValueError(f"{name} must be at least 0, not {min(values)}")
    last = max((offset + length for offset, length in zip(offsets, lengths, strict=True)), default=0)
    if last > POSITIONS:
        raise ValueError(f"positions must be below 2^30, not up to {last - 1}")


def build_batch(
    layout: BatchLayout,
    rows: Sequence[Sequence[Document]],
    *,
    row_ids: Sequence[int] | None = None,
    step_trained: int | None = None,
    learning_rate: float = 0.0,
    step: int = 0,
    seed: int = 0,
) -> PackedBatch:
    """One micro-batch on the host from the documents of its rows.

    Args:
        layout: the sizes; fewer rows than `layout.rows` are filled up with empty ones.
        rows: documents per row.
        row_ids: global index of each row; 0, 1, ... by default.
        step_trained: N of the optimizer step; by default this batch's own trained tokens.
        learning_rate: of this step.
        step: optimizer steps before this one.
        seed: of the run, below 2^31.

    Raises:
        ValueError: a row exceeds the layout's tokens or documents.
    """
    row_ids = tuple(range(len(rows))) if row_ids is None else tuple(row_ids)
    _check_rows(layout, rows)
    documents = [document for row in rows for document in row]
    lengths = tuple(len(document.tokens) for document in documents)
    starts = _running_starts(lengths)
    labels = np.full(layout.tokens, IGNORE, dtype=np.int32)
    for start, document in zip(starts, documents, strict=True):
        targets = np.where(document.trained[1:], document.tokens[1:], IGNORE)
        labels[start : start + len(targets)] = targets
    trained = np.flatnonzero(labels != IGNORE)
    bucket = layout.bucket(len(trained))

    sizes = _batch_fields(layout, bucket)
    buffer = torch.zeros(sum(sizes.values()), dtype=torch.int32)
    views = _numpy_views(buffer.numpy(), sizes)
    for start, document in zip(starts, documents, strict=True):
        views["tokens"][start : start + len(document.tokens)] = document.tokens
    views["labels"][:] = labels
    views["trained"][:] = layout.tokens
    views["trained"][: len(trained)] = trained
    step_trained = len(trained) if step_trained is None else step_trained
    views["scalars"][:] = [step_trained, np.float32(learning_rate).view(np.int32), step, seed]
    views["key"][:] = [seed, step]
    _fill_segments(views, lengths, starts, (0,) * len(lengths), layout.tokens, layout.tiles)
    _fill_counters(views, rows, row_ids)

    return _view_batch(buffer, layout, lengths, len(trained), step_trained, row_ids)


def _check_rows(layout: BatchLayout, rows: Sequence[Sequence[Document]]) -> None:
    if len(rows) > layout.rows:
        raise ValueError(f"{len(rows)} rows exceed the layout's {layout.rows}")
    for index, row in enumerate(rows):
        tokens = sum(len(document.tokens) for document in row)
        if tokens > layout.row_tokens or len(row) > layout.row_documents:
            raise ValueError(
                f"row {index} has {tokens} tokens in {len(row)} documents; the layout allows {layout.row_tokens} "
                f"tokens in {layout.row_documents} documents"
            )


def _running_starts(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(start) for start in np.cumsum([0, *lengths[:-1]])) if lengths else ()


# ---- the buffer: names and sizes of its int32 fields, in order ----


def _table_sizes(spec: TileSpec, tokens: int, max_documents: int) -> tuple[int, int]:
    return -(-tokens // spec.query_tile) + max_documents, -(-tokens // spec.key_tile) + max_documents


def _segment_fields(tokens: int, max_documents: int, tiles: Sequence[TileSpec]) -> dict[str, int]:
    sizes = {
        "cu_seqlens": max_documents + 1,
        "seqused": max_documents,
        "offset": max_documents,
        "positions": tokens,
    }
    for index, spec in enumerate(tiles):
        forward, backward = _table_sizes(spec, tokens, max_documents)
        sizes[f"forward{index}"] = 2 * forward
        sizes[f"backward{index}"] = 2 * backward
    return sizes


def _batch_fields(layout: BatchLayout, bucket: int) -> dict[str, int]:
    return {
        "scalars": 4,
        "key": 2,
        "tokens": layout.tokens,
        "labels": layout.tokens,
        "row": layout.tokens,
        "column": layout.tokens,
        "trained": bucket,
        **_segment_fields(layout.tokens, layout.max_documents, layout.tiles),
    }


def _numpy_views(buffer: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    return dict(zip(sizes, np.split(buffer, np.cumsum(list(sizes.values()))[:-1]), strict=True))


def _torch_views(buffer: torch.Tensor, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    return dict(zip(sizes, buffer.split(list(sizes.values())), strict=True))


def _fill_segments(
    views: dict[str, np.ndarray],
    lengths: Sequence[int],
    starts: Sequence[int],
    offsets: Sequence[int],
    tokens: int,
    tiles: Sequence[TileSpec],
) -> None:
    count = len(lengths)
    views["cu_seqlens"][:] = tokens
    views["cu_seqlens"][:count] = starts
    views["seqused"][:count] = lengths
    views["offset"][:count] = offsets
    for start, length, offset in zip(starts, lengths, offsets, strict=True):
        views["positions"][start : start + length] = np.arange(offset, offset + length)
    for index, spec in enumerate(tiles):
        tail = tokens - _end(lengths, starts)
        for name, tile, met in (("forward", spec.query_tile, _keys_met), ("backward", spec.key_tile, _queries_met)):
            tiles_of = _tile_starts(tile, lengths, starts)
            work = met(spec, lengths, starts, *tiles_of)
            _fill_table(views[f"{name}{index}"], np.stack(tiles_of, axis=1), work, _tail_tiles(tile, tail, tokens))


def _keys_met(
    spec: TileSpec, lengths: Sequence[int], starts: Sequence[int], document: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Tiles of keys that each tile of queries meets, in causal attention inside each document."""
    start, end = np.asarray(starts)[document], (np.asarray(starts) + np.asarray(lengths))[document]
    first_key = start if spec.window is None else np.maximum(start, first - spec.window + 1)
    return -(-(np.minimum(first + spec.query_tile, end) - first_key) // spec.key_tile)


def _queries_met(
    spec: TileSpec, lengths: Sequence[int], starts: Sequence[int], document: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Tiles of queries that each tile of keys meets, likewise."""
    end = (np.asarray(starts) + np.asarray(lengths))[document]
    end_query = end if spec.window is None else np.minimum(end, first + spec.key_tile - 1 + spec.window)
    return -(-(end_query - first) // spec.query_tile)


def _tile_starts(tile: int, lengths: Sequence[int], starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Document and first token of each tile."""
    counts = -(-np.asarray(lengths, dtype=np.int64) // tile)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return document, np.asarray(starts, dtype=np.int64)[document] + within * tile


def _end(lengths: Sequence[int], starts: Sequence[int]) -> int:
    """Where the last document ends."""
    return starts[-1] + lengths[-1] if lengths else 0


def _tail_tiles(tile: int, tail: int, tokens: int) -> np.ndarray:
    """Rows for the last `tail` tokens: always room, since documents' tiles are ragged once each at most."""
    first = np.arange(tokens - tail, tokens, tile)
    return np.stack([np.full(len(first), TAIL), first], axis=1)


def _fill_table(flat: np.ndarray, tiles: np.ndarray, work: np.ndarray, tail: np.ndarray) -> None:
    table = flat.reshape(-1, 2)
    table[:] = (-1, 0)
    table[len(tiles) : len(tiles) + len(tail)] = tail
    # Longest first, so that the last tiles to start are short ones; stable, so that the order is fixed.
    table[: len(tiles)] = tiles[np.argsort(-work, kind="stable")]


def _fill_counters(views: dict[str, np.ndarray], rows: Sequence[Sequence[Document]], row_ids: Sequence[int]) -> None:
    start = 0
    for row, row_id in zip(rows, row_ids, strict=True):
        end = start + sum(len(document.tokens) for document in row)
        views["row"][start:end] = row_id
        views["column"][start:end] = np.arange(end - start)
        start = end


# ---- views of a filled buffer ----


def _view_segments(
    views: dict[str, torch.Tensor],
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    offsets: tuple[int, ...],
    tokens: int,
    tiles: Sequence[TileSpec],
    room: int | None = None,
) -> Segments:
    """`room`: leave out the places of more documents than this."""
    counts = np.asarray([*lengths, tokens - _end(lengths, starts)], dtype=np.int64)
    # Of k parts of T tokens, the tail one of them, fewer than T / tile + k tiles are in use.
    rows = [(None, None) if room is None else _table_sizes(spec, tokens, room) for spec in tiles]
    tables = {
        spec: TileTables(
            forward=views[f"forward{index}"].view(-1, 2)[: rows[index][0]],
            backward=views[f"backward{index}"].view(-1, 2)[: rows[index][1]],
            forward_used=int((-(-counts // spec.query_tile)).sum()),
            backward_used=int((-(-counts // spec.key_tile)).sum()),
        )
        for index, spec in enumerate(tiles)
    }
    counters = DropoutCounters(views["key"], views["row"], views["column"]) if "key" in views else None
    return Segments(
        tokens=tokens,
        lengths=lengths,
        starts=starts,
        offsets=offsets,
        cu_seqlens=views["cu_seqlens"][: None if room is None else room + 1],
        seqused=views["seqused"][:room],
        offset=views["offset"][:room],
        positions=views["positions"],
        tiles=MappingProxyType(tables),
        dropout=counters,
    )


def _view_batch(
    buffer: torch.Tensor,
    layout: BatchLayout,
    lengths: tuple[int, ...],
    num_trained: int,
    step_trained: int,
    row_ids: tuple[int, ...],
    room: int | None = None,
) -> PackedBatch:
    views = _torch_views(buffer, _batch_fields(layout, layout.bucket(num_trained)))
    starts, offsets = _running_starts(lengths), (0,) * len(lengths)
    scalars = views["scalars"]
    return PackedBatch(
        tokens=views["tokens"],
        labels=views["labels"],
        trained=views["trained"],
        num_trained=num_trained,
        num_tokens=sum(lengths),
        step_trained=step_trained,
        segments=_view_segments(views, lengths, starts, offsets, layout.tokens, layout.tiles, room),
        scalars=StepScalars(scalars[0], scalars[1].view(torch.float32), scalars[2], scalars[3]),
        row_ids=row_ids,
        layout=layout,
        buffer=buffer,
    )
