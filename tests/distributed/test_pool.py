"""The processes that the other tests of this folder run in."""

import pytest
import torch
import torch.distributed as dist
from pool import RankError, run


def add(rank, world, value):
    total = torch.tensor([value + rank])
    dist.all_reduce(total)
    return total.item(), dist.get_world_size()


def fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("no good")
    dist.barrier()


def test_results_come_by_rank_and_failures_with_their_traceback():
    assert run(2, add, 3) == [(7, 2), (7, 2)]
    with pytest.raises(RankError, match="no good"):
        run(2, fail_on_one)
    assert run(2, add, 4) == [(9, 2), (9, 2)]
