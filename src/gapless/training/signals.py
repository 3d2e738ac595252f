"""Ctrl-C, SIGTERM and a closed terminal as a request: the running step is finished and saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """While entered, the first signal is only noted; a second Ctrl-C interrupts as usual.

    In a job of many ranks a second Ctrl-C is only noted too: launchers send what they get to all ranks, who may have
    got it already. Under nohup SIGHUP stays ignored. After SIGHUP what would go to the closed terminal goes nowhere.

    Handlers belong to the main thread: in another one nothing is changed.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        """Of a job's many ranks the first says that a signal came."""
        self._rank, self._ranks = rank, ranks
        self.received: str | None = None
        """Name of the signal, once there was one."""
        self._previous: dict[signal.Signals, object] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            noted = [number for number in _SIGNALS if not _is_nohup(number)]
            self._previous = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyrefly: ignore

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT and self._ranks == 1:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        if number == signal.SIGHUP:
            for terminal in self._terminals:
                os.dup2(os.open(os.devnull, os.O_WRONLY), terminal)
        if self._rank > 0:
            return
        abort = "; press Ctrl-C again to abort" if self._ranks == 1 else ""
        # Not print: the signal may have come in the middle of one, and streams cannot be entered twice.
        with contextlib.suppress(OSError, ValueError):
            text = f"\n{self.received}: finishing this step, then saving{abort}\n"
            os.write(sys.stderr.fileno(), text.encode())


def _is_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
