"""The numbers of a profile: what report.json holds. Times are in the units that the names say."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from gapless.kernels.runtime import triton
from gapless.profiling.events import Op, Recording
from gapless.profiling.gaps import (
    Cause,
    Causes,
    Gap,
    activities_by_step,
    busy_time,
    find_gaps,
    gpu_steps,
    sum_by_cause,
)
from gapless.profiling.host import Host, Lines, Nest, Place, ops_of
from gapless.profiling.kinds import KERNELS, Kind, kind_of, kind_of_ops
from gapless.profiling.limits import bound
from gapless.profiling.memory import phases
from gapless.profiling.record import Recorded
from gapless.profiling.syncs import WORKER, find_syncs

FORMAT_VERSION = 1
_GAPS, _KERNELS, _OPS = 200, 40, 40
"""Longest gaps, kernels and operations that are listed one by one; sums are of all."""
_FORWARDS = {name for name, kind in KERNELS.items() if kind == "attention forward"}
"""The kernels of which there is one in an attention's forward."""


@dataclass
class Analysis:
    """The numbers, and what a timeline shows besides."""

    report: dict[str, Any]
    gaps: list[tuple[Gap, Cause]] = field(default_factory=list)
    places: dict[Any, Place] = field(default_factory=dict)


def analyse(recorded: Recorded, name: str) -> Analysis:
    """Everything about recorded steps.

    Args:
        recorded: what `record` gave.
        name: of the run.
    """
    measured, traced, launched = recorded.measured, recorded.traced, recorded.launched
    places = dict(Lines(traced).of(measured))
    report: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "run": name,
        "rank": recorded.rank,
        "device": recorded.device,
        "versions": versions(),
        "steps": {
            "first": recorded.first_step,
            "recorded": len(measured.steps),
            "micro_batches": recorded.micro_batches,
            "tokens": recorded.tokens,
            "plain_ms": [1000 * seconds for seconds in recorded.plain],
            "measured_ms": [step.duration / 1e6 for step in measured.steps],
            "traced_ms": [step.duration / 1e6 for step in traced.steps],
            # Where steps are CUDA graphs, and kinds, kernels and memory are those of steps launched kernel by kernel.
            "launched_ms": [step.duration / 1e6 for step in launched.steps] if launched is not None else None,
            "graphs_recorded": recorded.graphs if launched is not None else None,
        },
        "rates": None,
        "gpu": None,
        "kinds": None,
        "kernels": None,
        "memory": None,
        "syncs": [],
        "host": host_ops(measured),
    }
    found: list[tuple[Gap, Cause]] = []
    if measured.activities:
        report["gpu"], found = gpu(recorded, places)
        report["syncs"] = syncs(measured, places)
    if recorded.rates is not None:
        report["rates"] = {
            "matmul_tflops": recorded.rates.matmul / 1e12,
            "copy_gb_per_s": recorded.rates.copy / 1e9,
            "dtype": recorded.rates.dtype,
        }
    if recorded.by_kernel.activities:
        report["kinds"], report["kernels"] = kinds(recorded)
        report["memory"] = memory(recorded.by_kernel)
    return Analysis(report, found, places)


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"gapless": version("gapless"), "torch": torch.__version__, "python": platform.python_version()}
    if triton is not None:
        found["triton"] = triton.__version__
    return found


# ---- the GPU ----


def gpu(recorded: Recorded, places: dict[Any, Place]) -> tuple[dict[str, Any] | None, list[tuple[Gap, Cause]]]:
    """Busy time and gaps of the measured steps, and the gaps with their causes."""
    recording = recorded.measured
    steps = gpu_steps(recording)
    if not steps:
        return None, []
    start, end = steps[0].start, steps[-1].end
    busy = busy_time(recording.activities, start, end)
    gaps, causes = find_gaps(recording, start, end), Causes(recording, places)
    found = [(gap, causes.of(gap)) for gap in gaps]
    idle = end - start - busy
    long = sum(min(gap.end, end) - max(gap.start, start) for gap in gaps)
    plain = sorted(recorded.plain)[len(recorded.plain) // 2]
    report = {
        "wall_ms": (end - start) / 1e6,
        "busy_ms": busy / 1e6,
        "busy_percent": 100 * busy / (end - start),
        # What the profiler costs the host is in the wall time of recorded steps, but not in that of plain ones.
        "busy_percent_of_plain_steps": 100 * busy / 1e9 / len(steps) / plain,
        "idle_ms": idle / 1e6,
        "idle_in_short_gaps_ms": (idle - long) / 1e6,
        "steps": [
            {
                "step": recorded.first_step + step.number - 1,
                "wall_ms": (step.end - step.start) / 1e6,
                "busy_ms": step.busy / 1e6,
                "busy_percent": step.busy_percent,
                "launches": step.launches,
            }
            for step in steps
        ],
        "causes": [
            {
                "cause": cause.kind,
                "doing": cause.text,
                "place": cause.place.text if cause.place else None,
                "gaps": count,
                "ms": total / 1e6,
            }
            for cause, count, total in sum_by_cause(found)
        ],
        "gaps_over_5_us": len(found),
        "gaps": [_gap(gap, cause, start) for gap, cause in sorted(found, key=lambda pair: -pair[0].duration)[:_GAPS]],
    }
    return report, found


def _gap(gap: Gap, cause: Cause, start: int) -> dict[str, Any]:
    return {
        "at_ms": (gap.start - start) / 1e6,
        "us": gap.duration / 1e3,
        "after": gap.before.name,
        "before": gap.after.name,
        "cause": cause.kind,
        "doing": cause.text,
        "place": cause.place.text if cause.place else None,
        "called_from": list(cause.place.outer) if cause.place else [],
    }


def syncs(recording: Recording, places: dict[Any, Place]) -> list[dict[str, Any]]:
    """What held the host, by line; last come workers, and what reads the metrics of the step before."""
    rows: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for sync in find_syncs(recording, places):
        key = (sync.metrics, sync.thread, sync.kind, sync.name, sync.place.text if sync.place else None)
        rows[key].append(sync.duration)
    found = [
        {
            "kind": kind,
            "call": name,
            "thread": thread,
            "place": place,
            "reads_metrics": metrics,
            "per_step": len(times) / len(recording.steps),
            "ms_per_step": sum(times) / 1e6 / len(recording.steps),
            "longest_ms": max(times) / 1e6,
        }
        for (metrics, thread, kind, name, place), times in rows.items()
    ]
    return sorted(found, key=lambda row: (row["reads_metrics"], row["thread"] == WORKER, -row["ms_per_step"]))


@dataclass
class _Sum:
    """Kernels of one kind, or of one name."""

    time: int = 0
    launches: int = 0
    bounds: dict[int, float] = field(default_factory=dict)
    """Seconds, by the work that they are of."""
    bounded: int = 0
    """The ns of what has a limit."""

    def row(self, steps: int, total: int) -> dict[str, Any]:
        """A line of the report, per step."""
        limit, bounded = sum(self.bounds.values()) * 1e3 / steps, self.bounded / 1e6 / steps
        return {
            "ms": self.time / 1e6 / steps,
            "percent": 100 * self.time / total,
            "launches": self.launches / steps,
            "limit_ms": limit if self.bounded else None,
            "ms_with_limit": bounded if self.bounded else None,
            "limit_percent": 100 * limit / bounded if self.bounded else None,
        }


def kinds(recorded: Recorded) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Time per step by kind, and by kernel, with limits where there are any."""
    recording, host = recorded.by_kernel, Host(recorded.by_kernel)
    by_kind: defaultdict[Kind, _Sum] = defaultdict(_Sum)
    by_name: defaultdict[tuple[str, Kind], _Sum] = defaultdict(_Sum)
    total, steps = 0, len(recording.steps)
    for group in activities_by_step(recording).values():
        for activity in group:
            launch = recording.launch(activity)
            ops = ops_of(host.around(launch)) if launch is not None else []
            kind = kind_of(activity, ops)
            limit = bound(activity, ops, recorded.rates) if recorded.rates is not None else None
            total += activity.duration
            for entry in (by_kind[kind], by_name[activity.name, kind]):
                entry.time += activity.duration
                entry.launches += 1
                if limit is not None:
                    entry.bounds[limit.work] = limit.seconds
                    entry.bounded += activity.duration
    _bound_attention(recorded, by_kind, by_name)
    _bound_update(recorded, by_kind, by_name)
    kinds_found = sorted(by_kind.items(), key=lambda pair: -pair[1].time)
    kernels_found = sorted(by_name.items(), key=lambda pair: -pair[1].time)[:_KERNELS]
    return (
        [{"kind": kind, **entry.row(steps, total)} for kind, entry in kinds_found],
        [{"kernel": name, "kind": kind, **entry.row(steps, total)} for (name, kind), entry in kernels_found],
    )


def _bound_attention(recorded: Recorded, by_kind: dict[Kind, _Sum], by_name: dict[tuple[str, Kind], _Sum]) -> None:
    """The limit of attention as a whole, if each layer has run it equally often."""
    work, rates = recorded.attention, recorded.rates
    if work is None or rates is None or not work.calls:
        return
    forwards = sum(entry.launches for (name, _), entry in by_name.items() if name in _FORWARDS)
    if not forwards or forwards % work.calls:
        return
    entry = by_kind["attention forward"]  # more than once a layer where layers are recomputed
    entry.bounds, entry.bounded = {0: forwards // work.calls * work.forward / rates.matmul}, entry.time
    if "attention backward" in by_kind:
        entry = by_kind["attention backward"]
        entry.bounds, entry.bounded = {0: work.backward / rates.matmul}, entry.time


def _bound_update(recorded: Recorded, by_kind: dict[Kind, _Sum], by_name: dict[tuple[str, Kind], _Sum]) -> None:
    """The limit of the optimizer's update."""
    updates = [entry for (name, _), entry in by_name.items() if name.startswith("_update_")]
    if recorded.rates is None or not updates:
        return
    seconds = len(recorded.by_kernel.steps) * recorded.update_bytes / recorded.rates.copy
    entry = by_kind["optimizer"]
    entry.bounds[0] = seconds
    entry.bounded += sum(update.time for update in updates)
    if len(updates) == 1:
        updates[0].bounds, updates[0].bounded = {0: seconds}, updates[0].time


def memory(recording: Recording) -> dict[str, Any] | None:
    """Memory over the traced steps, and by part of the step."""
    start, end = recording.steps[0].start, recording.steps[-1].end
    events = [event for event in recording.memory if start <= event.time < end]
    if not events:
        return None
    return {
        "peak_gib": max(event.allocated for event in events) / 2**30,
        "reserved_gib": max(event.reserved for event in events) / 2**30,
        "parts": [
            {"part": part.name, "peak_gib": part.peak / 2**30, "peak_at": part.place, "last_gib": part.last / 2**30}
            for part in phases(recording, start, end)
        ],
    }


# ---- the host ----


def host_ops(recording: Recording) -> dict[str, Any]:
    """Operations of the measured steps on the host: their own time, without that of operations in them."""
    own: Counter[tuple[str, Kind]] = Counter()
    counts: Counter[tuple[str, Kind]] = Counter()
    by_kind: Counter[Kind] = Counter()
    threads: defaultdict[int, list[Op]] = defaultdict(list)
    start, end = recording.steps[0].start, recording.steps[-1].end
    for op in recording.ops:
        if start <= op.start < end:
            threads[op.thread].append(op)
    for ops in threads.values():
        nest = Nest(ops)
        for index, (op, inner) in enumerate(zip(nest.events, nest.children_time(), strict=True)):
            kind = kind_of_ops(ops_of(nest.within(index)))
            own[op.name, kind] += op.duration - inner
            counts[op.name, kind] += 1
            by_kind[kind] += op.duration - inner
    steps = len(recording.steps)
    return {
        "calls_per_step": sum(counts.values()) / steps,
        "kinds": [{"kind": kind, "ms": time / 1e6 / steps} for kind, time in by_kind.most_common()],
        "ops": [
            {"op": name, "kind": kind, "ms": time / 1e6 / steps, "calls": counts[name, kind] / steps}
            for (name, kind), time in own.most_common(_OPS)
        ],
    }
