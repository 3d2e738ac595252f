"""Groups of gloo processes that run one function after the other, forked once from a process that has imported torch.

`run(world, function, *args)` gives every rank's result. Each call has a process group of its own, so that a case that
fails leaves nothing behind for the next; processes that hang, die or raise are replaced.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

# Loaded on the first use of some operations: once here instead of in every child.
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor

TIMEOUT = 60.0
"""Seconds that a case may take; its collectives wait for half of that unless told."""

_CONTEXT = multiprocessing.get_context("forkserver")
_groups: dict[int, list[tuple[multiprocessing.Process, connection.Connection]]] = {}


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def run(world, function, *args, timeout=TIMEOUT, collective=None, backend="gloo"):
    """Call function(rank, world, *args) in `world` processes of one group; returns their results by rank."""
    members = _groups.pop(world, None) or _start(world)
    rendezvous = Path(tempfile.mkdtemp(prefix="gapless-"), "group")
    for rank, (_, pipe) in enumerate(members):
        pipe.send((rank, world, str(rendezvous), function, args, collective or timeout / 2, backend))
    try:
        results = _collect(members, timeout)
    except BaseException:
        _stop(members)
        raise
    _groups[world] = members
    return results


def _collect(members, timeout):
    results, waiting = {}, {pipe: rank for rank, (_, pipe) in enumerate(members)}
    failed = None
    while waiting:
        ready = connection.wait(list(waiting), timeout if failed is None else 5.0)
        if not ready:
            raise RankError(failed or f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, f"rank {rank} died"
            if good:
                results[rank] = value
            elif failed is None or "Connection" in failed:
                failed = f"rank {rank}:\n{value}"
    if failed is not None:
        raise RankError(failed)
    return [results[rank] for rank in range(len(members))]


def _start(world):
    if not forkserver._forkserver._forkserver_pid:
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        _CONTEXT.set_forkserver_preload(["pool", "layouts", "jobs"])
    members = []
    for _ in range(world):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        members.append((process, ours))
    return members


def _stop(members):
    for process, pipe in members:
        pipe.close()
        process.kill()
    for process, _ in members:
        process.join()


@atexit.register
def stop_all():
    """End all processes."""
    while _groups:
        _stop(_groups.popitem()[1])


def _serve(pipe):
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, rendezvous, function, args, collective, backend = pipe.recv()
        except EOFError:
            return
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=collective),
        )
        dist.barrier()  # a rank that is done and leaves before another has seen it come would be missed by that one
        try:
            pipe.send((True, function(rank, world, *args)))
        except BaseException:  # noqa: BLE001 - everything is the parent's to judge
            pipe.send((False, traceback.format_exc()))
        finally:
            dist.destroy_process_group()
