"""Packing documents into rows: best-fit-decreasing over a window.

Best-fit-decreasing takes the documents longest first and puts each into the row with the least room that still holds
it (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974: at most 11/9 of
the best possible number of rows, plus a constant). A window bounds how far a document moves from its place in the
order, and makes the work independent of the size of the data set.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plan:
    """Rows of documents, in order."""

    documents: np.ndarray
    """int64: document indices, row after row."""
    bounds: np.ndarray
    """int64 [rows + 1]: row i holds documents[bounds[i] : bounds[i + 1]]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> np.ndarray:
        """The documents of row `index`."""
        return self.documents[self.bounds[index] : self.bounds[index + 1]]


def pack(lengths: Sequence[int] | np.ndarray, row_tokens: int, row_documents: int) -> list[list[int]]:
    """Best-fit-decreasing of documents into rows.

    Args:
        lengths: tokens per document.
        row_tokens: tokens in a row.
        row_documents: most documents in a row.

    Returns:
        For each row the indices of its documents, ascending; rows by their first document. Same input, same output.

    Raises:
        ValueError: a document is longer than a row.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and lengths.max() > row_tokens:
        index = int(lengths.argmax())
        raise ValueError(f"document {index} has {lengths[index]} tokens, a row has {row_tokens}")
    rows: list[list[int]] = []
    # (room left, row) of rows that are open, ascending: the first one that holds a document is the best fit.
    room: list[tuple[int, int]] = []
    values = lengths.tolist()
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = values[document]
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(document)
        if left > length and len(rows[row]) < row_documents:
            bisect.insort(room, (left - length, row))
    return sorted(sorted(row) for row in rows)


def plan_epoch(
    lengths: np.ndarray,
    *,
    row_tokens: int,
    row_documents: int,
    window: int,
    packing: bool,
    shuffle: bool,
    seed: int,
    epoch: int,
) -> Plan:
    """The rows of one epoch: documents shuffled, packed window by window, rows shuffled within their window.

    Args:
        lengths: int32 [n], tokens per document.
        row_tokens: tokens in a row.
        row_documents: most documents in a row.
        window: documents packed together.
        packing: False gives each document a row of its own.
        shuffle: False keeps the documents' order, and that of rows by their first document.
        seed: with `epoch` it decides the order, and nothing else does.
        epoch: counted from 0.
    """
    random = _Random(seed, epoch)
    order = random.permutation(len(lengths)) if shuffle else np.arange(len(lengths))
    if not packing:
        return Plan(order, np.arange(len(order) + 1))
    documents, counts = [], []
    for start in range(0, len(order), window):
        here = order[start : start + window]
        rows = pack(lengths[here], row_tokens, row_documents)
        # Sorted rows begin with the longest documents' neighbours; a step should see an even mix.
        for row in random.permutation(len(rows)).tolist() if shuffle else range(len(rows)):
            documents.append(here[rows[row]])
            counts.append(len(rows[row]))
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return Plan(np.concatenate(documents) if documents else order, bounds)


class _Random:
    """Permutations from raw Philox words, whose stream NumPy guarantees to stay the same across its versions."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))

    def permutation(self, count: int) -> np.ndarray:
        return np.argsort(self._bits.random_raw(count), kind="stable")
