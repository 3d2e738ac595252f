"""The start and the end of a job: torchrun's variables, the process group, the World.

    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT

Whatever sets these starts a job: torchrun, accelerate launch, srun and mpirun with a wrapper.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from gapless.config import ParallelConfig
from gapless.parallel.log import RankLog
from gapless.parallel.processes import Process
from gapless.parallel.store import JsonStore
from gapless.parallel.watch import Watch
from gapless.parallel.world import Guard, World, await_keys, share

_SILENT = 10.0
"""Seconds of waiting for the other processes after which it is said."""
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_HINTS = {
    "LOCAL_RANK": "the number of the process on its node; under srun: LOCAL_RANK=$SLURM_LOCALID",
    "RANK": "the number of the process in the job; under srun: RANK=$SLURM_PROCID",
    "WORLD_SIZE": "the number of processes of the job; under srun: WORLD_SIZE=$SLURM_NTASKS",
    "MASTER_ADDR": "the host name or address of the machine of rank 0",
    "MASTER_PORT": "a free port on the machine of rank 0, the same for all ranks",
}
_PAUSE = 0.02
"""Seconds between two looks for the turn to begin."""
_left: weakref.ref[dist.ProcessGroup] | None = None
"""The process group of a job that failed in this process, which only its script can have survived."""


@dataclass(frozen=True)
class Place:
    """What the launcher says of this process."""

    rank: int
    size: int
    local_rank: int | None
    """None where it is not given."""


def read_environment(variables: Mapping[str, str]) -> Place | None:
    """The place of this process; None for one process that no launcher started, or that is alone.

    Raises:
        ValueError: a variable is missing, no number, or out of range.
    """
    if "WORLD_SIZE" not in variables:
        for name in ("RANK", "LOCAL_RANK"):
            if name in variables:
                raise ValueError(f"{name} is set but WORLD_SIZE ({_HINTS['WORLD_SIZE']}) is not; {_remedy()}")
        return None
    size = _number(variables, "WORLD_SIZE", 1)
    if size == 1:
        if variables.get("RANK", "0") != "0":
            raise ValueError(f"RANK is {variables['RANK']!r} but WORLD_SIZE is 1; {_remedy()}")
        return None
    rank, local_rank = _number(variables, "RANK", 0), _number(variables, "LOCAL_RANK", 0)
    if rank >= size:
        raise ValueError(f"RANK {rank} must be less than WORLD_SIZE {size}; {_remedy()}")
    _required(variables, "MASTER_ADDR")
    _number(variables, "MASTER_PORT", 1)
    return Place(rank, size, local_rank)


def _number(variables: Mapping[str, str], name: str, least: int) -> int:
    text = _required(variables, name)
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{name} is {text!r}; it must be a number of at least {least} ({_HINTS[name]})")
    return int(text)


def _required(variables: Mapping[str, str], name: str) -> str:
    if not variables.get(name):
        raise ValueError(f"WORLD_SIZE is set but {name} ({_HINTS[name]}) is not; {_remedy()}")
    return variables[name]


def _remedy() -> str:
    return f"start all processes with torchrun, which sets {', '.join(_RANKS)}, MASTER_ADDR and MASTER_PORT"


def refuse_others(what: str, *, remedy: str, main: bool = True) -> None:
    """Refuse work of one process where a launcher has started several.

    Args:
        what: the work.
        remedy: what to do.
        main: whether rank 0 is refused as well.

    Raises:
        ValueError: names the rank.
    """
    place = read_environment(os.environ)
    if place is not None and (main or place.rank > 0):
        raise ValueError(f"{what} is the work of one process, and this is rank {place.rank} of {place.size}; {remedy}")


@contextmanager
def launched(config: ParallelConfig, device_type: str) -> Generator[World]:
    """The job that this process is a part of.

    A process group that a script has made is used, and left as it is. At the end all ranks wait for each other. After a
    failure they end together (see `gapless.parallel.watch`): the rank that failed, and those that failed alike, with
    their error, all others with `OtherRankFailed`.

    Args:
        config: `timeout` is read.
        device_type: cpu or cuda; with cuda this process has the GPU of its local rank, which becomes the current one.

    Raises:
        ValueError: the launcher's variables are incomplete, ranks do not find each other, there are too few GPUs, or a
            job failed in this process before.
    """
    made = dist.is_initialized()
    if made and _left is not None and dist.group.WORLD is _left():
        raise ValueError(
            "training has failed in this process before; start all processes again, or call "
            "torch.distributed.destroy_process_group() on all ranks first (it may hang where a GPU is stuck)"
        )
    place = _place_in_group() if made else read_environment(os.environ)
    if place is None:
        yield World.single()
        return
    # torch has no public name for the store of a group that others made.
    store = dist.distributed_c10d._get_default_store() if made else _meet(place, config.timeout)
    deadline = _Deadline(config.timeout)
    turn = f"gapless/{_take_turn(JsonStore(dist.PrefixStore('gapless/turns', store)), place, deadline)}"
    shared = JsonStore(dist.PrefixStore(f"{turn}/world", store))
    processes = _processes(shared, place, deadline)
    local_rank = _index_on_node(processes, place.rank) if place.local_rank is None else place.local_rank
    log = RankLog()
    with closing(log), Watch(shared, place.rank, processes, timeout=config.timeout, log=log) as watch:
        device = _take_device(device_type, local_rank)
        group = _process_group(place, dist.PrefixStore(f"{turn}/group", store), device, processes, config.timeout)
        with nullcontext() if made else group:
            world = World(place.rank, local_rank, processes, shared, watch, log)
            yield world
            watch.done()
            # Not a share: one that is killed after `done` must not be waited for.
            await_keys(shared, [f"done/{rank}" for rank in range(place.size)], watch)


def _place_in_group() -> Place | None:
    """This process's place in the group of a script."""
    if dist.get_world_size() == 1:
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    return Place(dist.get_rank(), dist.get_world_size(), int(local_rank) if local_rank.isdecimal() else None)


@cache
def _meet(place: Place, timeout: float) -> dist.Store:
    """The store of the job; its server, if this process has it, serves as long as the process lives."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = f"rank {place.rank} waits at {where} for all of the {place.size} processes to start\n"
    waiting = threading.Timer(_SILENT, sys.stderr.write, [text])
    waiting.daemon = True
    waiting.start()
    try:
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=timeout)))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"the port of {where} is in use; choose another MASTER_PORT, the same for all ranks"
            ) from error
        raise ValueError(
            f"rank {place.rank} of {place.size} did not meet the others at MASTER_ADDR:MASTER_PORT ({where}) within "
            f"parallel.timeout ({timeout:g} s); see what the other processes say: {str(error).partition(chr(10))[0]}"
        ) from error
    finally:
        waiting.cancel()
    return store


def _take_turn(store: JsonStore, place: Place, deadline: Guard) -> int:
    """A number for this job's keys in the store, the same on all ranks and used by no job before it.

    The store outlives jobs. A process may train several times, and torchrun may start all processes again: under other
    ranks, and each node counts its restarts by itself. So ranks have nothing to count by. Instead rank 0 opens a turn,
    each rank says a word that was never used, and those whose words rank 0 has read go on. A word that it has not read
    came after a job that is over, or before one that never began: its rank says it again in the next turn.
    """
    word = uuid.uuid4().hex
    if place.rank == 0:
        turn = store.add("newest", 1)
        keys = [f"{turn}/word/{rank}" for rank in range(place.size)]
        store.set(keys[0], word)
        await_keys(store, keys, deadline)
        store.set(f"{turn}/words", store.get(keys))
        return turn
    turn = 0
    while True:
        newest = store.add("newest", 0)
        if newest != turn:
            turn = newest
            store.set(f"{turn}/word/{place.rank}", word)
        if store.has([f"{turn}/words"]) and word in store.get([f"{turn}/words"])[0]:
            return turn
        deadline.check()
        time.sleep(_PAUSE)


def _processes(store: JsonStore, place: Place, deadline: Guard) -> list[Process]:
    """The processes of all ranks."""
    values = share(store, "processes", place.rank, place.size, vars(Process.here()), deadline)
    return [Process(**value) for value in values]


def _index_on_node(processes: Sequence[Process], rank: int) -> int:
    return sum(process.node == processes[rank].node for process in processes[:rank])


def _take_device(device_type: str, local_rank: int) -> torch.device | None:
    """The GPU of this process, made the current one; None on a CPU."""
    if device_type != "cuda":
        return None
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank} but this process sees {count} GPUs; start at most {count} processes on this "
            "node, or let each see all GPUs of the node (srun --gpu-bind=none)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def _process_group(
    place: Place, store: dist.Store, device: torch.device | None, processes: Sequence[Process], timeout: float
) -> Generator[None]:
    """The default process group. After an error it is left to the end of the process: to destroy it might hang."""
    global _left
    alone = len({process.node for process in processes}) == 1
    with _gloo_on_loopback() if alone else nullcontext():
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )
        group = dist.group.WORLD
        assert group is not None
        _left = weakref.ref(group)
        yield
    dist.destroy_process_group()


@contextmanager
def _gloo_on_loopback() -> Generator[None]:
    """Groups that are made meanwhile talk over the loopback interface, if there is one and no other was asked for.

    By itself gloo looks its own host name up, which may have no address, or one that nobody reaches.
    """
    name, interfaces = "GLOO_SOCKET_IFNAME", [interface for _, interface in socket.if_nameindex()]
    if name in os.environ or "lo" not in interfaces:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


class _Deadline:
    """Bounds the wait for ranks that are not known yet."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._end = timeout, time.monotonic() + timeout

    def check(self) -> None:
        """Raise ValueError when the time is over."""
        if time.monotonic() > self._end:
            raise ValueError(f"some ranks did not start training within parallel.timeout ({self._timeout:g} s)")
