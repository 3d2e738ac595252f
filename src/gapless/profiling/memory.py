"""The GPU's memory over a step: what torch's allocator had given out, and where in the step it was most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gapless.profiling.events import Frame, HostEvent, Mark, Recording
from gapless.profiling.host import Host, our_file
from gapless.training.trainer import NEXT_BATCH

# FSDP2 makes each module one of a class of its own.
_LAYER, _DECODER = (re.compile(rf"nn\.Module: (?:FSDP)?{name}_(\d+)") for name in ("DecoderLayer", "Decoder"))
_PHASES = (
    (("gapless/training/optim.py", "step"), "optimizer"),
    (("gapless/training/optim.py", "squares"), "optimizer"),
    (("gapless/models/decoder.py", "head_loss"), "head and loss"),
)


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    """forward, head and loss, backward, optimizer, next batch, or rest."""
    peak: int
    """Most bytes allocated in it."""
    place: str
    """Where that was; of a forward the layer."""
    last: int
    """Bytes allocated at its end."""


def phases(recording: Recording, start: int, end: int) -> list[Phase]:
    """The parts of a step that allocated or released memory, in the order in which they first did."""
    host = Host(recording)
    found: dict[str, Phase] = {}
    for event in recording.memory:
        if not start <= event.time < end:
            continue
        place = where(host.at(recording.main_thread, event.time))
        name = place.partition(" of ")[0]
        old = found.get(name)
        if old is None or event.allocated > old.peak:
            found[name] = Phase(name, event.allocated, place, event.allocated)
        else:
            found[name] = Phase(name, old.peak, old.place, event.allocated)
    return list(found.values())


def where(stack: Sequence[HostEvent]) -> str:
    """What part of a step the main thread is in."""
    place = "rest"
    for event in stack:
        if isinstance(event, Mark) and event.name == NEXT_BATCH:
            return "next batch"
        if not isinstance(event, Frame):
            continue
        if "run_backward" in event.name:
            return "backward"
        layer = _LAYER.fullmatch(event.name)
        if layer:
            return f"forward of layer {layer[1]}"
        if _DECODER.fullmatch(event.name):
            place = "forward"
        place = next((name for key, name in _PHASES if key == (our_file(event.file), event.function)), place)
    return place
