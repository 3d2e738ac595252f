"""JSON over the key-value store that the ranks of a job share, from any thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_CONNECTING = timedelta(seconds=3)
"""A server that dies while a thread connects holds it for this long, not for as long as ranks may wait for others."""


class StoreGoneError(RuntimeError):
    """The process that serves the store has ended."""


class JsonStore:
    """Keys and JSON values that all ranks see.

    One connection serves one call at a time, and a call may wait, so every thread but the first has a connection of its
    own. Nothing here waits for a key: waiting calls of torch write to stderr when their time is over.

    Attributes:
        gone: the server did not answer once; it is not asked again, for torch reports every attempt at length.
    """

    def __init__(self, store: dist.Store) -> None:
        """Use torch's store in the thread that calls this, and clones of it in others."""
        self.gone = False
        self._store = store.clone()  # pyrefly: ignore
        self._store.set_timeout(_CONNECTING)
        self._own = threading.local()
        self._own.store = store

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        with self._answering() as store:
            store.set(key, json.dumps(value))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        with self._answering() as store:
            return store.check(list(keys))

    def get(self, keys: Sequence[str]) -> list[Any]:
        """The values of keys that are set."""
        with self._answering() as store:
            many = store.has_extended_api()  # pyrefly: ignore
            found = store.multi_get(list(keys)) if many else [store.get(key) for key in keys]
        return [json.loads(value) for value in found]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; returns its new value."""
        with self._answering() as store:
            return store.add(key, amount)

    def set_first(self, key: str, value: Any) -> Any:
        """Set a key unless it is set; returns the value it has then."""
        with self._answering() as store:
            return json.loads(store.compare_set(key, "", json.dumps(value)))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove keys, set or not."""
        with self._answering() as store:
            for key in keys:
                store.delete_key(key)

    @contextmanager
    def _answering(self) -> Generator[dist.Store]:
        if self.gone:
            raise StoreGoneError("the store of the job is gone")
        try:
            if not hasattr(self._own, "store"):
                self._own.store = self._store.clone()
            yield self._own.store
        except dist.DistError as error:
            self.gone = True
            raise StoreGoneError("the store of the job is gone") from error
