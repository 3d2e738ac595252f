"""Busy time, gaps and their causes on made-up recordings, whose answers are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import BACKWARD, call, frame, kernel, mark, op, recording, step, us

from gapless.profiling.gaps import Causes, activities_by_step, busy_time, find_gaps, gpu_steps, sum_by_cause, union
from gapless.profiling.host import Lines, Place
from gapless.training.trainer import NEXT_BATCH, READ_METRICS

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda span: (span[0], span[0] + span[1])))


@given(spans)
def test_union_covers_what_the_spans_cover(spans):
    merged = union(spans)
    assert {t for first, last in merged for t in range(first, last)} == {t for a, b in spans for t in range(a, b)}
    assert all(last < first for (_, last), (first, _) in zip(merged, merged[1:], strict=False))


def test_busy_time_counts_overlapping_streams_once():
    kernels = [kernel(1, 0, 10), kernel(2, 5, 20, stream=8), kernel(3, 30, 40), kernel(4, 32, 34, stream=8)]
    assert busy_time(kernels, us(0), us(40)) == us(30)
    assert busy_time(kernels, us(8), us(35)) == us(12 + 5)
    assert busy_time([kernel(1, 7, 7)], us(0), us(10)) == 0
    assert busy_time(kernels, us(21), us(29)) == 0


def test_steps_are_from_first_kernel_to_first_kernel():
    seen = recording(
        [step(1, 0, 100), step(2, 100, 200)],
        calls=[call(1, 10, 11), call(2, 50, 51), call(3, 110, 111), call(4, 120, 121)],
        activities=[
            kernel(1, 20, 60),
            kernel(2, 80, 110),
            kernel(3, 70, 75, kind="copy", stream=9),  # the batch of step 2 comes while step 1 runs
            kernel(4, 130, 180),
        ],
    )
    first, second = gpu_steps(seen)
    assert (first.start, first.end, first.busy, first.launches) == (us(20), us(130), us(40 + 5 + 30), 2)
    assert (second.start, second.end, second.busy, second.launches) == (us(130), us(180), us(50), 2)
    assert second.busy_percent == 100
    assert first.busy_percent == pytest.approx(100 * 75 / 110)


def test_an_activity_whose_launch_was_not_seen_is_of_the_step_around_it():
    seen = recording(
        [step(1, 0, 100), step(2, 100, 200)],
        calls=[call(1, 10, 11), call(2, 110, 111), call(3, 210, 211)],
        activities=[
            kernel(0, 5, 8, "before all"),
            kernel(1, 20, 30),
            kernel(0, 31, 40, "of step 1"),
            kernel(2, 120, 130),
            kernel(77, 131, 135, "of step 2"),
            kernel(3, 220, 230),
            kernel(0, 231, 240, "after all"),
        ],
    )
    names = [[event.name for event in group] for group in activities_by_step(seen).values()]
    assert names == [["kernel", "of step 1"], ["kernel", "of step 2"]]


def test_without_a_gpu_there_are_no_steps_of_it():
    assert gpu_steps(recording()) == ()


def test_gaps_lie_between_activities_of_all_streams():
    seen = recording(
        activities=[
            kernel(1, 0, 10, "a"),
            kernel(2, 2, 30, "b", stream=8),
            kernel(3, 12, 20, "c"),
            kernel(4, 34, 40, "d"),  # 4 us: what a GPU takes
            kernel(5, 46, 46, "e"),  # of no length
            kernel(6, 60, 70, "f"),
        ]
    )
    gaps = find_gaps(seen, us(0), us(70))
    assert [(gap.start, gap.end, gap.before.name, gap.after.name) for gap in gaps] == [
        (us(40), us(46), "d", "e"),
        (us(46), us(60), "e", "f"),
    ]
    assert find_gaps(seen, us(0), us(46)) == gaps[:1]


def test_a_gap_at_a_steps_border_is_found_once():
    seen = recording(
        [step(1, 0, 50), step(2, 50, 100)],
        calls=[call(1, 1, 2), call(2, 60, 61)],
        activities=[kernel(1, 5, 40), kernel(2, 65, 90)],
    )
    first, second = gpu_steps(seen)
    assert first.end == second.start == us(65)
    assert first.busy == us(35)
    assert [gap.duration for gap in find_gaps(seen, first.start, second.end)] == [us(25)]


def cause(launch, *, start=40, after=100, **events):
    """Of the gap from `start` to `after` that the kernel of a launch ends."""
    calls = [call(1, 0, 1), launch, *events.pop("calls", [])]
    activities = [kernel(1, 2, start, "before"), kernel(2, after, after + 10, "after"), *events.pop("activities", [])]
    seen = recording(calls=calls, activities=activities, **events)
    (gap,) = find_gaps(seen, us(2), us(after + 10))
    return Causes(seen).of(gap)


def test_launched_in_time():
    assert cause(call(2, 10, 12)).kind == "device"


def test_a_graph_takes_long_to_launch():
    """All that it launches has its number, so none of that tells what the call was."""
    copy = kernel(2, 120, 121, "Memcpy DtoD (Device -> Device)", kind="copy")
    found = cause(call(2, 35, 97, "cudaGraphLaunch"), activities=[copy])
    assert (found.kind, found.text) == ("call", "in cudaGraphLaunch")


def test_a_launch_that_was_not_seen():
    assert cause(call(99, 10, 12)).kind == "unknown"


def test_launched_late_names_the_innermost_operation_and_line():
    found = cause(
        call(2, 95, 97),
        ops=[op("_LoraLinear", 30, 99), op("aten::addmm", 90, 98), op("aten::mul", 50, 60)],
        frames=[
            frame("/x/gapless/training/step.py", "train_step", 0, 100, line=60),
            frame(
                "/x/gapless/kernels/lora.py", "forward", 20, 99, line=270, caller=("/x/gapless/training/step.py", 95)
            ),
            frame("torch/_ops.py", "__call__", 89, 99, caller=("/x/gapless/kernels/lora.py", 290)),
        ],
    )
    assert (found.kind, found.text) == ("launch late", "on the way to aten::addmm")
    assert found.place == Place("gapless/kernels/lora.py:290 in forward")
    assert found.place.outer == ("gapless/training/step.py:95 in train_step",)


def test_after_a_synchronisation():
    found = cause(call(2, 90, 92), calls=[call(9, 5, 88, "cudaStreamSynchronize")])
    assert (found.kind, found.text) == ("synchronisation", "after a synchronisation: cudaStreamSynchronize")
    # What held the host as the GPU ran dry has cost the lead, however long the rest took; clocks may differ a little.
    assert cause(call(2, 90, 92), calls=[call(9, 5, 39, "cudaStreamSynchronize")]).kind == "synchronisation"
    # Of what came later, the longest part counts.
    assert cause(call(2, 90, 92), calls=[call(9, 45, 88, "cudaStreamSynchronize")]).kind == "synchronisation"
    assert cause(call(2, 90, 92), calls=[call(9, 45, 50, "cudaStreamSynchronize")]).kind == "launch late"
    assert cause(call(2, 90, 92), calls=[call(9, 5, 30, "cudaStreamSynchronize")]).kind == "launch late"


def test_the_main_thread_waits_while_another_launches():
    found = cause(call(2, 90, 92, thread=BACKWARD), calls=[call(9, 30, 88, "cudaDeviceSynchronize")])
    assert found.kind == "synchronisation"


def test_waiting_for_a_copy():
    copy = kernel(9, 20, 39, "Memcpy DtoH (Device -> Pageable)", kind="copy", stream=9)
    found = cause(call(2, 90, 92), calls=[call(9, 15, 85, "cudaMemcpyAsync")], activities=[copy])
    assert (found.kind, found.text) == ("copy", "waiting for a copy: Memcpy DtoH (Device -> Pageable)")


def test_waiting_for_the_data():
    assert cause(call(2, 95, 97), marks=[mark(NEXT_BATCH, 42, 90)]).kind == "data"
    assert cause(call(2, 95, 97), marks=[mark(NEXT_BATCH, 42, 50)]).kind == "launch late"


def test_reading_metrics():
    assert cause(call(2, 95, 97), marks=[mark(READ_METRICS, 42, 90)]).kind == "metrics"
    waits = [call(9, 43, 89, "cudaEventSynchronize")]
    assert cause(call(2, 95, 97), marks=[mark(READ_METRICS, 42, 90)], calls=waits).kind == "metrics"


def test_in_an_allocation_and_in_the_launch_itself():
    assert cause(call(2, 95, 97), calls=[call(9, 44, 90, "cudaMalloc")]).text == "in cudaMalloc"
    assert cause(call(2, 30, 99)).text == "in cudaLaunchKernel"


def test_sums_by_cause():
    seen = recording(
        calls=[call(n, 20 * n, 20 * n + 1) for n in range(5)],
        activities=[kernel(n, 20 * n + 2, 20 * n + 3 + n) for n in range(5)],
        ops=[op("aten::mm", 20 * n - 1, 20 * n + 2) for n in range(1, 4)] + [op("aten::add", 79, 82)],
    )
    causes = Causes(seen)
    rows = sum_by_cause([(gap, causes.of(gap)) for gap in find_gaps(seen, 0, us(100))])
    assert [(found.text, count, total) for found, count, total in rows] == [
        ("on the way to aten::mm", 3, us(19 + 18 + 17)),
        ("on the way to aten::add", 1, us(16)),
    ]


def test_lines_of_other_steps():
    """The second launch of a kernel in a step is the second one in another, whatever the times."""

    def steps(start, frames):
        calls = [call(n, start + 10 * n, start + 10 * n + 1) for n in (1, 2, 3)]
        names = {1: "mm", 2: "norm", 3: "mm"}
        kernels = [kernel(n, start + 10 * n + 2, start + 10 * n + 3, names[n]) for n in (1, 2, 3)]
        return recording([step(1, start, start + 50)], calls=calls, activities=kernels, frames=frames)

    traced = steps(
        1000,
        [frame("gapless/a.py", "f", 1009, 1012, line=5), frame("gapless/b.py", "g", 1029, 1032, line=6)],
    )
    measured = steps(0, [])
    places = Lines(traced).of(measured)
    assert {c.correlation: place.text for c, place in places.items()} == {
        1: "gapless/a.py:5 in f",
        3: "gapless/b.py:6 in g",
    }
    (first, second) = find_gaps(measured, 0, us(50))
    assert Causes(measured, places).of(first).place is None
    assert Causes(measured, places).of(second).place == Place("gapless/b.py:6 in g")
