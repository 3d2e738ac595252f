"""Where the host waited for the GPU, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gapless.profiling.events import Activity, Call, Recording
from gapless.profiling.host import Host, Place, in_mark, place
from gapless.training.trainer import READ_METRICS

_WAITING = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}
_COPYING = {"cudaMemcpy", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol", "cudaMemcpyPeer"}
ALLOCATIONS = {
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cudaFreeHost",
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemSetAccess",
}
"""Calls that get or give back memory, which torch's allocator keeps out of a step once it has enough."""


WORKER = "worker"


@dataclass(frozen=True)
class Sync:
    """A call that held the host."""

    kind: Literal["synchronisation", "copy", "allocation"]
    name: str
    start: int
    """In ns."""
    duration: int
    """For how long it held the host, in ns."""
    step: int
    thread: str
    """main, backward, or a worker, which the step does not wait for."""
    metrics: bool
    """Whether it reads the metrics of the step before, which waits for no step that is under way."""
    place: Place | None
    """The line of ours, where it is known."""


def is_sync(call: Call) -> bool:
    """Whether a call waits for the GPU by its nature."""
    return call.name in _WAITING or call.name in _COPYING or call.name.startswith(("cuMemcpyDtoH_v", "cuMemcpyHtoD_v"))


def is_graph(call: Call) -> bool:
    """Whether a call launches a CUDA graph."""
    return call.name.startswith(("cudaGraphLaunch", "cuGraphLaunch"))


def is_pageable(activity: Activity | None) -> bool:
    """Whether an activity is a copy from or to pageable memory, which holds the host even if asked for without."""
    return activity is not None and activity.kind == "copy" and "Pageable" in activity.name


def find_syncs(recording: Recording, places: Mapping[Call, Place] | None = None) -> list[Sync]:
    """The synchronisations in a recording's steps, in order.

    Args:
        recording: some steps.
        places: of its calls, where it has no Python frames.
    """
    host, places = Host(recording), places or {}
    launched = {activity.correlation: activity for activity in recording.activities if activity.correlation}
    threads = {op.thread: "backward" for op in recording.ops if op.name.startswith("autograd::engine::")}
    threads[recording.main_thread] = "main"
    syncs = []
    for call in recording.calls:
        step, activity = recording.step_of(call.start), launched.get(call.correlation)
        if step is None:
            continue
        if is_pageable(activity):
            kind, name = "copy", f"{call.name}: {activity.name if activity else ''}"
        elif is_sync(call):
            kind, name = ("copy" if "emcpy" in call.name else "synchronisation"), call.name
        elif call.name in ALLOCATIONS:
            kind, name = "allocation", call.name
        else:
            continue
        around = host.around(call)
        where = places.get(call) or place(around)
        thread, metrics = threads.get(call.thread, WORKER), in_mark(around, READ_METRICS)
        syncs.append(Sync(kind, name, call.start, call.duration, step.number, thread, metrics, where))
    return syncs
