"""A rank's part of a model, and the work it does together with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, distributed, nn

from gapless.batch import PackedBatch
from gapless.config import ParallelConfig
from gapless.models.decoder import Decoder
from gapless.models.views import local_tensor
from gapless.parallel.data import GradientReducer, before_backward, reshard
from gapless.parallel.loss import LossFunction, batch_loss, hidden_loss
from gapless.parallel.mesh import Mesh
from gapless.parallel.pipeline import Pipeline
from gapless.parallel.tensor import partial_parameters


def add_micro_batch(model: Decoder, batch: PackedBatch, share: Tensor, loss_fn: LossFunction | None = None) -> None:
    """Add the gradients of a micro-batch's part of L, and that part to `share`, 0-d float32."""
    loss = batch_loss(model, batch, loss_fn) / batch.scalars.num_trained
    loss.backward()
    share.add_(loss.detach().float())


class ParallelModel:
    """The stages of a model that a rank has: the whole model in one process, one or two in a pipeline.

    Attributes:
        stages: decoders, in the order of their layers.
        mesh: the rank's place.
    """

    def __init__(
        self, stages: Sequence[Decoder], mesh: Mesh, config: ParallelConfig, pipeline: Pipeline | None = None
    ) -> None:
        """Take over stages to which all else was applied; see `gapless.parallel.apply`."""
        self.stages = list(stages)
        self.mesh = mesh
        self._config = config
        self._pipeline = pipeline
        self._sharded = mesh.size("shard") > 1
        self._reducer: GradientReducer | None = None
        # Of a short parameter FSDP2 leaves some ranks nothing; those that add up have equal shards.
        partial = [parameter for stage in self.stages for parameter in partial_parameters(stage)]
        self._partial = [parameter for parameter in partial if local_tensor(parameter).numel()]
        tied = None if pipeline is None else pipeline.tied
        self._tied = tied if tied is not None and local_tensor(tied).numel() else None

    @property
    def together(self) -> bool:
        """Whether ranks run each forward and backward together, so that none may leave one out."""
        return self._sharded or self._pipeline is not None or self.mesh.size("tensor") > 1

    def bind(self, buffers: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Have gradients that are added up in buffers reduced over replicas while the last backward runs."""
        group = self.mesh.group("replicate")
        if group is not None and not self._sharded:
            # The reducer starts with what the backward comes to first: the last in the order of use.
            parameters = (parameter for stage in self.stages for parameter in stage.parameters())
            use = {id(parameter): place for place, parameter in enumerate(parameters)}
            self._reducer = GradientReducer(sorted(buffers, key=lambda pair: use[id(pair[0])]), group)

    def close(self) -> None:
        """Let go of the parameters."""
        if self._reducer is not None:
            self._reducer.close()

    # ---- a step ----

    def accumulate(self, batches: Sequence[PackedBatch], loss_fn: LossFunction | None = None) -> Tensor:
        """Add the gradients of L over this rank's micro-batches of a step.

        Returns:
            What this rank has of L, 0-d float32; all ranks' add up to it.
        """
        if self._pipeline is not None:
            share = self._pipeline.train(batches, partial(hidden_loss, loss_fn=loss_fn))
        else:
            share = self._accumulate(batches, loss_fn)
        return share if self.mesh.counts else torch.zeros_like(share)

    def _accumulate(self, batches: Sequence[PackedBatch], loss_fn: LossFunction | None) -> Tensor:
        (model,) = self.stages
        run = [batch for batch in batches if batch.num_trained or self.together]
        share = torch.zeros((), device=batches[0].tokens.device)
        for batch in run:
            last = batch is run[-1]
            if self._sharded:
                before_backward(model, last=last, zero_stage=self._config.zero_stage)
            if self._reducer is not None and last:
                self._reducer.arm()
            add_micro_batch(model, batch, share, loss_fn)
        return share

    @torch.no_grad()
    def reduce(self, gradient: Callable[[nn.Parameter], Tensor]) -> None:
        """Finish the step's gradients: each rank's become those of L.

        Args:
            gradient: the float32 gradient of a trained parameter, to be changed in place.
        """
        if self._reducer is not None:
            self._reducer.finish()
        group = self.mesh.group("tensor")
        if group is not None and self._partial:
            gradients = [gradient(parameter) for parameter in self._partial]
            flat = torch.cat([tensor.flatten() for tensor in gradients])
            distributed.all_reduce(flat, group=group)
            pieces = flat.split([tensor.numel() for tensor in gradients])
            torch._foreach_copy_(
                gradients, [piece.view_as(tensor) for piece, tensor in zip(pieces, gradients, strict=True)]
            )
        if self._pipeline is not None and self._tied is not None:
            self._pipeline.sum_tied(gradient(self._tied))

    # ---- evaluation ----

    @torch.no_grad()
    def loss_sum(self, batches: Sequence[PackedBatch], loss_fn: LossFunction | None = None) -> Tensor:
        """What this rank has of the sum of the token losses of batches, not divided: 0-d float64.

        Ranks that work together give the same number of batches.
        """
        if self._pipeline is not None:
            total = self._pipeline.evaluate(batches, partial(hidden_loss, loss_fn=loss_fn))
        else:
            (model,) = self.stages
            run = [batch for batch in batches if batch.num_trained or self.together]
            zero = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
            total = sum((batch_loss(model, batch, loss_fn).double() for batch in run), zero)
        self.rest()
        return total if self.mesh.counts else torch.zeros_like(total)

    def rest(self) -> None:
        """Free what forwards without a backward have gathered; due before the weights change."""
        if self._sharded:
            for stage in self.stages:
                reshard(stage)

    def modes(self, *, training: bool) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.train(training)
