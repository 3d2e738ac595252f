"""Ctrl-C and SIGTERM as a request: the running step is finished and saved."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first signal is only noted; a second Ctrl-C interrupts as usual.

    Handlers belong to the main thread: in another one nothing is changed.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal, once there was one."""
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyrefly: ignore

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        # Not print: the signal may have come in the middle of one, and streams cannot be entered twice.
        with contextlib.suppress(OSError, ValueError):
            text = f"\n{self.received}: finishing this step, then saving; press Ctrl-C again to abort\n"
            os.write(sys.stderr.fileno(), text.encode())
