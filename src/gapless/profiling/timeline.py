"""The page with the timeline: one file, without anything from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from gapless.profiling.events import Activity, Event, Frame, HostEvent, Recording
from gapless.profiling.gaps import Cause, Gap
from gapless.profiling.host import Host, Nest, ops_of, our_file
from gapless.profiling.kinds import kind_of
from gapless.profiling.record import Recorded
from gapless.profiling.summary import Analysis

_MOST_EVENTS = 40_000
"""Events of the host in a recording; of more, the shortest are left out, and the page says so."""
_DEPTH = 24
"""Rows of a host thread."""


def page(recorded: Recorded, analysis: Analysis) -> str:
    """The HTML of a profile."""
    recordings = [
        recording_data("measured", recorded.measured, analysis.gaps),
        recording_data("traced, with Python frames", recorded.traced, []),
    ]
    if recorded.launched is not None:
        recordings.append(recording_data("launched kernel by kernel, traced", recorded.launched, []))
    data = {"report": analysis.report, "recordings": recordings}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # Within a script element nothing may look like its end, or like the start of a comment.
    text = text.replace("<", "\\u003c")
    template = files("gapless.profiling").joinpath("timeline.html").read_text(encoding="utf-8")
    return template.replace("/*DATA*/", text)


def recording_data(name: str, recording: Recording, gaps: Sequence[tuple[Gap, Cause]]) -> dict[str, Any]:
    """What the page draws of a recording.

    Rows hold events as [start, duration, index of the name, index of the kind, text], in microseconds from the first
    step on.
    """
    names = _Names()
    zero = recording.steps[0].start
    last = max([recording.steps[-1].end, *(event.end for event in recording.activities)])
    host = Host(recording)

    def cells(event: Event, kind: str, text: str = "") -> list[Any]:
        shown = event.name if not isinstance(event, Frame) else _frame_name(event)
        return [(event.start - zero) / 1000, event.duration / 1000, names.index(shown), names.index(kind), text]

    rows = []
    for stream in sorted({event.stream for event in recording.activities}):
        on_it = [event for event in recording.activities if event.stream == stream and event.end > zero]
        rows.append(
            {"name": f"GPU stream {stream}", "events": [cells(event, _kind(event, recording, host)) for event in on_it]}
        )
    if gaps:
        rows.append({"name": "GPU idle", "events": [_gap_cells(gap, cause, zero, names) for gap, cause in gaps]})
    threads, left_out = _threads(recording, host, zero, last)
    for thread, depths in threads.items():
        title = "main thread" if thread == recording.main_thread else f"thread {thread}"
        for depth, events in enumerate(depths):
            rows.append(
                {
                    "name": title if depth == 0 else "",
                    "events": [cells(event, _host_kind(event), _text(event)) for event in events],
                }
            )
    return {
        "name": name,
        "length": (last - zero) / 1000,
        "steps": [(step.start - zero) / 1000 for step in recording.steps],
        "rows": rows,
        "names": names.found,
        "left_out": left_out,
        "memory": [[(event.time - zero) / 1000, event.allocated, event.reserved] for event in _thinned(recording)],
    }


class _Names:
    """Strings by number, each kept once."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._numbers: dict[str, int] = {}

    def index(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.found)
            self.found.append(name)
        return self._numbers[name]


def _kind(activity: Activity, recording: Recording, host: Host) -> str:
    launch = recording.launch(activity)
    return kind_of(activity, ops_of(host.around(launch)) if launch is not None else [])


def _gap_cells(gap: Gap, cause: Cause, zero: int, names: _Names) -> list[Any]:
    text = f"{cause.text}\nafter {gap.before.name}\nbefore {gap.after.name}"
    if cause.place is not None:
        text += "".join(f"\n  {line}" for line in (cause.place.text, *cause.place.outer))
    return [
        (gap.start - zero) / 1000,
        gap.duration / 1000,
        names.index(f"idle: {cause.kind}"),
        names.index("idle"),
        text,
    ]


def _host_kind(event: HostEvent) -> str:
    return {"Op": "operation", "Call": "CUDA call", "Mark": "mark", "Frame": "Python"}[type(event).__name__]


def _frame_name(frame: Frame) -> str:
    file = our_file(frame.file) or frame.file
    return frame.name if file is None else f"{frame.function} ({file}:{frame.line})"


def _text(event: HostEvent) -> str:
    caller = event.caller if isinstance(event, Frame) else None
    return f"called at {caller[0]}:{caller[1]}" if caller is not None else ""


def _threads(recording: Recording, host: Host, zero: int, last: int) -> tuple[Mapping[int, list[list[HostEvent]]], int]:
    """Of each thread its events by depth, the main thread first, and how many are left out."""
    kept = {
        thread: [event for event in nest.events if event.end > zero and event.start < last and _shown(event)]
        for thread, nest in host.nests.items()
    }
    durations = sorted((event.duration for events in kept.values() for event in events), reverse=True)
    least = durations[_MOST_EVENTS] if len(durations) > _MOST_EVENTS else -1
    found = {}
    count = 0
    for thread in sorted(kept, key=lambda thread: thread != recording.main_thread):
        depths = _by_depth(event for event in kept[thread] if event.duration > least)
        count += sum(map(len, depths))
        if depths:
            found[thread] = depths
    return found, len(durations) - count


def _shown(event: HostEvent) -> bool:
    """Of Python frames only those of ours."""
    return not isinstance(event, Frame) or our_file(event.file) is not None


def _by_depth(events: Iterable[HostEvent]) -> list[list[HostEvent]]:
    nest, depths, depth_of = Nest(events), [], []
    for event, parent in zip(nest.events, nest.parents, strict=True):
        depth = 0 if parent < 0 else depth_of[parent] + 1
        depth_of.append(depth)
        if depth < _DEPTH:
            while len(depths) <= depth:
                depths.append([])
            depths[depth].append(event)
    return depths


def _thinned(recording: Recording, most: int = 4000) -> list[Any]:
    """The memory's counters, of many the highest of each stretch."""
    start, end = recording.steps[0].start, recording.steps[-1].end
    events = [event for event in recording.memory if start <= event.time < end]
    size = -(-len(events) // most) if events else 1
    return [max(events[at : at + size], key=lambda event: event.allocated) for at in range(0, len(events), size)]
