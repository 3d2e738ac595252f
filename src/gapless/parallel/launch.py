"""The start and the end of a job: torchrun's variables, the process group, the World.

    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT

Whatever sets these starts a job: torchrun, accelerate launch, srun and mpirun with a wrapper.
"""

from __future__ import annotations

import os
import socket
import time
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
from gapless.parallel.world import World, await_keys, share

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_HINTS = {
    "LOCAL_RANK": "the number of the process on its node; under srun: LOCAL_RANK=$SLURM_LOCALID",
    "RANK": "the number of the process in the job; under srun: RANK=$SLURM_PROCID",
    "WORLD_SIZE": "the number of processes of the job; under srun: WORLD_SIZE=$SLURM_NTASKS",
    "MASTER_ADDR": "the host name or address of the machine of rank 0",
    "MASTER_PORT": "a free port on the machine of rank 0, the same for all ranks",
}


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


@contextmanager
def launched(config: ParallelConfig, device_type: str) -> Generator[World]:
    """The job that this process is a part of.

    A process group that a script has made is used, and left as it is. At the end all ranks wait for each other. After a
    failure they end together (see `gapless.parallel.watch`): the rank that failed with its error, all others with
    `OtherRankFailed`.

    Args:
        config: `timeout` is read.
        device_type: cpu or cuda; with cuda this process has the GPU of its local rank, which becomes the current one.

    Raises:
        ValueError: the launcher's variables are incomplete, ranks do not find each other, or there are too few GPUs.
    """
    made = dist.is_initialized()
    place = _place_in_group() if made else read_environment(os.environ)
    if place is None:
        yield World.single()
        return
    # torch has no public name for the store of a group that others made.
    store = dist.distributed_c10d._get_default_store() if made else _meet(place, config.timeout)
    # A process may train several times with one store, and torchrun may start all processes again.
    attempt = f"gapless/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    turn = f"{attempt}/{dist.PrefixStore(f'{attempt}/turns', store).add(str(place.rank), 1)}"
    shared = JsonStore(dist.PrefixStore(f"{turn}/world", store))
    processes = _processes(shared, place, config.timeout)
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
    try:
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timedelta(seconds=timeout)))
    except dist.DistError as error:
        raise ValueError(
            f"rank {place.rank} of {place.size} did not meet the others at MASTER_ADDR:MASTER_PORT "
            f"({os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}) within parallel.timeout ({timeout:g} s): "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    return store


def _processes(store: JsonStore, place: Place, timeout: float) -> list[Process]:
    """The processes of all ranks."""
    values = share(store, "processes", place.rank, place.size, vars(Process.here()), _Deadline(timeout))
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
    on_one_node = len({process.node for process in processes}) == 1
    if on_one_node and "lo" in (name for _, name in socket.if_nameindex()):
        # gloo looks its own host name up, which may have no address, or one that nobody reaches.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device is None else "cpu:gloo,cuda:nccl",
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    yield
    dist.destroy_process_group()


class _Deadline:
    """Waits for ranks that are not known yet."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._end = timeout, time.monotonic() + timeout

    def check(self) -> None:
        """Raise ValueError when the time is over."""
        if time.monotonic() > self._end:
            raise ValueError(f"some ranks did not start training within parallel.timeout ({self._timeout:g} s)")
