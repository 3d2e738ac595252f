"""How busy the GPU was, when it was idle, and why the next kernel came late.

Busy is the union of all kernels, copies and fills, on all streams. A step on the GPU is from its first kernel to the
first kernel of the next step (the last one: to the end of its last activity); which step an activity is of follows from
the host's call that launched it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from gapless.profiling.events import Activity, Call, HostEvent, Recording, Step
from gapless.profiling.host import Host, Place, in_mark, ops_of, place
from gapless.profiling.syncs import ALLOCATIONS, is_graph, is_pageable, is_sync
from gapless.training.trainer import NEXT_BATCH, READ_METRICS

LEAST_GAP = 5_000
"""A gap is longer than this, in ns; shorter ones are what a GPU takes between two kernels."""
Kind = Literal["data", "metrics", "synchronisation", "copy", "allocation", "call", "launch late", "device", "unknown"]
_SLACK = 2_000
"""By as much the clocks of host and GPU may differ, in ns."""
_METRICS = "reading the metrics of the step before"


@dataclass(frozen=True)
class GpuStep:
    """A step on the GPU, in ns."""

    number: int
    start: int
    end: int
    busy: int
    launches: int
    """Kernels, copies and fills."""

    @property
    def busy_percent(self) -> float:
        """Of the step's time."""
        return 100 * self.busy / (self.end - self.start) if self.end > self.start else 100.0


@dataclass(frozen=True)
class Gap:
    """A time in which the GPU did nothing."""

    start: int
    end: int
    before: Activity
    """What ended last."""
    after: Activity
    """What came next."""

    @property
    def duration(self) -> int:
        """In ns."""
        return self.end - self.start


@dataclass(frozen=True)
class Cause:
    """Why a gap was there."""

    kind: Kind
    text: str
    """What the host was doing."""
    place: Place | None = None
    """The line of ours that did it, where it is known."""


def union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The times that any of the spans covers, ascending, without touching one another."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_time(activities: Iterable[Activity], start: int, end: int) -> int:
    """The ns between start and end in which at least one of the activities ran."""
    clipped = ((max(event.start, start), min(event.end, end)) for event in activities)
    return sum(last - first for first, last in union(span for span in clipped if span[0] < span[1]))


def activities_by_step(recording: Recording) -> dict[Step, list[Activity]]:
    """The activities that each step launched; those launched outside of all steps are left out.

    One whose launch was not seen is of the step of what its stream did before it.
    """
    found: dict[Step, list[Activity]] = {step: [] for step in recording.steps}
    last: dict[int, Step | None] = {}
    for activity in recording.activities:  # ascending by start
        call = recording.launch(activity)
        step = recording.step_of(call.start) if call is not None else last.get(activity.stream)
        last[activity.stream] = step
        if step is not None:
            found[step].append(activity)
    return found


def gpu_steps(recording: Recording) -> tuple[GpuStep, ...]:
    """The steps as the GPU had them, without those that launched nothing."""
    groups = [(step, group) for step, group in activities_by_step(recording).items() if group]
    starts = [
        min(event.start for event in ([event for event in group if event.kind == "kernel"] or group))
        for _, group in groups
    ]
    if not groups:
        return ()
    ends = [*starts[1:], max(event.end for event in groups[-1][1])]
    return tuple(
        GpuStep(step.number, start, end, busy_time(recording.activities, start, end), len(group))
        for (step, group), start, end in zip(groups, starts, ends, strict=True)
    )


def find_gaps(recording: Recording, start: int, end: int, least: int = LEAST_GAP) -> list[Gap]:
    """The gaps over `least` ns between two activities, of which some part lies between start and end."""
    gaps, last = [], None
    for activity in recording.activities:  # ascending by start
        if last is not None and activity.start - last.end > least and last.end < end and activity.start > start:
            gaps.append(Gap(last.end, activity.start, last, activity))
        if last is None or activity.end > last.end:
            last = activity
    return gaps


class _Timeline:
    """The calls of a thread, ascending by start."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls, self._starts = calls, [call.start for call in calls]
        self._last_ends = list(accumulate((call.end for call in calls), max))

    def between(self, start: int, end: int) -> list[Call]:
        """Those that run at some time after start and before end."""
        found = []
        index = bisect_left(self._starts, end) - 1
        while index >= 0 and self._last_ends[index] > start:
            if self._calls[index].end > start:
                found.append(self._calls[index])
            index -= 1
        return found


class Causes:
    """Finds out why gaps are there."""

    def __init__(self, recording: Recording, places: Mapping[Call, Place] | None = None) -> None:
        """Take a recording.

        Args:
            recording: with the gaps.
            places: of its calls, where it has no Python frames (see `Lines`).
        """
        self._recording, self._host, self._places = recording, Host(recording), places or {}
        # What a graph launches has the number of that one call.
        self._launched = {
            activity.correlation: activity
            for activity in recording.activities
            if (call := recording.launch(activity)) is None or not is_graph(call)
        }
        by_thread: defaultdict[int, list[Call]] = defaultdict(list)
        for call in recording.calls:
            by_thread[call.thread].append(call)
        self._calls = {thread: _Timeline(calls) for thread, calls in by_thread.items()}

    def of(self, gap: Gap) -> Cause:
        """Why the activity after the gap began no earlier.

        If its launch was over when the gap began, the GPU itself made it wait. If the host was waiting for the GPU as
        the gap began, that has cost it its lead. Otherwise it is what took half or more of the time from the beginning
        of the gap to the launch: a CUDA call, the wait for a batch or for metrics; or else Python and torch on their
        way to the launch.
        """
        launch = self._recording.launch(gap.after)
        if launch is None:
            return Cause("unknown", "launched by a call that was not recorded")
        if launch.end <= gap.start:
            return Cause("device", "launched in time: the GPU made it wait", self._place(launch))
        return self._late(gap, launch)

    def _late(self, gap: Gap, launch: Call) -> Cause:
        late = min(launch.end, gap.end) - gap.start
        # The main thread's too, for which another may be waiting.
        threads = {launch.thread, self._recording.main_thread} & self._calls.keys()
        found = [call for each in threads for call in self._calls[each].between(gap.start - _SLACK, launch.end)]
        calls = sorted(found, key=lambda call: call.start)
        held = [call for call in calls if call.start <= gap.start and self._waits(call)]
        if held:
            return self._call(held[-1])
        # A launch that begins within the gap is late itself, and says nothing of why.
        others = [call for call in calls if call is not launch or call.start < gap.start]
        longest = max(others, key=lambda call: _overlap(call, gap.start, launch.end), default=None)
        if longest is not None and 2 * _overlap(longest, gap.start, launch.end) >= late:
            return self._call(longest)
        if 2 * self._marked(NEXT_BATCH, gap.start, launch.end) >= late:
            return Cause("data", "waiting for the data", self._place(launch))
        if 2 * self._marked(READ_METRICS, gap.start, launch.end) >= late:
            return Cause("metrics", _METRICS, self._place(launch))
        ops = ops_of(self._host.around(launch))
        doing = f"on the way to {ops[-1].name}" if ops else f"on the way to {launch.name}"
        return Cause("launch late", doing, self._place(launch))

    def _waits(self, call: Call) -> bool:
        return is_sync(call) or is_pageable(self._launched.get(call.correlation))

    def _call(self, call: Call) -> Cause:
        where, launched = self._place(call), self._launched.get(call.correlation)
        if in_mark(self._host.around(call), READ_METRICS):
            return Cause("metrics", _METRICS, where)
        if is_pageable(launched) or (launched is not None and launched.kind == "copy"):
            return Cause("copy", f"waiting for a copy: {launched.name if launched else call.name}", where)
        if is_sync(call):
            return Cause("synchronisation", f"after a synchronisation: {call.name}", where)
        if call.name in ALLOCATIONS:
            return Cause("allocation", f"in {call.name}", where)
        return Cause("call", f"in {call.name}", where)

    def _marked(self, name: str, start: int, end: int) -> int:
        """The ns between two times that lie in marks of a name."""
        return sum(_overlap(mark, start, end) for mark in self._recording.marks if mark.name == name)

    def _place(self, call: Call) -> Place | None:
        return self._places.get(call) or place(self._host.around(call))


def _overlap(event: HostEvent, start: int, end: int) -> int:
    return max(0, min(event.end, end) - max(event.start, start))


def sum_by_cause(found: Sequence[tuple[Gap, Cause]]) -> list[tuple[Cause, int, int]]:
    """Cause, number of gaps and their ns, the longest in sum first."""
    sums: defaultdict[Cause, list[int]] = defaultdict(list)
    for gap, cause in found:
        sums[cause].append(gap.duration)
    rows = [(cause, len(times), sum(times)) for cause, times in sums.items()]
    return sorted(rows, key=lambda row: -row[2])
