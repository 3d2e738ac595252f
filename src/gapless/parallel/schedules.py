"""The schedules of a pipeline: torch's, set up so that nothing but time depends on which one it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_LOOPED = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}
_NODES_DIE = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
"""Before torch 2.13 (the fix may be older, 2.12 was not tried) the nodes of Python's autograd functions, to which the
second half of a split backward returns, last only as long as the graph that the first half lets go of."""


def build_schedule(
    schedule: str,
    stages: Mapping[int, nn.Module],
    *,
    total: int,
    micro_batches: int,
    boundary: Tensor,
    piece: Tensor,
    device: torch.device,
    group: distributed.ProcessGroup,
) -> Any:
    """A schedule object of torch, whose `step` runs forward and backward of all micro-batches.

    Args:
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        stages: this rank's modules by the index of their stage; the last stage's output is its loss, 0-d float32.
        total: stages on all ranks.
        micro_batches: that a step consists of.
        boundary: like what a stage gives to the next, on the meta device; needs a gradient.
        piece: like what the first stage is given for a micro-batch, likewise.
        device: of the stages.
        group: the pipeline's ranks.
    """
    kind = _SplitStage if schedule == "zero_bubble" else PipelineStage
    loss = torch.empty((), device="meta", requires_grad=True)
    # With the shapes known, torch exchanges no (pickled) descriptions of them.
    built: list[Any] = [
        kind(
            module,
            index,
            total,
            device,
            input_args=piece if index == 0 else boundary,
            output_args=loss if index == total - 1 else boundary,
            group=group,
        )
        for index, module in stages.items()
    ]
    # Losses are divided by N already; torch would divide the gradients by the number of micro-batches.
    settings = {"loss_fn": _as_it_is, "scale_grads": False}
    if schedule in _SINGLE:
        return _SINGLE[schedule](built[0], micro_batches, **settings)
    return _LOOPED[schedule](built, micro_batches, **settings)


def _as_it_is(output: Tensor, _: Tensor) -> Tensor:
    return output


class _SplitStage(PipelineStage):
    """A stage of a schedule that splits the backward, whose weight gradients come through autograd all the same.

    torch computes them with `torch.autograd.grad` and adds them up in the weight's own precision, past the hooks by
    which the optimizer adds up in float32.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._graphs: dict[int, Any] = {}

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """See torch."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if _NODES_DIE:
            self._graphs[fwd_chunk_id] = output.view_as(output).grad_fn
        return output

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See torch."""
        # FSDP2 collects the gradients itself, but of parameters that are there: of a shard they would be wrong.
        assert not any(isinstance(parameter, DTensor) for parameter in self.submod.parameters()), "weights are freed"
        # The first stage runs a whole backward here.
        if self.is_first or isinstance(self.submod, FSDPModule):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        else:
            parameters = [parameter for parameter in self.submod.parameters() if parameter.requires_grad]
            totals = [parameter.grad for parameter in parameters]
            _set_gradients(parameters, [None] * len(parameters))
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
            new = [parameter.grad for parameter in parameters]
            _set_gradients(parameters, totals)
            found = [(parameter, grad) for parameter, grad in zip(parameters, new, strict=True) if grad is not None]
            if found:
                leaves, grads = zip(*found, strict=True)
                torch.autograd.backward(leaves, grads)
        self._graphs.pop(bwd_chunk_id, None)


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
