"""Failures: the rank that fails says why, all others end without a traceback of their own.

The first failure is put on record in the store; whoever comes later is a consequence, or fails alike (a mistake that
all ranks find) and keeps its error. A rank that was killed says nothing: the ranks on its machine miss its process
within a second, those on others miss its heartbeat. A thread in every rank looks for all this, and ends a process that
does not end by itself, since it is stuck in a collective for instance.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

import torch

from gapless.errors import user_message
from gapless.parallel.log import RankLog
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore, StoreGoneError

POLL = 0.5
"""Seconds between two looks of the watching thread."""
GRACE = 10.0
"""Seconds that a process has to end by itself once it knows of a failure."""
PATIENCE = 2.0
"""Seconds that an error which may follow from a failure elsewhere waits for that failure to be on record."""
SILENCE = 30.0
"""Fewest seconds without a sign of life after which a rank on another machine is taken for dead."""
ALIKE = 1.0
"""Seconds after which a rank that was told of a user's mistake says so, unless it has found the same one itself."""
READING = 3.0
"""Seconds that the rank with the failure stays for the others to read why."""
LOST = "lost"
"""Kind of the failure of a process that ended without a word."""
NOTE = "all ranks stop because of this"
"""Added to an error that was told on stderr."""
_BRIEF = (KeyboardInterrupt, SystemExit, BrokenPipeError)
"""Errors that need no traceback on stderr: who stopped it knows, or the reader of stdout has left."""

_RECORD, _TOLD, _READERS, _LEAVING = "failure", "failure/told", "failure/readers", "failure/leaving"


class OtherRankFailed(SystemExit):  # noqa: N818 - a request to exit, not an error of this rank
    """Ends this process because another rank has failed, which one line on stderr says.

    A SystemExit, so that nothing else is printed where it is not caught, and no `except Exception` of a callback holds
    it up.

    Attributes:
        rank: the one that failed.
        message: what failed there, in one line.
    """

    def __init__(self, rank: int, message: str) -> None:
        """Because of a rank."""
        super().__init__(1)
        self.rank, self.message = rank, message

    def __str__(self) -> str:
        return f"stopped because rank {self.rank} failed: {self.message}"


@dataclass(frozen=True)
class Failure:
    """What is on record.

    Attributes:
        rank: the one that failed.
        kind: name of the error's class, or `LOST`.
        message: one line.
        code: exit code of the process.
    """

    rank: int
    kind: str
    message: str
    code: int = 1

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure that an error of this rank is."""
        kind, told, code = type(error).__name__, user_message(error), exit_code(error)
        if isinstance(error, KeyboardInterrupt):
            return cls(rank, kind, "interrupted", code)
        if isinstance(error, SystemExit):
            return cls(rank, kind, f"exit({error.code!r}) was called", code)
        line = (told or str(error)).strip().partition("\n")[0]
        return cls(rank, kind, line or kind if told else f"{kind}: {line}" if line else kind, code)

    def is_alike(self, other: Failure) -> bool:
        """Whether two ranks failed in the same way."""
        return (self.kind, self.message) == (other.kind, other.message)


class Watch:
    """While entered, this process takes part in the failures of the job.

    Attributes:
        failure: the one on record, once this rank knows.
    """

    def __init__(
        self,
        store: JsonStore,
        rank: int,
        processes: Sequence[Process],
        *,
        timeout: float,
        log: RankLog,
    ) -> None:
        """Watch for a rank.

        Args:
            store: of the job.
            rank: of this process.
            processes: of all ranks.
            timeout: seconds after which a process of another machine that gave no sign is taken for dead; at least
                `SILENCE`, for a healthy one may be held up.
            log: of this rank.
        """
        self.failure: Failure | None = None
        self._own: Failure | None = None
        self._store, self._rank, self._size, self._log = store, rank, len(processes), log
        self._neighbours = {
            other: process
            for other, process in enumerate(processes)
            if other != rank and process.node == processes[rank].node
        }
        self._heart = _Heart(store, rank, (rank + 1) % self._size, timeout)
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gapless-watch", daemon=True)

    def check(self) -> None:
        """Raise `OtherRankFailed` if another rank has failed, as far as is known here."""
        if self.failure is not None:
            raise OtherRankFailed(self.failure.rank, self.failure.message)

    def done(self) -> None:
        """Say that this process has done its part: that it ends from now on is no failure."""
        self._store.set(f"done/{self._rank}", True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._leave()
            return
        # Whatever happens below, above all with a store on a machine that does not answer, this process ends.
        last = threading.Timer(GRACE, self._end)
        last.daemon = True
        last.start()
        try:
            instead = self._tell(error)
        finally:
            self._stop()
            last.cancel()
        if instead is not None:
            raise instead from None

    # ---- the end of this rank ----

    def _leave(self) -> None:
        """End well: the rank that serves the store goes last."""
        self._stop()
        with suppress(StoreGoneError):
            self._store.add("left", 1)
            if self._rank == 0:
                self._wait_for(lambda: self._store.add("left", 0) == self._size, GRACE)

    def _stop(self) -> None:
        self._left.set()
        self._thread.join(GRACE)  # it may be in a call to a store that does not answer

    def _tell(self, error: BaseException) -> OtherRankFailed | None:
        """Report an error of this rank, or find whose failure it follows from; returns what to raise in its place."""
        own = Failure.of(self._rank, error)
        if not isinstance(error, OtherRankFailed):
            self._log_line(_text(error))  # first: the store may not answer
        self._own = own
        if _may_follow(error):
            self._wait_for(self._look, PATIENCE)
        if self.failure is None:
            self._record(own)
        assert self.failure is not None
        if self.failure == own:
            self._report(error)
        else:
            self._follow()
        if self.failure.is_alike(own):
            error.add_note(NOTE)
            return None
        return OtherRankFailed(self.failure.rank, self.failure.message)

    def _report(self, error: BaseException) -> None:
        """Tell this rank's error, and stay until the others know of it."""
        self._print(Failure.of(self._rank, error).message if isinstance(error, _BRIEF) else _text(error))
        with suppress(StoreGoneError):
            self._store.set(_TOLD, True)
            self._wait_for(self._all_know, READING)
            self._store.set(_LEAVING, True)

    def _follow(self) -> None:
        """End after the rank that failed, so that a launcher blames that one."""
        with self._lock, suppress(StoreGoneError):  # the other thread may be about to print
            assert self.failure is not None
            if self._rank == 0:  # the store goes with this process
                self._wait_for(self._all_know, READING)
            if self.failure.rank != 0 and self.failure.kind != LOST:
                self._wait_for(lambda: self._store.has([_LEAVING]), READING)
        time.sleep(0.2)

    def _all_know(self) -> bool:
        return self._store.add(_READERS, 0) >= self._size - 1

    def _print(self, text: str) -> None:
        """Write lines, marked with the rank, at once."""
        with suppress(OSError):  # the reader left
            sys.stderr.write("".join(f"rank {self._rank}: {line}\n" for line in text.splitlines()))
            sys.stderr.flush()

    def _log_line(self, text: str) -> None:
        with suppress(ValueError):  # the disk is full
            self._log.write(text)

    @staticmethod
    def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
        """Wait for a condition, but no longer than this."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    # ---- the failures of others ----

    def _run(self) -> None:
        """What the thread does."""
        while not self._look():  # the first look, at the start, connects to the store
            if self._left.wait(POLL):
                break
        if not self._left.wait(GRACE):
            self._end()

    def _end(self) -> None:
        """End this process at once."""
        if self.failure is None and self._own is not None:  # the store has not answered
            self._print(self._own.message)
        self._log_line(f"this process did not end within {GRACE:g} s of that, and was ended")
        os._exit(1)

    def _look(self) -> bool:
        """Whether a failure is known, after a look for one."""
        if self.failure is not None:
            return True
        try:
            if self._store.has([_RECORD]):
                self._learn(Failure(**self._store.get([_RECORD])[0]))
            elif (lost := self._lost()) is not None:
                self._record(lost)
        except StoreGoneError:
            self._learn(Failure(0, LOST, "the store of the job is gone: rank 0 was killed, or its launcher"))
        return self.failure is not None

    def _lost(self) -> Failure | None:
        """A rank that ended without a word."""
        for other, process in self._neighbours.items():
            if process.is_gone() and not self._store.has([f"done/{other}"]):
                text = f"its process ({process.number}) ended without a word: killed, or out of memory"
                return Failure(other, LOST, text)
        silent = self._heart.beat()
        if silent is None or self._store.has([f"done/{silent}"]):
            return None
        return Failure(silent, LOST, f"it gave no sign of life for {self._heart.timeout:g} s")

    def _record(self, failure: Failure) -> None:
        """Put a failure on record unless there is one."""
        try:
            first = Failure(**self._store.set_first(_RECORD, asdict(failure)))
        except StoreGoneError:
            first = failure
        self._learn(first)

    def _learn(self, failure: Failure) -> None:
        """Take note of a failure, and say so unless it is this rank's, or alike: what all ranks find is told once."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            if failure == self._own:
                return
            with suppress(StoreGoneError):
                if failure.kind != LOST:
                    self._wait_for(lambda: self._store.has([_TOLD]), PATIENCE)
            if failure.code == 2:  # its rank may not be the only one to find it
                self._wait_for(lambda: self._own is not None, ALIKE)
            line = str(OtherRankFailed(failure.rank, failure.message))
            if self._own is None or not failure.is_alike(self._own):
                self._print(line)
            self._log_line(line)
            with suppress(StoreGoneError):
                self._store.add(_READERS, 1)


class _Heart:
    """Gives signs of life, and misses those of the next rank, after `timeout` seconds."""

    def __init__(self, store: JsonStore, rank: int, other: int, timeout: float) -> None:
        self._store, self._rank, self._other = store, rank, other
        self.timeout = max(timeout, SILENCE)
        self._beaten = self._heard = time.monotonic()
        self._count = 0

    def beat(self) -> int | None:
        """Called often; returns the rank that is silent, if it is."""
        now = time.monotonic()
        if now - self._beaten < min(5.0, self.timeout / 10):
            return None
        # This process may have been held up itself, with the others waiting in vain for its part.
        late = now - self._beaten > self.timeout / 2
        self._beaten = now
        self._store.add(f"alive/{self._rank}", 1)
        count = self._store.add(f"alive/{self._other}", 0)
        if count != self._count or late:
            self._count, self._heard = count, now
        return self._other if now - self._heard > self.timeout else None


def _may_follow(error: BaseException) -> bool:
    """Whether an error may come of a failure elsewhere: a collective's or the store's is a RuntimeError."""
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)


def _text(error: BaseException) -> str:
    """All there is to say of an error."""
    told = user_message(error)
    return f"error: {told}" if told else "".join(traceback.format_exception(error)).rstrip()


def exit_code(error: BaseException) -> int:
    """With which a command ends because of an error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 2 if user_message(error) else 1


class CommandExit:
    """Ends the process of a command whose job has failed: what there is to say was said on stderr.

    Without the interpreter's own end, in which the destructors of a broken process group may hang.
    """

    def __enter__(self) -> CommandExit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, OtherRankFailed) or (error is not None and NOTE in getattr(error, "__notes__", ())):
            _exit(exit_code(error))
        return False


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
