"""Batches on their way to a device, on a stream of their own: a copy runs while the steps before it train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from gapless.batch import PackedBatch


@dataclass(frozen=True)
class Sent:
    """Batches whose copies were queued."""

    batches: list[PackedBatch]
    copied: torch.cuda.Event | None
    """Behind the copies; None where there is no stream."""

    def take(self) -> list[PackedBatch]:
        """The batches, for what the current stream is given from now on: that stream waits for them, the host does not.

        Their memory is used again when that stream is done with all it was given until they were let go of.
        """
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batches[0].buffer.device)
            stream.wait_event(self.copied)
            for batch in self.batches:
                batch.buffer.record_stream(stream)
        return self.batches


class Transfer:
    """A way to a device; any thread may use it."""

    def __init__(self, device: torch.device | str) -> None:
        """Open it."""
        self._device = torch.device(device)
        self._stream = _stream(self._device) if self._device.type == "cuda" else None

    def start(self, batches: Sequence[PackedBatch]) -> Sent:
        """Queue the copies of batches on the host."""
        if self._stream is None:
            return Sent([batch.to(self._device) for batch in batches], None)
        with torch.cuda.stream(self._stream):
            sent = [batch.pin_memory().to(self._device) for batch in batches]
            copied = torch.cuda.Event()
            copied.record(self._stream)
            return Sent(sent, copied)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all transfers: memory that batches leave serves the next ones of its stream alone."""
    return torch.cuda.Stream(device)
