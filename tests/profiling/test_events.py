"""Traces as torch exports them become recordings; those of a GPU are written here as CUPTI has them."""

from types import SimpleNamespace

import pytest
from synthetic import MAIN, frame, op, us

from gapless.profiling.events import call_lines, read_trace
from gapless.profiling.host import Nest
from gapless.profiling.memory import phases
from gapless.profiling.record import without_lead

BASE = 1_790_857_026_000_000_000


def event(category, name, ts, dur, tid=11, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def memory(ts, allocated, device=1):
    args = {"Total Reserved": 4096, "Total Allocated": allocated, "Bytes": 1, "Device Id": 0, "Device Type": device}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "s": "t",
        "pid": 1,
        "tid": 11,
        "ts": ts,
        "args": args,
    }


TRACE = {
    "baseTimeNanoseconds": BASE,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}},
        event("user_annotation", "ProfilerStep#1", 0, 10),
        event("user_annotation", "ProfilerStep#2", 5198186013000.641, 100.5),
        event("user_annotation", "next batch", 5198186013001.0, 2.0),
        event("gpu_user_annotation", "next batch", 5198186013001.0, 2.0, tid=7),
        event("python_function", "gapless/kernels/lora.py(270): forward", 5198186013010.1, 20),
        event("python_function", "<built-in method item of Tensor object at 0x7f>", 5198186013012, 10),
        event(
            "cpu_op",
            "aten::mm",
            5198186013011.123,
            5.002,
            **{
                "External id": 7,
                "Input Dims": [[2, 3], [3, 4], []],
                "Input type": ["c10::BFloat16", "float", "Scalar"],
            },
        ),
        event(
            "cpu_op", "aten::cat", 5198186013030, 1, **{"Input Dims": [[[2, 3], [2, 3]], []], "Input type": ["", ""]}
        ),
        event("cuda_runtime", "cudaLaunchKernel", 5198186013012.5, 1.5, cbid=211, correlation=45),
        event("cuda_driver", "cuLaunchKernelEx", 5198186013020.5, 1.5, tid=12, correlation=46),
        event("kernel", "gemm", 5198186013030, 4.25, tid=7, device=0, stream=7, correlation=45, grid=[1, 1, 1]),
        event(
            "gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5198186013036, 2, tid=9, stream=9, correlation=46, bytes=64
        ),
        event("gpu_memset", "Memset (Device)", 5198186013040, 0, tid=7, stream=7, correlation=0, bytes=8),
        event("Trace", "PyTorch Profiler (0)", 0, 1),
        memory(5198186013013, 100),
        memory(5198186013013, 7, device=0),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 45, "pid": 1, "tid": 11, "ts": 5198186013012.5},
    ],
}


def test_a_trace_of_a_gpu():
    first = BASE + 5198186013000641
    lines = {BASE + 5198186013012000: ("gapless/kernels/lora.py", 280)}
    seen = read_trace(TRACE, lines)
    assert [step.number for step in seen.steps] == [1, 2]
    assert (seen.steps[1].start, seen.steps[1].duration) == (first, 100500)
    assert seen.main_thread == 11
    gemm, copy, fill = seen.activities
    assert (gemm.kind, gemm.stream, gemm.duration, gemm.correlation) == ("kernel", 7, 4250, 45)
    assert (copy.kind, copy.stream, copy.bytes) == ("copy", 9, 64)
    assert (fill.kind, fill.duration) == ("fill", 0)
    assert seen.launch(gemm).name == "cudaLaunchKernel"
    assert seen.launch(copy).thread == 12
    assert seen.launch(fill) is None
    matmul, cat = seen.ops
    assert matmul.shapes == ((2, 3), (3, 4), ())
    assert matmul.dtypes == ("c10::BFloat16", "float", "Scalar")
    assert cat.shapes[0] == ()
    ours, built_in = seen.frames
    assert (ours.file, ours.line, ours.function, ours.caller) == ("gapless/kernels/lora.py", 270, "forward", None)
    assert (built_in.file, built_in.caller) == (None, ("gapless/kernels/lora.py", 280))
    assert [mark.name for mark in seen.marks] == ["next batch"]
    assert [entry.allocated for entry in seen.memory] == [100]
    assert [step.number for step in without_lead(seen).steps] == [1]


def test_a_trace_without_a_whole_step():
    with pytest.raises(ValueError, match="no whole step"):
        read_trace({"traceEvents": []})
    with pytest.raises(ValueError, match="no whole step"):
        without_lead(read_trace({"traceEvents": [event("user_annotation", "ProfilerStep#1", 0, 10)]}))


def test_lines_of_an_event_tree():
    caller = SimpleNamespace(file_name="gapless/a.py", line_number=3)
    tags = {name: SimpleNamespace(name=name) for name in ("PyCall", "TorchOp")}
    extra = SimpleNamespace(caller=caller)
    inner = SimpleNamespace(children=[], start_time_ns=5, extra_fields=extra, tag=tags["PyCall"])
    outer = SimpleNamespace(children=[inner], start_time_ns=1, tag=tags["TorchOp"])
    assert call_lines([outer]) == {5: ("gapless/a.py", 3)}


def test_nested_events():
    """What covers a time, with events that begin together, touch, or have no length."""
    outer, first, inner, second = op("outer", 0, 100), op("first", 0, 40), op("inner", 10, 10), op("second", 40, 90)
    nest = Nest([second, inner, first, outer])
    assert nest.at(us(10)) == [outer, first, inner]
    assert nest.at(us(20)) == [outer, first]
    assert nest.at(us(95)) == [outer]
    assert nest.at(us(101)) == []
    assert nest.at(-1) == []
    assert nest.within(nest.events.index(inner)) == [outer, first, inner]
    assert nest.children_time()[nest.events.index(outer)] == us(90)


@pytest.mark.parametrize("prefix", ["", "FSDP"])
def test_memory_by_part_of_the_step(prefix):
    def module(name, start, end):
        return frame(None, f"nn.Module: {prefix}{name}", start, end)

    counters = [(5, 10), (12, 40), (15, 50), (25, 70), (35, 60), (50, 90), (60, 20), (75, 30)]
    seen = read_trace(TRACE)
    seen = type(seen)(
        steps=seen.steps,
        main_thread=MAIN,
        frames=(
            module("Decoder_0", 3, 30),
            module("DecoderLayer_0", 10, 14),
            module("DecoderLayer_1", 14, 20),
            frame("/x/gapless/models/decoder.py", "head_loss", 22, 28),
            frame(None, "<built-in method run_backward of X>", 32, 65),
            frame("/x/gapless/training/optim.py", "step", 70, 80),
        ),
        memory=tuple(type(seen.memory[0])(us(time), MAIN, size, 100) for time, size in counters),
    )
    found = phases(seen, 0, us(100))
    assert [(part.name, part.peak, part.place, part.last) for part in found] == [
        ("forward", 50, "forward of layer 1", 50),
        ("head and loss", 70, "head and loss", 70),
        ("backward", 90, "backward", 20),
        ("optimizer", 30, "optimizer", 30),
    ]
