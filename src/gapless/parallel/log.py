"""The log of one rank: lines with the time, in a file of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TextIO


class RankLog:
    """Appends lines to a file, once it is open; each is there when the call returns, whatever happens then.

    Any thread may write.
    """

    def __init__(self) -> None:
        """Not open yet: what is written goes nowhere."""
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def open(self, path: Path) -> None:
        """Open or make a file and its folder.

        Raises:
            ValueError: it cannot be written.
        """
        self.close()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from error

    def write(self, text: str) -> None:
        """Append the lines of a text.

        Raises:
            ValueError: the disk is full.
        """
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write("".join(f"{now}  {line}\n" for line in text.splitlines()))
                self._file.flush()
            except OSError as error:
                raise ValueError(f"cannot write {self._file.name}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file, if one is open."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
