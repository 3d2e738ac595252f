"""What the profiler saw: GPU activities, CUDA calls, operations with shapes, Python frames, steps, memory.

Read from the Chrome trace that `torch.profiler` exports, which has streams, correlation numbers and bytes in every
torch from 2.11 on. It names a Python function by its first line; the line that a call was made from comes from the
profiler's event tree (`call_lines`). Times are nanoseconds on one clock, host and GPU alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_STEP = re.compile(r"ProfilerStep#(\d+)")
_FUNCTION = re.compile(r"(.+)\((\d+)\): (.+)")
_ACTIVITIES: dict[str, Literal["kernel", "copy", "fill"]] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "fill",
}
_CALLS = ("cuda_runtime", "cuda_driver")
_CUDA = 1
"""The number of CUDA among torch's types of devices."""

CallLines = Mapping[int, tuple[str, int]]
"""File and line that a Python function was called from, by the nanosecond in which it started."""


@dataclass(frozen=True)
class Event:
    """Something with a beginning and an end, in ns."""

    name: str
    start: int
    end: int

    @property
    def duration(self) -> int:
        """In ns."""
        return self.end - self.start


@dataclass(frozen=True)
class Activity(Event):
    """What a GPU did."""

    kind: Literal["kernel", "copy", "fill"]
    stream: int
    correlation: int
    """The same number as of the call that launched it; 0 where that is not known."""
    bytes: int = 0
    """Of a copy or fill."""


@dataclass(frozen=True)
class HostEvent(Event):
    """What a host thread did."""

    thread: int


@dataclass(frozen=True)
class Call(HostEvent):
    """A call of CUDA's runtime or driver."""

    correlation: int


@dataclass(frozen=True)
class Op(HostEvent):
    """An operation of torch, or an autograd function, forward or backward."""

    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its inputs; () for what is no tensor. Empty where shapes were not recorded."""
    dtypes: tuple[str, ...] = ()
    """Of its inputs, as the trace spells them: "c10::BFloat16", "float", ..."""


@dataclass(frozen=True)
class Frame(HostEvent):
    """A call of a Python function, or of a built-in one (which has no file)."""

    file: str | None = None
    function: str = ""
    line: int = 0
    """Where the function begins."""
    caller: tuple[str, int] | None = None
    """File and line of the call."""


@dataclass(frozen=True)
class Mark(HostEvent):
    """A named part of the training loop."""


@dataclass(frozen=True)
class Memory:
    """The GPU allocator's counters after an allocation or a release, in bytes."""

    time: int
    thread: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Step(Event):
    """A step of the training loop on the host."""

    number: int


@dataclass(frozen=True)
class Recording:
    """Some steps, events in order of their start."""

    steps: tuple[Step, ...]
    main_thread: int
    activities: tuple[Activity, ...] = ()
    calls: tuple[Call, ...] = ()
    ops: tuple[Op, ...] = ()
    frames: tuple[Frame, ...] = ()
    marks: tuple[Mark, ...] = ()
    memory: tuple[Memory, ...] = ()
    launches: Mapping[int, Call] = field(default_factory=dict, repr=False)
    """The calls by correlation number."""

    def launch(self, activity: Activity) -> Call | None:
        """The call that launched an activity, if it was seen."""
        return self.launches.get(activity.correlation)

    def step_of(self, time: int) -> Step | None:
        """The host's step at a time."""
        return next((step for step in self.steps if step.start <= time < step.end), None)


def make_recording(
    steps: Sequence[Step],
    main_thread: int,
    *,
    activities: Iterable[Activity] = (),
    calls: Iterable[Call] = (),
    ops: Iterable[Op] = (),
    frames: Iterable[Frame] = (),
    marks: Iterable[Mark] = (),
    memory: Iterable[Memory] = (),
) -> Recording:
    """A recording of events in any order."""

    def ordered(events: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(sorted(events, key=lambda event: (event.start, -event.end)))

    calls = ordered(calls)
    return Recording(
        steps=ordered(steps),
        main_thread=main_thread,
        activities=ordered(activities),
        calls=calls,
        ops=ordered(ops),
        frames=ordered(frames),
        marks=ordered(marks),
        memory=tuple(sorted(memory, key=lambda event: event.time)),
        launches={call.correlation: call for call in calls if call.correlation},
    )


def read_trace(trace: Mapping[str, Any], lines: CallLines | None = None) -> Recording:
    """The recording in an exported trace.

    Args:
        trace: the JSON of `torch.profiler.profile.export_chrome_trace`.
        lines: see `call_lines`.

    Raises:
        ValueError: there is no step in it.
    """
    found = _Reader(trace.get("baseTimeNanoseconds", 0), lines or {})
    for event in trace["traceEvents"]:
        found.take(event)
    if not found.steps:
        raise ValueError("the profiler recorded no whole step; record more of them")
    return make_recording(
        found.steps,
        found.main_thread,
        activities=found.activities,
        calls=found.calls,
        ops=found.ops,
        frames=found.frames,
        marks=found.marks,
        memory=found.memory,
    )


class _Reader:
    """Sorts the events of a trace."""

    def __init__(self, base: int, lines: CallLines) -> None:
        self._base, self._lines = base, lines
        self.steps: list[Step] = []
        self.main_thread = 0
        self.activities: list[Activity] = []
        self.calls: list[Call] = []
        self.ops: list[Op] = []
        self.frames: list[Frame] = []
        self.marks: list[Mark] = []
        self.memory: list[Memory] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Sort in one event; those of no use are left out."""
        category, args = event.get("cat"), event.get("args", {})
        if event["ph"] == "i" and event["name"] == "[memory]" and args.get("Device Type") == _CUDA:
            start, counters = self._time(event["ts"]), (args["Total Allocated"], args["Total Reserved"])
            self.memory.append(Memory(start, int(event["tid"]), *counters))
        if event["ph"] != "X" or category is None:
            return
        start = self._time(event["ts"])
        span = (str(event["name"]), start, start + round(event["dur"] * 1000))
        if category in _ACTIVITIES:
            stream, correlation = int(args.get("stream", 0)), int(args.get("correlation", 0))
            kind, size = _ACTIVITIES[category], int(args.get("bytes", 0))
            self.activities.append(Activity(*span, kind=kind, stream=stream, correlation=correlation, bytes=size))
        elif category in _CALLS:
            thread, correlation = int(event["tid"]), int(args.get("correlation", 0))
            self.calls.append(Call(*span, thread=thread, correlation=correlation))
        elif category == "cpu_op":
            shapes = tuple(_shape(dims) for dims in args.get("Input Dims", ()))
            dtypes = tuple(args.get("Input type", ()))
            self.ops.append(Op(*span, thread=int(event["tid"]), shapes=shapes, dtypes=dtypes))
        elif category == "python_function":
            self.frames.append(self._frame(span, int(event["tid"])))
        elif category == "user_annotation":
            self._annotation(span, int(event["tid"]))

    def _time(self, microseconds: float) -> int:
        return self._base + round(microseconds * 1000)

    def _annotation(self, span: tuple[str, int, int], thread: int) -> None:
        step = _STEP.fullmatch(span[0])
        if step:
            self.steps.append(Step(*span, number=int(step[1])))
            self.main_thread = thread
        else:
            self.marks.append(Mark(*span, thread=thread))

    def _frame(self, span: tuple[str, int, int], thread: int) -> Frame:
        caller, place = self._lines.get(span[1]), _FUNCTION.fullmatch(span[0])
        if place is None:
            return Frame(*span, thread=thread, caller=caller)
        return Frame(*span, thread=thread, file=place[1], function=place[3], line=int(place[2]), caller=caller)


def _shape(dims: Any) -> tuple[int, ...]:
    """A list of tensors has a list for each: no shape of its own."""
    return tuple(dims) if all(isinstance(length, int) for length in dims) else ()


def call_lines(tree: Iterable[Any]) -> dict[int, tuple[str, int]]:
    """Where Python functions were called from.

    Args:
        tree: of `profile.profiler.kineto_results.experimental_event_tree()`, where `with_stack` was on.
    """
    lines, rest = {}, list(tree)
    while rest:
        event = rest.pop()
        rest.extend(event.children)
        if event.tag.name in ("PyCall", "PyCCall"):
            caller = event.extra_fields.caller
            lines[event.start_time_ns] = (caller.file_name, caller.line_number)
    return lines
