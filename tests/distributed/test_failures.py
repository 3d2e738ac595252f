"""What happens when a rank fails or ends, in jobs started as a launcher starts them."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import run
from ranks import CONFIG, Job, all_reduce, nothing

from gapless.parallel import watch
from gapless.parallel.launch import launched, read_environment
from gapless.parallel.processes import Process, _state
from gapless.parallel.store import JsonStore
from gapless.parallel.watch import NOTE, _Heart


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The process that all others are forked from has torch."""
    run(2, nothing)


def raise_in_a_callback(rank, folder):
    if rank == 2:
        show = watch.Watch._print
        watch.Watch._print = lambda self, text: (time.sleep(1.0), show(self, text))  # it prints slowly
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        all_reduce()
        if rank == 2:
            raise KeyError("a")
        all_reduce()


def test_the_failing_rank_is_told_first_and_in_full(tmp_path):
    job = Job(3, raise_in_a_callback, tmp_path)
    assert job.codes == [1, 1, 1]
    lines = job.lines()
    assert lines[0] == "rank 2: Traceback (most recent call last):"
    assert lines[-3] == "rank 2: KeyError: 'a'"
    assert sorted(lines[-2:]) == [f"rank {rank}: stopped because rank 2 failed: KeyError: 'a'" for rank in (0, 1)]
    assert job.errors.count("Traceback") == 1
    logs = [(tmp_path / "logs" / f"rank-{rank:05}.log").read_text() for rank in range(3)]
    assert "Traceback" in logs[2]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  Traceback", logs[2])
    assert all("  stopped because rank 2 failed: KeyError: 'a'\n" in log for log in logs[:2])
    assert all("  RuntimeError: " in log for log in logs[:2])  # the broken all-reduce
    assert job.seconds < 10


def fail_while_others_wait(rank, folder):
    with launched(CONFIG, "cpu") as world:
        if rank == 0:
            raise KeyError("a")
        world.share("never", 1)


def test_a_failure_of_rank_0_reaches_those_that_wait_in_its_store(tmp_path):
    job = Job(2, fail_while_others_wait, tmp_path)
    assert job.codes == [1, 1]
    assert job.lines()[-2:] == ["rank 0: KeyError: 'a'", "rank 1: stopped because rank 0 failed: KeyError: 'a'"]
    assert "TCPStore" not in job.errors


def disagree(rank, folder):
    try:
        with launched(CONFIG, "cpu") as world:
            world.open_log(folder / "logs")
            world.agree("start", {"seed": rank})
    except ValueError as error:
        (folder / f"raised-{rank}").write_text(error.__notes__[0])
        raise


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    job = Job(3, disagree, tmp_path)
    assert job.codes == [2, 2, 2]
    (line,) = job.errors.splitlines()
    assert re.match(r"rank \d: error: the ranks do not agree on start: seed: rank 0 has 0, rank 1 has 1", line)
    assert [(tmp_path / f"raised-{rank}").read_text() for rank in range(3)] == [NOTE] * 3
    logs = [(tmp_path / "logs" / f"rank-{rank:05}.log").read_text() for rank in range(3)]
    assert all("  error: the ranks do not agree on start" in log for log in logs)
    assert sum("  stopped because rank " in log for log in logs) == 2


def fail_differently(rank, folder):
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        all_reduce()
        time.sleep(0.2 * rank)
        if rank == 1:
            raise IndexError("b")
        raise KeyError("a")


def test_an_error_that_came_second_is_in_the_log_of_its_rank(tmp_path):
    job = Job(2, fail_differently, tmp_path)
    assert job.codes == [1, 1]
    assert "IndexError" not in job.errors
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert "in fail_differently" in log
    assert "  IndexError: b\n" in log
    assert "  stopped because rank 0 failed: KeyError: 'a'\n" in log


def fail_alike_later(rank, folder):
    watch.POLL = 0.05
    with launched(CONFIG, "cpu"):
        all_reduce()
        time.sleep(0.4 * rank)
        read_environment({"WORLD_SIZE": "0"})


def test_an_error_is_told_once_where_some_find_it_later(tmp_path):
    """The watching thread of rank 1 hears of the error before its rank finds the same."""
    job = Job(2, fail_alike_later, tmp_path)
    assert job.codes == [2, 2]
    (line,) = job.lines()
    assert line.startswith("rank 0: error: WORLD_SIZE is '0'")


def killed_in_a_collective(rank, folder):
    with launched(CONFIG, "cpu"):
        all_reduce()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce()


def killed_in_the_store(rank, folder):
    with launched(CONFIG, "cpu") as world:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        world.share("never", 1)


@pytest.mark.parametrize("function", [killed_in_a_collective, killed_in_the_store])
def test_a_killed_rank_ends_the_job(tmp_path, function):
    job = Job(3, function, tmp_path)
    assert job.codes == [1, 1, -signal.SIGKILL]
    text = r"rank \d: stopped because rank 2 failed: its process \(\d+\) ended without a word: killed, or out of memory"
    assert len(job.lines()) == 2
    assert all(re.fullmatch(text, line) for line in job.lines())
    assert "Traceback" not in job.errors
    assert job.seconds < 10


def server_killed_in_a_collective(rank, folder):
    with launched(CONFIG, "cpu"):
        all_reduce()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce()


def server_killed_in_the_store(rank, folder):
    with launched(CONFIG, "cpu") as world:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        world.share("never", 1)


@pytest.mark.parametrize("function", [server_killed_in_a_collective, server_killed_in_the_store])
def test_the_store_may_be_killed(tmp_path, function):
    job = Job(2, function, tmp_path)
    assert job.codes == [-signal.SIGKILL, 1]
    (line,) = job.lines()
    assert line.startswith("rank 1: stopped because rank 0 failed: ")
    assert job.seconds < 10


def stuck(rank, folder):
    watch.GRACE = 0.5
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        if rank == 1:
            raise KeyError("a")
        threading.Event().wait()


def test_a_stuck_process_is_ended(tmp_path):
    job = Job(2, stuck, tmp_path)
    assert job.codes == [1, 1]
    assert job.lines()[-1] == "rank 0: stopped because rank 1 failed: KeyError: 'a'"
    assert "stopped because rank 1 failed" in (tmp_path / "logs" / "rank-00000.log").read_text()
    assert job.seconds < 10


def interrupted(rank, folder):
    with launched(CONFIG, "cpu") as world:
        if rank == 1:
            raise KeyboardInterrupt
        world.share("never", 1)


def call_exit(rank, folder):
    with launched(CONFIG, "cpu") as world:
        if rank == 1:
            sys.exit(3)
        world.share("never", 1)


def write_to_head(rank, folder):
    reading, writing = os.pipe()
    os.close(reading)
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        if rank == 1:
            sys.stdout = os.fdopen(writing, "w")
            print("step 1", flush=True)
        world.share("never", 1)


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        (interrupted, 130, "interrupted"),
        (call_exit, 3, "exit(3) was called"),
        (write_to_head, 1, "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_what_needs_no_traceback_is_a_line(tmp_path, function, code, message):
    job = Job(2, function, tmp_path)
    assert job.codes == [1, code]
    assert job.lines() == [f"rank 1: {message}", f"rank 0: stopped because rank 1 failed: {message}"]
    assert "Traceback" not in job.errors
    if function is write_to_head:
        assert "in write_to_head" in (tmp_path / "logs" / "rank-00001.log").read_text()


@pytest.fixture
def launcher(tmp_path):
    """A process that serves the store of the job in the folder, as torchrun's does; ranks find its number there."""
    context = multiprocessing.get_context("forkserver")
    pipe, end = context.Pipe()
    process = context.Process(target=_serve, args=(end,), daemon=True)
    process.start()
    (tmp_path / "launcher").write_text(f"{process.pid} {pipe.recv()}")
    yield
    process.kill()


def _serve(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    pipe.send(store.port)
    pipe.poll(None)


def _use_launcher(folder: Path) -> int:
    number, port = (folder / "launcher").read_text().split()
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": port})
    return int(number)


def without_launcher(rank, folder):
    launcher = _use_launcher(folder)
    with launched(CONFIG, "cpu") as world:
        all_reduce()
        if rank == 1:
            os.kill(launcher, signal.SIGKILL)
        world.share("never", 1)


@pytest.mark.usefixtures("launcher")
def test_every_rank_says_that_the_launcher_is_gone(tmp_path):
    job = Job(2, without_launcher, tmp_path)
    assert job.codes == [1, 1]
    text = "stopped because rank 0 failed: the store of the job is gone: rank 0 was killed, or its launcher"
    assert sorted(job.lines()) == [f"rank {rank}: {text}" for rank in (0, 1)]


def fail_without_an_answer(rank, folder):
    watch.GRACE = 0.5
    launcher = _use_launcher(folder)
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        all_reduce()
        if rank == 1:
            os.kill(launcher, signal.SIGSTOP)
        dist.barrier()
        raise KeyError(rank)


@pytest.mark.usefixtures("launcher")
def test_a_store_that_does_not_answer_holds_no_failure_up(tmp_path):
    job = Job(2, fail_without_an_answer, tmp_path)
    assert job.codes == [1, 1]
    assert job.seconds < 10
    assert sorted(job.lines()) == [f"rank {rank}: KeyError: {rank}" for rank in (0, 1)]
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank:05}.log").read_text()
        assert "in fail_without_an_answer" in log
        assert log.endswith("  this process did not end within 0.5 s of that, and was ended\n")


# ---- signs of life ----


def test_an_ended_process_is_gone_before_it_is_reaped():
    child = subprocess.Popen([sys.executable, "-c", "print(input())"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    here = Process.here()
    state = Process(here.node, child.pid, _state(child.pid)[1])
    assert not here.is_gone()
    assert not state.is_gone()
    child.stdin.close()
    end = time.monotonic() + 20
    while not state.is_gone():
        assert time.monotonic() < end
        time.sleep(0.05)
    child.wait()
    assert state.is_gone()
    assert Process(here.node, os.getpid(), "0").is_gone()  # the number was given anew


def test_a_sandbox_may_forbid_to_read_of_the_machine(monkeypatch):
    def forbid(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", forbid)
    monkeypatch.setattr(os, "readlink", forbid)
    here = Process.here()
    assert (here.node, here.started) == (socket.gethostname(), "")
    assert not here.is_gone()


def test_a_silent_rank_of_another_machine_is_missed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    store = JsonStore(dist.HashStore())
    heart, other = _Heart(store, 0, 1, 600.0), _Heart(store, 1, 0, 600.0)
    for _ in range(100):
        now[0] += 6.0
        assert heart.beat() is None
        assert other.beat() is None
    missed = []
    for _ in range(102):
        now[0] += 6.0
        missed.append(heart.beat())
    assert missed[:101] == [None] * 101
    assert missed[101] == 1
    now[0] += 500.0  # this process was held up itself
    assert heart.beat() is None
