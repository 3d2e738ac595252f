"""Processes with a launcher's variables, each of which calls a function of a test."""

import multiprocessing
import os
import re
import socket
import sys
import time

import torch
import torch.distributed as dist

from gapless.config import ParallelConfig
from gapless.parallel.watch import CommandExit

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


def nothing(rank, world):
    """What makes `pool.run` fork: then the process that all others are forked from has torch."""


def all_reduce():
    dist.all_reduce(torch.ones(1))
