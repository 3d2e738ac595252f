"""The processes of a job, and how they talk on the host: JSON over a store, without collectives.

A collective must be met by all ranks within its timeout. What may take longer (tokenising, opening a run folder,
writing a checkpoint) is waited for here: as long as it takes, while all ranks are well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from gapless.parallel.log import RankLog
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore

_LONGEST_PAUSE = 0.05
"""Seconds between two looks at a key."""
_SHOWN = 80
"""Letters shown of a value that differs."""


class Guard(Protocol):
    """Knows whether the other ranks are well."""

    def check(self) -> None:
        """Raise `OtherRankFailed` if a rank has failed."""


class World:
    """The ranks of a job, seen from one of them.

    `share`, `agree` and `first` are called by all ranks in the same order, by the main thread; `mark`, `wait` and
    `forget` by any thread. When another rank fails, those that wait raise `OtherRankFailed`.

    Attributes:
        rank: of this process, 0 to size - 1.
        local_rank: of this process on its node; the number of its GPU.
        size: processes in the job.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        processes: Sequence[Process],
        store: JsonStore,
        guard: Guard | None = None,
        log: RankLog | None = None,
    ) -> None:
        """One of the processes, which are given by rank; made by `launched`."""
        self.rank, self.local_rank, self.size = rank, local_rank, len(processes)
        self._store, self._guard, self._log = store, guard, log or RankLog()
        nodes = [process.node for process in processes]
        self._leader = nodes.index(nodes[rank])
        self._calls: Counter[str] = Counter()
        self._read: list[str] = []
        """Keys that this rank removes in the next call that all come to."""

    @classmethod
    def single(cls) -> World:
        """The world of one process: there is nobody to wait for, and torch.distributed is not initialised."""
        return cls(0, 0, [Process(node="", number=0, started="")], JsonStore(dist.HashStore()))

    # ---- all ranks, in the same order ----

    def share(self, name: str, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank.

        Args:
            name: the same on all ranks; may be used again.
            value: of this rank.
        """
        call = self._call(name)
        values = share(self._store, call, self.rank, self.size, value, self._guard)
        # All have come to this call, so all have read what was there for the calls before.
        self._store.delete(self._read)
        self._read = [f"{call}/{self.rank}", *([f"{call}/count", f"{call}/all"] if self.rank == 0 else [])]
        return values

    def meet(self, name: str) -> None:
        """Wait until all ranks have come here, as long as it takes.

        Args:
            name: the same on all ranks; may be used again.
        """
        self.share(name, None)

    def agree(self, name: str, values: Mapping[str, Any]) -> None:
        """Make sure that all ranks have the same values.

        Args:
            name: what the values are, for the message.
            values: JSON values by the names that the message shall use.

        Raises:
            ValueError: on all ranks, the same: which values differ, and what they are on which ranks.
        """
        own = {key: json.dumps(value, sort_keys=True) for key, value in values.items()}
        # All of it is sent to everyone only when it differs.
        if len(set(self.share(f"{name}/all", hash_text(json.dumps(own, sort_keys=True))))) > 1:
            raise ValueError(_difference(name, self.share(f"{name}/each", own)))

    def first(self, name: str, function: Callable[[], Any], *, per_node: bool = False) -> Any:
        """Call a function on rank 0 and give its JSON result to all; the others wait as long as it takes.

        Args:
            name: the same on all ranks; may be used again.
            function: what to do; an error ends the job on all ranks.
            per_node: call it on the lowest rank of each node, and give each node its own result.
        """
        leader = self._leader if per_node else 0
        key = f"{self._call(name)}/{leader}"
        if self.rank == leader:
            self._store.set(key, function())
            self._read.append(key)
        return self._await([key])[0]

    # ---- any thread ----

    def mark(self, key: str, value: Any = None) -> None:
        """Tell all ranks that something is done; `value` is JSON."""
        self._store.set(f"mark/{key}", value)

    def wait(self, keys: Sequence[str]) -> list[Any]:
        """Wait until all keys are marked, by whichever rank; returns their values."""
        return self._await([f"mark/{key}" for key in keys])

    def forget(self, keys: Sequence[str]) -> None:
        """Remove marks that nobody will wait for any more."""
        self._store.delete([f"mark/{key}" for key in keys])

    # ---- the log of this rank ----

    def open_log(self, folder: Path) -> None:
        """From now on write this rank's log, `rank-00000.log`, in a folder; one process alone has none.

        Raises:
            ValueError: it cannot be written.
        """
        if self.size > 1:
            self._log.open(folder / f"rank-{self.rank:05}.log")

    def log(self, text: str) -> None:
        """Write lines into the log, if it is open; from any thread.

        Raises:
            ValueError: the disk is full.
        """
        self._log.write(text)

    # ---- the store ----

    def _call(self, name: str) -> str:
        """A key for this call."""
        self._calls[name] += 1
        return f"call/{name}/{self._calls[name]}"

    def _await(self, keys: Sequence[str]) -> list[Any]:
        await_keys(self._store, keys, self._guard)
        return self._store.get(keys)


def share(store: JsonStore, key: str, rank: int, size: int, value: Any, guard: Guard | None) -> list[Any]:
    """Every rank's value, by rank, under a key that is used once."""
    keys = [f"{key}/{other}" for other in range(size)]
    store.set(keys[rank], value)
    # The last one to come says so: one key to look for is cheaper than one of every rank.
    if store.add(f"{key}/count", 1) == size:
        store.set(f"{key}/all", True)
    await_keys(store, [f"{key}/all"], guard)
    return store.get(keys)


def await_keys(store: JsonStore, keys: Sequence[str], guard: Guard | None) -> None:
    """Wait until keys are set or a rank has failed."""
    pause = 0.001
    while True:
        # First, for after a failure the store may be about to go.
        if guard is not None:
            guard.check()
        if store.has(keys):
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def hash_text(text: str) -> str:
    """A digest, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(name: str, values: Sequence[Mapping[str, str]]) -> str:
    """What differs, as text; values are JSON, by rank."""
    parts = []
    for key in dict.fromkeys(key for own in values for key in own):
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(values):
            ranks.setdefault(own.get(key, "nothing"), []).append(rank)
        if len(ranks) > 1:
            kinds = sorted(ranks.items(), key=lambda kind: len(kind[1]))
            told = [f"{_ranks(members)} {_short(value)}" for value, members in kinds]
            parts.append(f"{key}: {', '.join(told)}")
    return f"the ranks do not agree on {name}: {'; '.join(parts)}; start all with the same files, settings and versions"


def _ranks(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]} has"
    shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"ranks {shown} have"


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
