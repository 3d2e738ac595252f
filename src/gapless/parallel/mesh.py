"""The mesh: every rank's place along named axes, and the process groups of those it works with.

Axes, outermost first (the ranks of the last one are neighbours, and so on one node):

    pipeline   each rank has a range of layers
    replicate  replicas that train on different rows
    shard      ranks that train on different rows and keep a shard of the weights each
    context    ranks that share the rows (of size 1 until attention can be cut along them)
    tensor     ranks that share every layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from gapless.config import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The place of this rank among all."""

    sizes: dict[str, int]
    """Ranks along each axis."""
    rank: int = 0
    device_mesh: DeviceMesh | None = None
    """None in a single process."""

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of a run in one process."""
        return cls(dict.fromkeys(AXES, 1))

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one process"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        inner = math.prod(self.sizes[name] for name in AXES[AXES.index(axis) + 1 :])
        return self.rank // inner % self.sizes[axis]

    def group(self, axis: str) -> distributed.ProcessGroup | None:
        """This rank and those that differ from it along an axis only; None if there is no other."""
        if self.device_mesh is None or self.sizes[axis] == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def data_size(self) -> int:
        """Ranks that train on different rows."""
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return self.coordinate("replicate") * self.sizes["shard"] + self.coordinate("shard")

    @property
    def counts(self) -> bool:
        """Whether what this rank has of a loss counts: tensor ranks have the same, and stages but the last none."""
        last = self.coordinate("pipeline") == self.sizes["pipeline"] - 1
        return last and self.coordinate("tensor") == 0 and self.coordinate("context") == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over all ranks, in place; returns it."""
        if self.device_mesh is not None:
            distributed.all_reduce(tensor)
        return tensor


def mesh_sizes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """The ranks along each axis.

    Raises:
        ValueError: they do not multiply to the number of processes.
    """
    inner = {"pp_size": config.pp_size, "dp_shard_size": config.dp_shard_size, "tp_size": config.tp_size}
    product = math.prod(inner.values())
    listed = " x ".join(f"{name} {size}" for name, size in inner.items() if size > 1)
    replicate = config.dp_replicate_size
    if replicate is None:
        if world_size % product:
            raise ValueError(
                f"parallel: {listed} takes a multiple of {product} processes, and there "
                f"{'is' if world_size == 1 else 'are'} {world_size}; start torchrun with --nproc-per-node {product} "
                "(times --nnodes), or change the sizes"
            )
        replicate = world_size // product
    elif replicate * product != world_size:
        listed = " x ".join(filter(None, (f"dp_replicate_size {replicate}", listed)))
        raise ValueError(
            f"parallel: {listed} takes {replicate * product} processes, and there "
            f"{'is' if world_size == 1 else 'are'} {world_size}; start torchrun with --nproc-per-node "
            f"{replicate * product} (times --nnodes), or leave dp_replicate_size out"
        )
    return {
        "pipeline": config.pp_size,
        "replicate": replicate,
        "shard": config.dp_shard_size,
        "context": 1,
        "tensor": config.tp_size,
    }


def build_mesh(config: ParallelConfig, *, rank: int = 0, world_size: int = 1, device_type: str = "cpu") -> Mesh:
    """The mesh of a run; with more than one rank the default process group must be there.

    Raises:
        ValueError: see `mesh_sizes`.
    """
    sizes = mesh_sizes(config, world_size)
    if world_size == 1:
        return Mesh.single()
    from torch.distributed.device_mesh import init_device_mesh  # takes a while, and one process has no mesh

    return Mesh(sizes, rank, init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES))
