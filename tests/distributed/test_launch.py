"""The start of a job: its World, its turn in the store, the launcher's variables."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest
import torch
import torch.distributed as dist
from pool import run
from ranks import CONFIG, Job, all_reduce, nothing

from gapless.config import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from gapless.parallel import launch
from gapless.parallel.launch import launched, read_environment
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore
from gapless.parallel.watch import NOTE, OtherRankFailed
from gapless.parallel.world import World
from gapless.training.start import start_facts


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The process that all others are forked from has torch."""
    run(2, nothing)


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
    all_reduce()
    return heard, left


def _names(world, size):
    """Keys of `share` and `first` that are still there."""
    names = ("numbers", "made", "meanwhile")
    calls = [f"call/{name}/{call}/{end}" for name in names for call in (1, 2) for end in range(size)]
    return [key for key in calls if world._store.has([key])]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_talk_in_the_group_of_a_script(size):
    for heard, left in run(size, talk):
        assert heard == list(range(size))
        assert left == [f"call/meanwhile/1/{rank}" for rank in range(size)]


def test_one_process_is_a_world_of_its_own(monkeypatch):
    monkeypatch.setattr(Process, "here", None)  # which asks the system for what may be forbidden
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
        '3 has "abc", ranks 0, 1, 2 have "abd"; start all with the same files, settings and versions'
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
            all_reduce()
            assert world.share("rank", rank) == [0, 1]
        assert not dist.is_initialized()


def test_a_job_may_train_twice(tmp_path):
    job = Job(2, twice, tmp_path)
    assert (job.codes, job.errors) == ([0, 0], "")


def take_turns(turns):
    """The turns that ranks come to, each once it is told to come."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    clients = [dist.TCPStore("127.0.0.1", server.port) for _ in range(2)]
    taken = []
    with futures.ThreadPoolExecutor(8) as pool:
        for ranks in turns:
            places = [launch.Place(rank, 2, rank) for rank in ranks]
            deadline = launch._Deadline(20.0 if len(ranks) == 2 else 0.2)
            calls = [
                pool.submit(launch._take_turn, JsonStore(clients[place.rank]), place, deadline) for place in places
            ]
            taken.append([call.exception() or call.result() for call in calls])
    return taken


def test_ranks_take_the_same_turn_whatever_ended_ranks_have_left():
    """Each comes alone at first, for ranks that are ended at the start leave words, and turns without an end."""
    both, alone = (0, 1), [(1,), (0,), (0,), (1,)]
    taken = take_turns([*alone, both, both, (1,), both, both[::-1]])
    assert [turn for turn in taken if len(turn) == 2] == [[3, 3], [4, 4], [5, 5], [6, 6]]
    missed = "some ranks did not start training within parallel.timeout (0.2 s)"
    assert [str(turn[0]) for turn in taken if len(turn) == 1] == [missed] * 5


def fail_and_go_on(rank, folder):
    with contextlib.suppress(KeyError, OtherRankFailed), launched(CONFIG, "cpu") as world:
        if rank == 1:
            raise KeyError("a")
        world.share("never", 1)
    with pytest.raises(ValueError, match="training has failed in this process before; start all processes again"):
        launched(CONFIG, "cpu").__enter__()
    dist.destroy_process_group()
    with launched(CONFIG, "cpu") as world:
        assert world.share("rank", rank) == [0, 1]


def test_the_group_of_a_job_that_failed_is_not_used_again(tmp_path):
    job = Job(2, fail_and_go_on, tmp_path)
    assert job.codes == [0, 0], job.errors


def loopback(rank, folder):
    name = "GLOO_SOCKET_IFNAME"
    os.environ.pop(name, None)
    with launched(CONFIG, "cpu"):
        assert os.environ[name] == "lo"
        assert dist.get_rank(dist.new_group([0, 1])) == rank
    assert name not in os.environ
    with contextlib.suppress(KeyError, OtherRankFailed), launched(CONFIG, "cpu"):
        raise KeyError
    assert name not in os.environ


@pytest.mark.skipif("lo" not in (name for _, name in socket.if_nameindex()), reason="no loopback interface")
def test_the_interface_of_gloo_is_chosen_for_the_job_alone(tmp_path):
    job = Job(2, loopback, tmp_path)
    assert job.codes == [0, 0], job.errors


def slow_first(rank, folder):
    with launched(ParallelConfig(timeout=2.0), "cpu") as world:
        all_reduce()
        assert world.first("slow", lambda: time.sleep(3.0) or "done") == "done"
        all_reduce()


@pytest.mark.slow  # at once there is the tokenising of test_kills.py
def test_what_one_rank_does_for_all_may_take_longer_than_the_timeout(tmp_path):
    assert Job(2, slow_first, tmp_path).codes == [0, 0]


def alone(rank, folder):
    launch._SILENT = 0.3
    with launched(ParallelConfig(timeout=1.0), "cpu"):
        pass


def test_ranks_that_do_not_come_are_missed(tmp_path):
    job = Job(2, alone, tmp_path, started=1)
    assert "ValueError: rank 0 of 2 did not meet the others at MASTER_ADDR:MASTER_PORT (127.0.0.1:" in job.errors
    assert "1/2 clients joined" in job.errors
    assert "rank 0 waits at 127.0.0.1:" in job.errors


def test_a_port_in_use_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"the port of 127.0.0.1:{port} is in use; choose another MASTER_PORT"):
            launch._meet(launch.Place(0, 2, 0), 1.0)


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


ELASTIC = """
import os, sys, time
from pathlib import Path
from gapless.config import ParallelConfig
from gapless.parallel.launch import launched
from gapless.parallel.watch import CommandExit
node, folder = sys.argv[1], Path(sys.argv[2])
with CommandExit(), launched(ParallelConfig(timeout=20.0), "cpu") as world:
    number = len(list(folder.glob(f"{node}-*")))
    (folder / f"{node}-{number}").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    world.meet("begun")
    if number < 2:
        if node == "b":
            raise KeyError(f"attempt {number}")
        time.sleep(300.0)  # stuck, as in a collective of GPUs
    print(f"node {node} made it: {world.share('all', number)}", flush=True)
"""


@pytest.mark.slow
def test_two_nodes_start_again_though_each_counts_by_itself(tmp_path):
    """The agent of the node that fails counts a restart, that of the other only sees it come again."""
    (tmp_path / "script.py").write_text(ELASTIC)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", str(tmp_path / "script.py")]
    with contextlib.ExitStack() as opened:
        agents = []
        for node in ("a", "b"):
            said = opened.enter_context((tmp_path / f"said-{node}").open("w"))
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            arguments = [sys.executable, *command, node, str(tmp_path)]
            agents.append(subprocess.Popen(arguments, stdout=said, stderr=said, env=environment))
            opened.callback(agents[-1].kill)
        codes = [agent.wait(120) for agent in agents]
    said = [(tmp_path / f"said-{node}").read_text() for node in ("a", "b")]
    assert codes == [0, 0], said
    assert all(f"node {node} made it: [2, 2]\n" in text for node, text in zip("ab", said, strict=True))
    counts = [[(tmp_path / f"{node}-{number}").read_text() for number in range(3)] for node in "ab"]
    assert counts[1] == ["0", "1", "2"]
    assert counts[0] != counts[1]  # else this shows nothing


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
