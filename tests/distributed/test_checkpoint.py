"""Checkpoints of many ranks: whole or absent whichever rank dies when, the same tensors whoever wrote which part."""

import json
import os
import resource
import signal
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pool
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from gapless.checkpoint_file import Box
from gapless.config import ParallelConfig
from gapless.parallel.launch import launched
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore
from gapless.parallel.watch import OtherRankFailed
from gapless.parallel.world import World
from gapless.training import checkpoint as ckpt
from gapless.training import files
from gapless.training.checkpoint import CheckpointError, CheckpointWriter, Piece, list_checkpoints, open_newest


class Guard:
    """For ranks that are threads or forked processes: one of them has failed once a file is there."""

    def __init__(self, path):
        self.path, self.end = path, time.monotonic() + 20

    def check(self):
        assert time.monotonic() < self.end, "waited in vain"
        if self.path.exists():
            raise OtherRankFailed(0, "it was killed")


def make_world(folder, rank, size):
    store = dist.FileStore(str(folder / "store"), size)
    return World(rank, rank, [Process.here()] * size, JsonStore(store), Guard(folder / "failed"))


def run_threads(folder, size, function):
    """Call function(world) as each rank, in threads; returns what they returned or raised."""
    folder.mkdir(exist_ok=True)

    def call(rank):
        try:
            return function(make_world(folder, rank, size))
        except BaseException as error:  # noqa: BLE001 - the caller's to judge
            (folder / "failed").touch()
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "weight/a": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "master/a": torch.randn(5, 7, generator=generator),
        "exp_avg/b": torch.randn(6, generator=generator),
    }


BOXES = {
    (5, 7): [((0, 0), (2, 7), 0), ((2, 0), (5, 3), 1), ((2, 3), (3, 7), 1), ((3, 3), (5, 7), 0)],
    (6,): [((0,), (5,), 1), ((5,), (6,), 0), ((6,), (6,), 1)],
}
"""By shape: start, stop and rank of boxes in one and two dimensions, of uneven sizes, one empty, two of a rank."""


def pieces(step, rank):
    for name, tensor in tensors(step).items():
        for start, stop, owner in BOXES[tuple(tensor.shape)]:
            if owner == rank:
                box = Box(start, stop).inside(Box.at([0] * tensor.dim(), tensor.shape))
                yield Piece(name, tensor[box], start, tuple(tensor.shape))


def save(world, folder, step, **settings):
    with CheckpointWriter(folder, world, **settings) as writer:
        return writer.save(step, pieces(step, world.rank), {"loader": {"row": step}, "rank": world.rank})


def assert_is(checkpoint, step):
    found = dict(checkpoint.tensors())
    state = {"step": step, "loader": {"row": step}, "rank": 0}
    assert (checkpoint.step, checkpoint.state) == (step, state)
    assert found.keys() == tensors(step).keys()
    for name, tensor in tensors(step).items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_write_their_pieces(tmp_path, asynchronous):
    """Three ranks, one with nothing; a save after the other."""
    keys = []

    def run(world):
        with CheckpointWriter(tmp_path / "out", world, keep=2, asynchronous=asynchronous) as writer:
            for step in (1, 2, 3):
                writer.save(step, pieces(step, world.rank), {"loader": {"row": step}, "rank": world.rank})
        keys.append(world._store._store.num_keys())

    assert run_threads(tmp_path / "job", 3, run) == [None] * 3
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == ["step-000002", "step-000003"]
    assert_is(open_newest(tmp_path / "out"), 3)
    # A box of a tensor in a file; no part of an index is left.
    assert sorted(path.name for path in (tmp_path / "out" / "step-000003").iterdir()) == [
        "index.json",
        *(f"rank{rank}-0000{file}.safetensors" for rank in range(2) for file in range(1, 4)),
        "state.json",
    ]
    # Marks of one save at a time are in the store (which counts one of its own).
    assert max(keys) <= 2 * 4 + 1


def test_two_processes_of_a_real_job(tmp_path):
    assert pool.run(2, write_in_job, tmp_path) == [str(tmp_path / "step-000002")] * 2
    assert_is(open_newest(tmp_path), 2)
    boxes = [((0, 0), (3, 4)), ((0, 4), (3, 3)), ((3, 0), (2, 4)), ((3, 4), (2, 3))]
    for found, (start, shape) in zip(pool.run(4, read_in_job, tmp_path, boxes), boxes, strict=True):
        assert torch.equal(found, tensors(2)["master/a"][Box.at(start, shape).inside(Box((0, 0), (5, 7)))])


def write_in_job(rank, size, folder):
    with launched(ParallelConfig(), "cpu") as world, CheckpointWriter(folder, world, asynchronous=True) as writer:
        for step in (1, 2):
            path = writer.save(step, pieces(step, rank), {"loader": {"row": step}, "rank": rank})
    return str(path)


def read_in_job(rank, size, folder, boxes):
    with launched(ParallelConfig(), "cpu") as world:
        return open_newest(folder, world).read("master/a", *boxes[rank])


# ---- what can go wrong ----


@pytest.mark.parametrize("spoil", ["gap", "overlap", "outside"])
def test_pieces_that_do_not_fill_a_tensor_are_not_published(tmp_path, spoil):
    def run(world):
        mine = list(pieces(1, world.rank))
        if world.rank == 1:
            last = mine[-1]
            assert last.full_shape == (6,)
            if spoil == "gap":
                mine.pop(-2)
            if spoil == "overlap":
                mine.append(Piece(last.name, torch.zeros(1), (3,), (6,)))
            if spoil == "outside":
                mine[-2] = Piece(last.name, torch.zeros(5), (2,), (6,))
        CheckpointWriter(tmp_path / "out", world).save(1, mine, {})

    first, second = run_threads(tmp_path / "job", 2, run)
    assert isinstance(first, CheckpointError)
    assert "the pieces of exp_avg/b that the ranks wrote do not fill its shape [6]" in str(first)
    assert isinstance(second, OtherRankFailed)
    assert list_checkpoints(tmp_path / "out") == []


def test_a_folder_that_only_rank_0_sees_is_refused(tmp_path):
    first, second = run_threads(tmp_path / "job", 2, lambda world: save(world, tmp_path / str(world.rank), 1))
    assert isinstance(first, OtherRankFailed)
    assert isinstance(second, CheckpointError)
    assert "must be on a file system that all nodes share" in str(second)


def test_damage_that_one_rank_finds_is_told_by_all(tmp_path):
    run_threads(tmp_path / "job", 2, lambda world: save(world, tmp_path / "out", 1))
    path = tmp_path / "out" / "step-000001" / "rank1-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def run(world):
        with pytest.raises(CheckpointError) as error:
            open_newest(tmp_path / "out", world)
        return str(error.value)

    first, second = run_threads(tmp_path / "again", 2, run)
    assert first == second
    assert f"{path} is damaged" in first
    assert first.endswith(f"delete {path.parent} to start again")


def fork(folder, rank, size, function):
    """Run function(world) in a forked process; exit code 0, 3 if another rank failed, 4 for a CheckpointError."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(make_world(folder, rank, size))
        code = 0
    except OtherRankFailed:
        code = 3
    except CheckpointError as error:
        (folder / f"error{rank}").write_text(str(error))
        code = 4
    finally:
        os._exit(code)


def run_processes(folder, function, size=2):
    """Run the ranks of a job, which hear of it as soon as one fails. Returns exit codes by rank, -9 for a kill."""
    folder.mkdir()
    ranks = {fork(folder, rank, size, function): rank for rank in range(size)}
    codes = [0] * size
    for _ in range(size):
        child, status = os.wait()
        codes[ranks[child]] = os.waitstatus_to_exitcode(status)
        if status:
            (folder / "failed").touch()
    return codes


class KillAt:
    """A fault hook that kills its process at the n-th point."""

    def __init__(self, count):
        self.count = count

    def __call__(self, point):
        self.count -= 1
        if self.count < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def record_points(folder):
    """The points that each of two ranks passes in a save that also prunes."""
    points = [[], []]
    for step in (1, 2):
        faults = points if step == 2 else [[], []]
        run_threads(
            folder / str(step),
            2,
            lambda world: save(world, folder, step, keep=1, fault=faults[world.rank].append),  # noqa: B023
        )
    return points


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    return record_points(tmp_path_factory.mktemp("recorded"))


RANK_0 = [*(f"rank0-0000{n}.safetensors written" for n in range(1, 4)), "all ranks done", "index merged"]
RANK_0 += ["state written", "index written", "folder synced", "renamed", "pruned one"]
RANK_1 = [*(f"rank1-0000{n}.safetensors written" for n in range(1, 4)), "rank index written", "rank done"]


def test_points(points):
    assert points == [RANK_0, RANK_1]


CASES = [(rank, point, False) for rank, names in enumerate([RANK_0, RANK_1]) for point in names]
CASES += [
    (0, "rank0-00001.safetensors written", True),
    (0, "index merged", True),
    (0, "renamed", True),
    (1, "rank index written", True),
]


@pytest.mark.parametrize(("victim", "point", "asynchronous"), CASES)
def test_a_kill_of_any_rank_at_any_point_leaves_one_checkpoint(tmp_path, victim, point, asynchronous):
    out = tmp_path / "out"
    run_threads(tmp_path / "first", 2, lambda world: save(world, out, 1))
    index = [RANK_0, RANK_1][victim].index(point)

    def run(world):
        fault = KillAt(index) if world.rank == victim else ckpt.no_fault
        with CheckpointWriter(out, world, keep=1, fault=fault, asynchronous=asynchronous) as writer:
            writer.save(2, pieces(2, world.rank), {"loader": {"row": 2}, "rank": world.rank})

    codes = run_processes(tmp_path / "second", run)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] in ((0, 3) if point == "rank done" else (3,))
    checkpoint = open_newest(out)
    # With its last mark a rank has done its part: whether rank 0 hears of the death first is a race.
    if point != "rank done":
        assert checkpoint.step == (2 if point in ("renamed", "pruned one") else 1)
    assert_is(checkpoint, checkpoint.step)
    files.clear_temporary(out)
    run_threads(tmp_path / "third", 2, lambda world: save(world, out, 3, keep=1))
    assert_is(open_newest(out), 3)
    assert [path.name for path in out.iterdir()] == ["step-000003"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_on_one_rank_ends_all_and_keeps_the_last_checkpoint(tmp_path, victim, asynchronous):
    out = tmp_path / "out"
    run_threads(tmp_path / "first", 2, lambda world: save(world, out, 1))

    def run(world):
        if world.rank == victim:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        with CheckpointWriter(out, world, asynchronous=asynchronous) as writer:
            big = Piece("weight/a", torch.zeros(1, 1 << 12), (world.rank, 0), (2, 1 << 12))
            writer.save(2, [big], {})

    codes = run_processes(tmp_path / "second", run)
    assert codes[victim] == 4
    assert codes[1 - victim] == 3
    message = (tmp_path / "second" / f"error{victim}").read_text()
    assert f"cannot write {out / 'step-000002'}: File too large" in message
    assert message.endswith("(it goes on from step-000001)")
    assert_is(open_newest(out), 1)
    files.clear_temporary(out)
    assert [path.name for path in out.iterdir()] == ["step-000001"]


class Gate:
    """A fault hook at which whoever writes waits, at one point or at the first: a slow disk."""

    def __init__(self, point=None):
        self.point, self.opened, self.reached = point, threading.Event(), threading.Event()
        self.passed = []

    def __call__(self, point):
        self.passed.append(point)
        if self.point in (None, point):
            self.reached.set()
            assert self.opened.wait(10)


def test_a_rank_that_outlives_its_job_writes_into_no_folder_of_the_next(tmp_path):
    """The other rank was killed; the next job saves the same step while this one still writes."""
    out, gate = tmp_path / "out", Gate("rank1-00001.safetensors written")

    def killed(world):
        with CheckpointWriter(out, world, fault=gate if world.rank else ckpt.no_fault) as writer:
            mine = [replace(piece, tensor=torch.zeros_like(piece.tensor)) for piece in pieces(1, world.rank)]
            if world.rank == 0:
                writer._write_pieces = lambda *_: gate.reached.wait(10) and 1 / 0
            writer.save(1, mine, {})

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(run_threads, tmp_path / "killed", 2, killed)
        assert gate.reached.wait(10)
        files.clear_temporary(out)

        def straggle(point):
            if point == "all ranks done":
                gate.opened.set()
                assert isinstance(first.result(10)[1], CheckpointError)  # its folder is gone

        run_threads(
            tmp_path / "next", 2, lambda world: save(world, out, 1, fault=ckpt.no_fault if world.rank else straggle)
        )
    assert_is(open_newest(out), 1)


# ---- asynchronous ----


def test_an_asynchronous_save_is_of_the_moment_it_was_called(tmp_path):
    gate, now = Gate(), tensors(1)
    state = {"loader": {"row": 1}, "rank": 0}

    def given():
        yield from (Piece.whole(name, tensor) for name, tensor in now.items())
        state["loader"]["row"] = 7

    with CheckpointWriter(tmp_path, World.single(), fault=gate, asynchronous=True) as writer:
        path = writer.save(1, given(), state)
        for tensor in now.values():
            tensor.zero_()
        assert gate.reached.wait(10)
        writer.poll()
        assert not path.exists()  # the training goes on
        assert not writer.idle
        gate.opened.set()
        writer.finish()
        assert writer.idle
        assert_is(open_newest(tmp_path), 1)


def test_a_save_waits_for_the_one_before(tmp_path):
    gate = Gate()
    with CheckpointWriter(tmp_path, World.single(), fault=gate, asynchronous=True) as writer:
        writer.save(1, [Piece.whole("weight/a", torch.ones(2))], {})
        assert gate.reached.wait(10)
        opener = threading.Timer(0.1, gate.opened.set)
        opener.start()
        began = time.perf_counter()
        writer.save(2, [Piece.whole("weight/a", torch.ones(2))], {})
        assert time.perf_counter() - began > 0.05
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]


def test_an_error_in_the_thread_is_raised_at_the_next_call(tmp_path):
    (tmp_path / "file").touch()
    for call in (
        CheckpointWriter.poll,
        CheckpointWriter.finish,
        partial(CheckpointWriter.save, step=2, pieces=[], state={}),
    ):
        writer = CheckpointWriter(tmp_path / "file", World.single(), asynchronous=True)
        writer.save(1, [], {})
        writer._task.join()
        with pytest.raises(CheckpointError, match="cannot write"):
            call(writer)
        writer.finish()  # told once


def test_an_error_of_the_training_lets_the_save_finish(tmp_path):
    gate = Gate()
    with (
        suppress(ZeroDivisionError),
        CheckpointWriter(tmp_path, World.single(), fault=gate, asynchronous=True) as writer,
    ):
        writer.save(1, [Piece.whole("weight/a", torch.ones(2))], {})
        threading.Timer(0.1, gate.opened.set).start()
        1 / 0  # noqa: B018
    assert open_newest(tmp_path).step == 1


def test_an_error_of_one_of_many_ranks_does_not_wait_for_the_save(tmp_path):
    """What this rank waits for may never come: another one is perhaps stuck because of the error."""
    gate, left, tasks = Gate(), threading.Event(), []

    def run(world):
        slow = gate if world.rank == 1 else ckpt.no_fault
        try:
            with CheckpointWriter(tmp_path / "out", world, fault=slow, asynchronous=True) as writer:
                writer.save(1, pieces(1, world.rank), {})
                tasks.append(writer._task)
                assert gate.reached.wait(10)
                if world.rank == 0:
                    raise ZeroDivisionError
                assert left.wait(5)
                gate.opened.set()
                tasks[0].join()
        finally:
            left.set()

    first, second = run_threads(tmp_path / "job", 2, run)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, OtherRankFailed)
    assert list_checkpoints(tmp_path / "out") == []


def interrupt(folder, point, step):
    """Begin a save, be interrupted at a point of it; returns the gate and the thread that is still there."""
    gate = Gate(point)
    with (
        suppress(KeyboardInterrupt),
        CheckpointWriter(folder, World.single(), keep=1, fault=gate, asynchronous=True) as writer,
    ):
        writer.save(step, [Piece("weight/a", torch.ones(2), (start,), (6,)) for start in (0, 2, 4)], {})
        task = writer._task
        assert gate.reached.wait(10)
        raise KeyboardInterrupt
    return gate, task


POINTS = ["rank0-00001.safetensors written", "state written", "index written", "folder synced", "renamed"]


@pytest.mark.parametrize("point", POINTS)
def test_ctrl_c_does_not_wait_and_nothing_is_published_or_removed_later(tmp_path, point):
    run_threads(tmp_path / "job", 1, lambda world: CheckpointWriter(tmp_path / "out", world).save(1, [], {}))
    gate, task = interrupt(tmp_path / "out", point, 2)
    before, passed = list_checkpoints(tmp_path / "out"), [*gate.passed]
    assert task.is_alive()
    gate.opened.set()
    task.join(10)
    assert [path.name for path in list_checkpoints(tmp_path / "out")] == [path.name for path in before]
    assert len(before) == (2 if point == "renamed" else 1)
    assert len(list((tmp_path / "out").iterdir())) == len(before)  # nothing half-written stays either
    if point == "rank0-00001.safetensors written":
        assert gate.passed == passed  # no other of its three files was begun


@pytest.mark.parametrize("point", POINTS)
def test_the_thread_of_an_interrupted_run_leaves_the_next_one_alone(tmp_path, point):
    """In a notebook: the next run writes the same step when the disk lets the thread go on."""
    gate, task = interrupt(tmp_path, point, 2)
    files.clear_temporary(tmp_path)

    def go_on(at):
        if at == "rank0-00001.safetensors written":
            before = sorted(tmp_path.rglob("*"))
            gate.opened.set()
            task.join(10)
            assert sorted(tmp_path.rglob("*")) == before

    with CheckpointWriter(tmp_path, World.single(), fault=go_on) as writer:
        writer.save(2, (Piece.whole(name, tensor) for name, tensor in tensors(2).items()), {"loader": {"row": 2}})
    assert open_newest(tmp_path).state["loader"] == {"row": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_an_interrupt_of_the_wait_at_the_end_gives_up_too(tmp_path, monkeypatch):
    gate = Gate()

    def interrupted(task):
        raise KeyboardInterrupt

    for kind in (None, ZeroDivisionError):
        with (
            monkeypatch.context() as patch,
            suppress(KeyboardInterrupt, ZeroDivisionError),
            CheckpointWriter(tmp_path, World.single(), fault=gate, asynchronous=True) as writer,
        ):
            writer.save(1, [Piece.whole("weight/a", torch.ones(2))], {})
            task = writer._task
            patch.setattr(type(task), "join", interrupted)
            if kind:
                raise kind
        gate.opened.set()
        threading.Thread.join(task, 10)
        assert list_checkpoints(tmp_path) == []


# ---- memory ----


class Counted:
    """Makes tensors of 1000 bytes and knows how many of them have memory."""

    def __init__(self):
        self.arrays = []

    def tensor(self, value):
        array = np.full(250, value, dtype=np.float32)
        self.arrays.append(weakref.ref(array))
        return torch.from_numpy(array)  # whose storage keeps the array

    def alive(self):
        return sum(array() is not None for array in self.arrays)


def test_no_more_than_the_pieces_of_a_file_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_FILE_BYTES", 4000)
    counted, alive = Counted(), []

    def made():
        for number in range(20):
            tensor = counted.tensor(number)
            alive.append(counted.alive())
            yield Piece(f"weight/{number}", tensor, (0,), (250,))

    with CheckpointWriter(tmp_path, World.single()) as writer:
        path = writer.save(1, made(), {})
    assert len(list(path.glob("*.safetensors"))) == 5
    assert max(alive) == 4


def test_copies_are_given_back_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_FILE_BYTES", 4000)
    counted, alive, plain = Counted(), [], ckpt._copies

    def copies(pieces):
        return deque(replace(piece, tensor=counted.tensor(float(piece.tensor[0]))) for piece in plain(pieces))

    monkeypatch.setattr(ckpt, "_copies", copies)
    with CheckpointWriter(
        tmp_path, World.single(), fault=lambda _: alive.append(counted.alive()), asynchronous=True
    ) as writer:
        writer.save(1, (Piece.whole(f"weight/{n}", torch.full((250,), float(n))) for n in range(20)), {})
    assert alive[:5] == [17, 13, 9, 5, 1]  # the piece just written is still in hand
    assert torch.equal(open_newest(tmp_path).read("weight/7"), torch.full((250,), 7.0))


def test_the_bytes_are_those_of_safetensors(tmp_path):
    whole = tensors(1) | {"weight/scalar": torch.tensor(2.0), "weight/half": torch.randn(2).half()}
    with CheckpointWriter(tmp_path, World.single()) as writer:
        path = writer.save(1, (Piece.whole(name, tensor) for name, tensor in whole.items()), {})
    found = load_file(path / "rank0-00001.safetensors")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    header = (path / "rank0-00001.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert size % 8 == 0
    assert {
        entry["data_offsets"][0] % 4 for entry in json.loads(header[8 : 8 + size]).values() if entry["dtype"] == "F32"
    } == {0}
