"""The World of a job's ranks; what happens when one of them fails, in jobs started as a launcher starts them."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import run

from gapless.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from gapless.parallel import launch, watch
from gapless.parallel.launch import launched, read_environment
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore
from gapless.parallel.watch import NOTE, CommandExit, OtherRankFailed, _Heart
from gapless.parallel.world import World
from gapless.training.start import start_facts

CONFIG = ParallelConfig(timeout=20.0)


class Job:
    """Processes with a launcher's variables; `function(rank, folder)` is called in each."""

    def __init__(self, size, function, folder, *, started=None):
        self.codes = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        begin = time.monotonic()
        context = multiprocessing.get_context("forkserver")
        ranks = range(size if started is None else started)
        processes = [context.Process(target=_rank, args=(rank, size, port, function, folder)) for rank in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, begin + 40.0 - time.monotonic()))
            self.codes.append(process.exitcode)
            process.kill()
        assert None not in self.codes, "a process hangs"
        self.seconds = time.monotonic() - begin
        self.errors = (folder / "stderr").read_text()

    def lines(self):
        """What ranks said, without what torch says of broken connections."""
        return [line for line in self.errors.splitlines() if re.match(r"rank \d+: ", line)]


def _rank(rank, size, port, function, folder):
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    with CommandExit():
        function(rank, folder)
    os._exit(0)


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The process that all others are forked from has torch."""
    run(2, _nothing)


def _nothing(rank, world):
    pass


def _all_reduce():
    dist.all_reduce(torch.ones(1))


# ---- the World ----


def talk(rank, size):
    with launched(CONFIG, "cpu") as world:
        assert (world.rank, world.local_rank, world.size) == (rank, rank, size)
        assert world.share("numbers", rank) == list(range(size))
        assert world.share("numbers", {"twice": 2 * rank}) == [{"twice": 2 * other} for other in range(size)]
        assert world.first("made", lambda: {"by": rank}) == {"by": 0}
        assert world.first("made", lambda: rank, per_node=True) == 0
        world.agree("start", {"seed": 42})
        threads = [threading.Thread(target=world.mark, args=(f"part/{rank}", rank))]
        heard = []
        parts = [f"part/{other}" for other in range(size)]
        threads.append(threading.Thread(target=lambda: heard.extend(world.wait(parts))))
        for thread in threads:
            thread.start()
        assert world.share("meanwhile", None) == [None] * size
        for thread in threads:
            thread.join()
        left = sorted(name for name in _names(world, size))
    _all_reduce()
    return heard, left


def _names(world, size):
    """Keys of `share` that are still there."""
    calls = [f"call/{name}/{call}/{end}" for name in ("numbers", "meanwhile") for call in (1, 2) for end in range(size)]
    return [key for key in calls if world._store.has([key])]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_talk_in_the_group_of_a_script(size):
    for heard, left in run(size, talk):
        assert heard == list(range(size))
        assert left == [f"call/meanwhile/1/{rank}" for rank in range(size)]


def test_one_process_is_a_world_of_its_own():
    world = World.single()
    assert world.share("numbers", (1, 2)) == [[1, 2]]
    assert world.first("made", lambda: 3) == 3
    world.agree("start", {"seed": 42})
    thread = threading.Thread(target=world.mark, args=("part", "done"))
    thread.start()
    assert world.wait(["part"]) == ["done"]
    world.forget(["part"])
    assert not dist.is_initialized()


def differ(rank, size):
    with launched(CONFIG, "cpu") as world:
        config = _config(seed=43 if rank == 1 else 42)
        try:
            world.agree("the configuration", start_facts(config, rows="abc" if rank == 3 else "abd"))
        except ValueError as error:
            return str(error)


def test_what_differs_is_named():
    messages = run(4, differ)
    assert set(messages) == {
        "the ranks do not agree on the configuration: training.seed: rank 1 has 43, ranks 0, 2, 3 have 42; rows: rank "
        '3 has "abc", ranks 0, 1, 2 have "abd"; start all with the same files and versions'
    }


def test_start_facts_cover_settings_versions_and_source():
    begin = time.perf_counter()
    facts = start_facts(_config(), rows="abc")
    assert time.perf_counter() - begin < 0.5
    assert {"gapless", "gapless's source", "torch", "python", "training.seed", "parallel.tp_size", "rows"} <= {*facts}
    World.single().agree("start", facts)


def _config(**training):
    return RunConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train=("rows.jsonl",)),
        training=TrainingConfig(output_dir="run", **training),
    )


def fail_in_a_script(rank, size):
    told = None
    try:
        with launched(CONFIG, "cpu") as world:
            if rank == 1:
                raise KeyError("a")
            world.share("never", 1)
    except (KeyError, OtherRankFailed) as error:
        told = type(error).__name__, str(error), getattr(error, "__notes__", [])
    with launched(CONFIG, "cpu") as world:
        return told, world.share("again", rank)


def test_a_script_may_go_on_after_a_failure():
    results = run(2, fail_in_a_script)
    assert [again for _, again in results] == [[0, 1], [0, 1]]
    assert results[0][0] == ("OtherRankFailed", "stopped because rank 1 failed: KeyError: 'a'", [])
    assert results[1][0] == ("KeyError", "'a'", [NOTE])


# ---- jobs ----


def twice(rank, folder):
    for _ in range(2):
        with launched(CONFIG, "cpu") as world:
            assert dist.get_backend() == "gloo"
            _all_reduce()
            assert world.share("rank", rank) == [0, 1]
        assert not dist.is_initialized()


def test_a_job_may_train_twice(tmp_path):
    job = Job(2, twice, tmp_path)
    assert (job.codes, job.errors) == ([0, 0], "")


def started_again(rank, folder):
    if rank == 0:  # which came further than rank 1, before both were ended
        store = launch._meet(read_environment(os.environ), CONFIG.timeout)
        dist.PrefixStore("gapless/0/turns", store).add("0", 1)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    with launched(CONFIG, "cpu") as world:
        assert world.share("rank", rank) == [0, 1]


def test_what_ended_ranks_left_in_the_store_of_torchrun_is_not_read(tmp_path):
    assert Job(2, started_again, tmp_path).codes == [0, 0]


def slow_first(rank, folder):
    with launched(ParallelConfig(timeout=2.0), "cpu") as world:
        _all_reduce()
        assert world.first("slow", lambda: time.sleep(3.0) or "done") == "done"
        _all_reduce()


def test_what_one_rank_does_for_all_may_take_longer_than_the_timeout(tmp_path):
    assert Job(2, slow_first, tmp_path).codes == [0, 0]


def raise_in_a_callback(rank, folder):
    if rank == 2:
        show = watch.Watch._print
        watch.Watch._print = lambda self, text: (time.sleep(1.0), show(self, text))  # it prints slowly
    with launched(CONFIG, "cpu") as world:
        world.open_log(folder / "logs")
        _all_reduce()
        if rank == 2:
            raise KeyError("a")
        _all_reduce()


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
    assert all(log.endswith("  stopped because rank 2 failed: KeyError: 'a'\n") for log in logs[:2])
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
    with launched(CONFIG, "cpu") as world:
        world.agree("start", {"seed": rank})


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    job = Job(3, disagree, tmp_path)
    assert job.codes == [2, 2, 2]
    (line,) = job.errors.splitlines()
    assert re.match(r"rank \d: error: the ranks do not agree on start: seed: rank 0 has 0, rank 1 has 1", line)


def fail_alike_later(rank, folder):
    watch.POLL = 0.05
    with launched(CONFIG, "cpu"):
        _all_reduce()
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
        _all_reduce()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        _all_reduce()


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
        _all_reduce()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        _all_reduce()


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


def test_an_interrupt_passes_and_ends_the_others(tmp_path):
    job = Job(2, interrupted, tmp_path)
    assert job.lines() == ["rank 0: stopped because rank 1 failed: it was interrupted"]
    assert "KeyboardInterrupt" in job.errors


def alone(rank, folder):
    with launched(ParallelConfig(timeout=1.0), "cpu"):
        pass


def test_ranks_that_do_not_come_are_missed(tmp_path):
    job = Job(2, alone, tmp_path, started=1)
    assert "ValueError: rank 0 of 2 did not meet the others at MASTER_ADDR:MASTER_PORT (127.0.0.1:" in job.errors
    assert "1/2 clients joined" in job.errors


SCRIPT = """
import os
import torch, torch.distributed as dist
from gapless.config import ParallelConfig
from gapless.parallel.launch import launched
from gapless.parallel.watch import CommandExit
with CommandExit(), launched(ParallelConfig(timeout=20.0), "cpu") as world:
    dist.all_reduce(torch.ones(1))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if world.rank == 1:
            raise KeyError("first attempt")
        world.share("never", 1)
    print(f"rank {world.local_rank} of {world.size} made it: {world.share('all', world.rank)}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_torchrun_and_its_restarts(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 made it: [0, 1]" for rank in (0, 1)]
    said = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert said[-2:] == [
        "rank 1: KeyError: 'first attempt'",
        "rank 0: stopped because rank 1 failed: KeyError: 'first attempt'",
    ]


# ---- the launcher's variables ----

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def test_a_place_in_the_job():
    place = read_environment(GOOD)
    assert (place.rank, place.size, place.local_rank) == (1, 2, 1)


@pytest.mark.parametrize(
    "variables", [{}, {"MASTER_ADDR": "a"}, {"WORLD_SIZE": "1"}, {**GOOD, "RANK": "0", "WORLD_SIZE": "1"}]
)
def test_one_process_needs_no_group(variables, monkeypatch):
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with launched(CONFIG, "cpu") as world:
        assert (world.rank, world.local_rank, world.size) == (0, 0, 1)
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LOCAL_RANK": None}, "LOCAL_RANK (the number of the process on its node; under srun: LOCAL_RANK=$SLURM_LOCA"),
        ({"WORLD_SIZE": None}, "RANK is set but WORLD_SIZE ("),
        ({"WORLD_SIZE": None, "RANK": None}, "LOCAL_RANK is set but WORLD_SIZE ("),
        ({"RANK": None}, "WORLD_SIZE is set but RANK ("),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE is set but MASTER_ADDR ("),
        ({"MASTER_PORT": None}, "WORLD_SIZE is set but MASTER_PORT ("),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'; it must be a number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; it must be a number of at least 1"),
        ({"RANK": "-1"}, "RANK is '-1'; it must be a number of at least 0"),
        ({"RANK": "2"}, "RANK 2 must be less than WORLD_SIZE 2"),
        ({"WORLD_SIZE": "1"}, "RANK is '1' but WORLD_SIZE is 1"),
    ],
)
def test_half_set_variables_are_refused(change, message):
    variables = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        read_environment(variables)
    assert "\n" not in str(refusal.value)


def test_a_process_without_its_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="LOCAL_RANK is 2 but this process sees 2 GPUs; start at most 2"):
        launch._take_device("cuda", 2)


# ---- signs of life ----


def test_an_ended_process_is_gone_before_it_is_reaped():
    child = subprocess.Popen([sys.executable, "-c", "print(input())"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    here = Process.here()
    state = launch.Process(here.node, child.pid, _started(child.pid))
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


def _started(number):
    from gapless.parallel.processes import _state

    return _state(number)[1]


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
