"""Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 3).

A layer that is checkpointed keeps its input alone, bf16 [T, H], and runs again when its backward is due. What it keeps
then for its backward lives as long as that. The numbers are the same to the last bit: kernels give the same bits every
time, and dropout is counter-based, so there is no state of a random generator to keep. Nothing here waits for the
device, or allocates by what only the device knows: a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gapless.batch import Segments
from gapless.kernels.rope import RotaryTable
from gapless.models.decoder import Decoder, DecoderLayer

Policy = Literal["none", "full"]


def apply_checkpointing(model: Decoder, policy: Policy) -> None:
    """Have the layers of a decoder, or of a pipeline stage of one, keep what a policy says; see `MemoryConfig`."""
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.recorded = checkpointed if policy == "full" else None


def checkpointed(layer: DecoderLayer, x: Tensor, segments: Segments, rotary: RotaryTable) -> Tensor:
    """What `layer.compute` gives for x [T, H], of which x alone is kept until the backward.

    In the backward a RuntimeError is raised where parameters, positions or tables were changed since, and where the
    gradient's own gradient is asked for.
    """
    return _Checkpoint.apply(layer, segments, rotary, x, *_trained(_parameters(layer)))


class _Facts(NamedTuple):
    """What a layer's second run must find as the first one did."""

    parameters: list[Tensor]
    tables: tuple[Tensor, ...]
    """The batch's tensors are views of one buffer, and share a version."""
    versions: list[int]
    modes: list[bool]
    """Whether each module trains: dropout goes by it."""

    @classmethod
    def of(cls, layer: DecoderLayer, segments: Segments, rotary: RotaryTable) -> _Facts:
        parameters, tables = _parameters(layer), (segments.positions, rotary.cos, rotary.sin)
        versions = [tensor._version for tensor in (*parameters, *tables)]
        return cls(parameters, tables, versions, [module.training for module in layer.modules()])

    def check(self, layer: DecoderLayer) -> None:
        now = _parameters(layer)
        same = len(now) == len(self.parameters) and all(map(_is, now, self.parameters))
        if not same or [tensor._version for tensor in (*now, *self.tables)] != self.versions:
            raise RuntimeError(
                "a parameter or a batch was changed between a layer's forward and its backward, which runs the layer "
                "again (memory.checkpointing)"
            )


class _Checkpoint(torch.autograd.Function):
    """A layer as one node. The trained parameters are inputs: autograd accumulates their gradients as it always does.

    So hooks on them run once, after all of a layer's gradients are there, and a layer needs no gradient of x for
    theirs. FSDP2's hooks are around the layer: they have gathered the parameters by the time the backward is run.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: DecoderLayer, segments: Segments, rotary: RotaryTable, x: Tensor, *_: Tensor
    ) -> Tensor:
        y = layer.compute(x, segments, rotary)
        ctx.save_for_backward(x)
        ctx.layer, ctx.segments, ctx.rotary = layer, segments, rotary
        ctx.facts = _Facts.of(layer, segments, rotary)  # now: the first run may have moved weights
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("a checkpointed layer has first derivatives only: leave create_graph out")
        layer, facts = ctx.layer, ctx.facts
        (x,) = ctx.saved_tensors
        facts.check(layer)
        _, _, _, *needs = ctx.needs_input_grad
        parameters = _trained(facts.parameters)
        inputs = [x.detach().requires_grad_(needs[0]), *parameters]
        wanted = [tensor for tensor, needed in zip(inputs, needs, strict=True) if needed]
        with torch.enable_grad(), _in_modes(layer, facts.modes), _without_hooks(parameters):
            y = layer.compute(inputs[0], ctx.segments, ctx.rotary, value=False)
            found = iter(torch.autograd.grad(y, wanted, grads, allow_unused=True))
        return None, None, None, *(next(found) if needed else None for needed in needs)


def _parameters(layer: nn.Module) -> list[Tensor]:
    """Those of a layer as they are now: FSDP2 puts gathered ones in the place of shards."""
    return [value for module in layer.modules() for value in module._parameters.values() if value is not None]


def _trained(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [value for value in parameters if value.requires_grad]


def _is(one: object, other: object) -> bool:
    return one is other


@contextmanager
def _in_modes(layer: nn.Module, modes: Sequence[bool]) -> Generator[None]:
    """An evaluation may have come between a forward and its backward: what trained then trains while entered."""
    modules = list(layer.modules())
    before = [module.training for module in modules]
    _set_modes(modules, before, modes)
    try:
        yield
    finally:
        _set_modes(modules, modes, before)


def _set_modes(modules: Sequence[nn.Module], before: Sequence[bool], after: Sequence[bool]) -> None:
    if before != after:
        for module, training in zip(modules, after, strict=True):
            module.training = training


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Generator[None]:
    """Hooks on gradients of parameters run where they accumulate, not also where a layer's second run ends."""
    hooked = [(value, value._backward_hooks) for value in parameters if value._backward_hooks]
    for value, _ in hooked:
        value._backward_hooks = None
    try:
        yield
    finally:
        for value, hooks in hooked:
            value._backward_hooks = hooks
