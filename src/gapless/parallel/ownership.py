"""Which rank speaks for a tensor that several ranks hold.

Replicas, tensor ranks and tied stages hold the same boxes of the same tensors. A global norm must count each once, a
checkpoint must hold each once. The ranks tell each other what they hold, so that nothing is derived from the layout
twice.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from torch import nn

from gapless.models.views import TensorView
from gapless.parallel.world import World


class Ownership:
    """Of the trained tensors that this rank holds, those it speaks for.

    Attributes:
        elements: of the boxes that this rank writes; those of all ranks are the trained parameters.
    """

    def __init__(self, views: Iterable[TensorView], world: World) -> None:
        """Learn what all ranks hold; called by all of them.

        Args:
            views: the boxes of this rank.
            world: the ranks.
        """
        boxes: dict[str, TensorView] = {_box(view): view for view in views}
        held = world.share("boxes", {name: math.prod(view.shape) for name, view in boxes.items()})
        owner = _owners(held)
        mine = {name for name, rank in owner.items() if rank == world.rank}
        self._written = {_box(view) for name, view in boxes.items() if name in mine}
        self.elements = sum(math.prod(view.shape) for name, view in boxes.items() if name in mine)
        # The lowest rank counts a parameter; its parts are always held by the same ranks.
        lowest = {name: min(rank for rank, names in enumerate(held) if name in names) for name in boxes}
        self._counted = {id(view.parameter) for name, view in boxes.items() if lowest[name] == world.rank}

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient in the global norm."""
        return id(parameter) in self._counted

    def writes(self, view: TensorView) -> bool:
        """Whether this rank writes a box into checkpoints."""
        return _box(view) in self._written


def _box(view: TensorView) -> str:
    return f"{view.name} {list(view.offset)}"


def _owners(held: list[dict[str, int]]) -> dict[str, int]:
    """The rank that writes each box: among those that hold it, the one with the fewest elements so far."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, []).append(rank)
    load = [0] * len(held)
    owner = {}
    # Boxes with few holders first: the others can still go round ranks that are busy.
    for name in sorted(holders, key=lambda name: (len(holders[name]), name)):
        (rank,) = heapq.nsmallest(1, holders[name], key=lambda rank: (load[rank], rank))
        load[rank] += held[rank][name]
        owner[name] = rank
    return owner
