"""What a host thread was doing at a time: the operations, Python frames, marks and calls that cover it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gapless.profiling.events import Call, Frame, HostEvent, Mark, Op, Recording

_OURS = re.compile(r"(?:.*/)?(gapless/(?!profiling/).+\.py)")
_LAUNCHERS = {
    ("gapless/kernels/runtime.py", "launch"),
    ("gapless/training/graph.py", "replay"),
    ("gapless/training/graph.py", "_run"),
}
"""Every kernel and every graph of ours is launched there: the line that called it says more."""


class Nest:
    """Events of one thread, which lie one in another."""

    def __init__(self, events: Iterable[HostEvent]) -> None:
        """Sort the events in; of two that begin together the longer is the outer one."""
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.parents: list[int] = []
        open_events: list[int] = []
        for index, event in enumerate(self.events):
            while open_events and self.events[open_events[-1]].end <= event.start:
                open_events.pop()
            self.parents.append(open_events[-1] if open_events else -1)
            open_events.append(index)
        self._starts = [event.start for event in self.events]

    def at(self, time: int) -> list[HostEvent]:
        """The events that cover a time, both ends included, outermost first."""
        index = bisect_right(self._starts, time) - 1
        found = []
        while index >= 0:
            if self.events[index].end >= time:
                found.append(self.events[index])
            index = self.parents[index]
        return found[::-1]

    def within(self, index: int) -> list[HostEvent]:
        """An event and what it lies in, outermost first."""
        found = []
        while index >= 0:
            found.append(self.events[index])
            index = self.parents[index]
        return found[::-1]

    def children_time(self) -> list[int]:
        """Of each event, the ns that those directly in it take."""
        times = [0] * len(self.events)
        for event, parent in zip(self.events, self.parents, strict=True):
            if parent >= 0:
                times[parent] += event.duration
        return times


class Host:
    """All threads of a recording."""

    def __init__(self, recording: Recording) -> None:
        """Sort the recording's host events by thread."""
        threads: defaultdict[int, list[HostEvent]] = defaultdict(list)
        for events in (recording.ops, recording.frames, recording.marks, recording.calls):
            for event in events:
                threads[event.thread].append(event)
        self.nests = {thread: Nest(events) for thread, events in threads.items()}

    def at(self, thread: int, time: int) -> list[HostEvent]:
        """What covers a time in a thread, outermost first."""
        nest = self.nests.get(thread)
        return [] if nest is None else nest.at(time)

    def around(self, event: HostEvent) -> list[HostEvent]:
        """What an event of a thread lies in, outermost first, without the event itself."""
        return [other for other in self.at(event.thread, event.start) if other is not event and other.end >= event.end]


@dataclass(frozen=True)
class Place:
    """A place in our source."""

    text: str
    """As in "gapless/kernels/lora.py:290 in forward"."""
    outer: tuple[str, ...] = field(default=(), compare=False)
    """The places that called it, innermost first."""


def our_file(file: str | None) -> str | None:
    """The path of a file of ours from `gapless/` on; None for others, and for those of the profiler itself."""
    match = _OURS.fullmatch(file or "")
    return match[1] if match else None


def place(stack: Sequence[HostEvent]) -> Place | None:
    """The innermost place of ours in what covers a time, if Python frames were recorded and one is ours."""
    frames = [event for event in stack if isinstance(event, Frame)]
    places = []
    for frame, inner in zip(frames, [*frames[1:], None], strict=False):
        file = our_file(frame.file)
        if file is None or (file, frame.function) in _LAUNCHERS:
            continue
        caller = inner.caller if inner is not None else None
        line = caller[1] if caller is not None and caller[0] == frame.file else frame.line
        places.append(f"{file}:{line} in {frame.function}")
    return Place(places[-1], tuple(places[-2::-1])) if places else None


def ops_of(stack: Iterable[HostEvent]) -> list[Op]:
    """The operations among what covers a time."""
    return [event for event in stack if isinstance(event, Op)]


def in_mark(stack: Iterable[HostEvent], name: str) -> bool:
    """Whether a mark of that name is among what covers a time."""
    return any(isinstance(event, Mark) and event.name == name for event in stack)


class Lines:
    """Places for a recording without Python frames, from one of other steps that has them.

    The n-th launch of a kernel by a thread in a step, and the n-th call of a kind that launches nothing, are made by
    the same line in each step. Tracing Python slows the host, so that gaps are to be measured without.
    """

    def __init__(self, traced: Recording) -> None:
        """Look up each call of the traced recording."""
        host = Host(traced)
        self._places: dict[_Key, Place] = {}
        for call, key in _keys(traced).items():
            found = place(host.around(call))
            if found is not None:
                self._places.setdefault(key, found)

    def of(self, recording: Recording) -> Mapping[Call, Place]:
        """The place of each call for which one is known."""
        return {call: self._places[key] for call, key in _keys(recording).items() if key in self._places}


_Key = tuple[int, str, int]
"""Of a call: its thread, the name of what it launches, or else its own, and how many of these came before."""


def _keys(recording: Recording) -> dict[Call, _Key]:
    """What each call is in its step."""
    launched = {activity.correlation: activity.name for activity in recording.activities}
    keys: dict[Call, _Key] = {}
    counts: Counter[tuple[int, str]] = Counter()
    step = None
    for call in recording.calls:
        now = recording.step_of(call.start)
        if now is None:
            continue
        if now is not step:
            step, counts = now, Counter()
        name = launched.get(call.correlation, call.name)
        keys[call] = (call.thread, name, counts[call.thread, name])
        counts[call.thread, name] += 1
    return keys
