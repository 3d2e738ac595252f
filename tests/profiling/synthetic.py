"""Recordings made up by hand; times in us, for which the events have ns."""

from gapless.profiling.events import Activity, Call, Frame, Mark, Op, Step, make_recording

MAIN, BACKWARD, WORKER = 1, 2, 3


def us(value):
    return round(value * 1000)


def step(number, start, end):
    return Step(f"ProfilerStep#{number}", us(start), us(end), number)


def kernel(correlation, start, end, name="kernel", *, stream=7, kind="kernel", size=0):
    return Activity(name, us(start), us(end), kind, stream, correlation, size)


def call(correlation, start, end, name="cudaLaunchKernel", *, thread=MAIN):
    return Call(name, us(start), us(end), thread, correlation)


def op(name, start, end, *, thread=MAIN, shapes=(), dtypes=()):
    return Op(name, us(start), us(end), thread, shapes, dtypes)


def mark(name, start, end, *, thread=MAIN):
    return Mark(name, us(start), us(end), thread)


def frame(file, function, start, end, *, line=1, caller=None, thread=MAIN):
    name = f"{file}({line}): {function}" if file else function
    return Frame(name, us(start), us(end), thread, file, function, line, caller)


def recording(steps=None, **events):
    return make_recording(steps or [step(1, 0, 1000)], MAIN, **events)
