"""What held the host, on made-up recordings."""

import pytest
from synthetic import BACKWARD, WORKER, call, frame, kernel, mark, op, recording, step, us

from gapless.profiling.syncs import find_syncs
from gapless.training.trainer import READ_METRICS

NAMES = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cudaMemcpy"]


@pytest.mark.parametrize("name", NAMES)
def test_calls_that_wait(name):
    (sync,) = find_syncs(recording(calls=[call(1, 10, 30, name), call(2, 40, 41), call(3, 50, 60, "cudaEventQuery")]))
    assert (sync.duration, sync.step, sync.metrics, sync.thread) == (us(20), 1, False, "main")


def test_copies_from_pageable_memory_wait_and_others_do_not():
    seen = recording(
        calls=[call(n, 10 * n, 10 * n + 5, "cudaMemcpyAsync") for n in (1, 2, 3)],
        activities=[
            kernel(1, 11, 12, "Memcpy DtoH (Device -> Pageable)", kind="copy"),
            kernel(2, 21, 22, "Memcpy DtoH (Device -> Pinned)", kind="copy"),
            kernel(3, 31, 32, "Memcpy HtoD (Pageable -> Device)", kind="copy"),
        ],
    )
    found = find_syncs(seen)
    assert [(sync.kind, sync.start) for sync in found] == [("copy", us(10)), ("copy", us(30))]
    assert "Pageable" in found[0].name


def test_metrics_of_the_step_before_are_told_apart():
    seen = recording(
        calls=[call(1, 10, 30, "cudaEventSynchronize"), call(2, 50, 60, "cudaEventSynchronize")],
        marks=[mark(READ_METRICS, 5, 31)],
    )
    assert [sync.metrics for sync in find_syncs(seen)] == [True, False]


def test_threads_and_steps():
    seen = recording(
        [step(1, 0, 100), step(2, 100, 200)],
        calls=[
            call(1, 10, 30, "cudaHostAlloc", thread=WORKER),
            call(2, 110, 130, "cudaStreamSynchronize", thread=BACKWARD),
            call(3, 250, 260, "cudaDeviceSynchronize"),  # after the steps
        ],
        ops=[op("autograd::engine::evaluate_function: X", 105, 140, thread=BACKWARD)],
    )
    found = find_syncs(seen)
    assert [(sync.kind, sync.thread, sync.step) for sync in found] == [
        ("allocation", "worker", 1),
        ("synchronisation", "backward", 2),
    ]


def test_the_line_is_that_of_the_call():
    """The innermost frame of ours, at the line it was at; a launcher all kernels share says nothing."""
    seen = recording(
        calls=[call(1, 50, 60, "cudaStreamSynchronize")],
        frames=[
            frame("/p/src/gapless/training/optim.py", "step", 0, 100, line=200),
            frame(
                "/p/src/gapless/kernels/runtime.py", "launch", 10, 90, caller=("/p/src/gapless/training/optim.py", 213)
            ),
            frame(None, "<built-in method item>", 40, 80, caller=("/p/src/gapless/kernels/runtime.py", 180)),
        ],
    )
    (sync,) = find_syncs(seen)
    assert sync.place is not None
    assert sync.place.text == "gapless/training/optim.py:213 in step"
