"""Places of ranks along the axes, and sizes that do not fit."""

import pytest
import torch.distributed as dist
from pool import run

from gapless.config import ParallelConfig
from gapless.parallel.mesh import AXES, Mesh, build_mesh, mesh_sizes


def places(rank, world):
    config = ParallelConfig(pp_size=2, dp_shard_size=2, tp_size=2)
    mesh = build_mesh(config, rank=rank, world_size=world)
    groups = {axis: mesh.group(axis) for axis in AXES}
    members = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None}
    coordinates = {axis: mesh.coordinate(axis) for axis in AXES}
    known = list(mesh.device_mesh.get_coordinate())
    return coordinates, members, known == [*coordinates.values()], mesh.data_rank, mesh.data_size, mesh.counts


def test_places():
    found = run(8, places)
    assert all(same for _, _, same, *_ in found)
    # rank 6 = pipeline 1, shard 1, tensor 0; neighbours are tensor ranks
    coordinates, members, _, data_rank, data_size, counts = found[6]
    assert coordinates == {"pipeline": 1, "replicate": 0, "shard": 1, "context": 0, "tensor": 0}
    assert members == {"pipeline": [2, 6], "shard": [4, 6], "tensor": [6, 7]}
    assert (data_rank, data_size, counts) == (1, 2, True)
    assert [counts for *_, counts in found] == [False] * 4 + [True, False, True, False]


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        (ParallelConfig(tp_size=2), 3, "tp_size 2 takes a multiple of 2 processes, and there are 3"),
        (
            ParallelConfig(tp_size=2, pp_size=2),
            1,
            "pp_size 2 x tp_size 2 takes a multiple of 4 processes, and there is 1",
        ),
        (ParallelConfig(dp_replicate_size=2), 1, "dp_replicate_size 2 takes 2 processes, and there is 1"),
        (
            ParallelConfig(dp_replicate_size=2, dp_shard_size=2),
            8,
            "dp_replicate_size 2 x dp_shard_size 2 takes 4 processes, and there are 8",
        ),
    ],
)
def test_sizes_that_do_not_multiply_are_refused(config, world, message):
    with pytest.raises(ValueError, match=message):
        mesh_sizes(config, world)


def test_one_process():
    mesh = build_mesh(ParallelConfig())
    assert mesh == Mesh.single()
    assert (mesh.data_rank, mesh.data_size, mesh.world_size, mesh.counts) == (0, 1, 1, True)
    assert mesh_sizes(ParallelConfig(dp_shard_size=2), 8)["replicate"] == 4
