"""Which processes run on which machine, and whether they still do."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A process of the job.

    Attributes:
        node: equal for processes that see each other's process numbers: one machine, one container.
        number: its process number there.
        started: when it did, in the machine's ticks, so that a number given anew is told apart.
    """

    node: str
    number: int
    started: str

    @classmethod
    def here(cls) -> Process:
        """This process.

        What a sandbox or a system without /proc does not tell is left out. Where that is `started`, as on macOS, nobody
        sees the process end: it is missed only by its signs of life.
        """
        node, state = [socket.gethostname()], None
        with suppress(OSError):
            node.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        with suppress(OSError):
            node.append(os.readlink("/proc/self/ns/pid"))
        with suppress(PermissionError):
            state = _state(os.getpid())
        return cls(" ".join(node), os.getpid(), state[1] if state else "")

    def is_gone(self) -> bool:
        """Whether the process, of this node, has ended; False where that cannot be told."""
        if not self.started:
            return False
        state = _state(self.number)
        return state is None or state[0] in "ZX" or state[1] != self.started


def _state(number: int) -> tuple[str, str] | None:
    """State letter and start of a process, as Linux tells them (man 5 proc_pid_stat); None if it is not there."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
