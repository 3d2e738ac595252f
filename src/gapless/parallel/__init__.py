"""Parallelism, applied to a model from outside, in one order.

    pipeline    the model is cut into stages of whole layers; a rank keeps its own
    tensor      every layer of a stage is cut into the pieces of the tensor ranks
    memory      layers keep for the backward what the run says
    FSDP        layer by layer, weights are read and sharded over the data-parallel ranks

The first two cut a model that has no memory yet, so a rank only ever reads and holds its part. Gradients are added up
over replicas, tensor ranks and tied stages by `ParallelModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from gapless.config import RunConfig
from gapless.memory.checkpointing import apply_checkpointing
from gapless.models import weights
from gapless.models.config import DecoderConfig
from gapless.models.decoder import Decoder
from gapless.parallel.data import check_replicas, shard_model
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.parallel.pipeline import Pipeline, check_pipeline, split_stages
from gapless.parallel.tensor import apply_tensor, check_tensor

Fill = Callable[[Decoder, Iterable[nn.Parameter]], None]
"""(stage, some of its parameters) -> their values are read, each rank its boxes."""


def check_layout(config: RunConfig, decoder: DecoderConfig, sizes: Mapping[str, int]) -> None:
    """Refuse a model or a batch that cannot be cut as the run file says, before any weight is read.

    Args:
        config: the run.
        decoder: the model's.
        sizes: ranks along each axis (see `mesh_sizes`).

    Raises:
        ValueError: what does not divide, with the numbers.
    """
    training, parallel = config.training, config.parallel
    tokens = training.per_device_train_batch_size * config.data.max_length
    check_tensor(decoder, sizes["tensor"], tokens, parallel.sequence_parallel)
    if training.per_device_eval_batch_size is not None:
        tokens = training.per_device_eval_batch_size * config.data.max_length
        key = "per_device_eval_batch_size"
        check_tensor(decoder, sizes["tensor"], tokens, parallel.sequence_parallel, key)
    check_pipeline(
        decoder.layers,
        sizes["pipeline"],
        parallel.pp_schedule,
        training.gradient_accumulation_steps,
        frees_weights=sizes["shard"] > 1 and parallel.zero_stage == 3,
        runs_again=config.memory.checkpointing != "none",
    )


def apply(
    model: Decoder,
    config: RunConfig,
    mesh: Mesh,
    fill: Fill,
    *,
    device: torch.device | str = "cpu",
    meet: Callable[[], None] = lambda: None,
) -> ParallelModel:
    """Cut a model over the ranks, read its weights, and have the ranks work together.

    Args:
        model: whole, on the meta device, adapters applied.
        config: the run; `check_layout` has passed.
        mesh: the rank's place.
        fill: reads values.
        device: of the weights.
        meet: waits for all ranks outside of a collective; called after weights are read and before one is due.
    """
    pipelined = mesh.size("pipeline") > 1
    stages = split_stages(model, mesh, config.parallel.pp_schedule) if pipelined else [model]
    sequence_parallel = config.parallel.sequence_parallel and mesh.size("tensor") > 1
    for stage in stages:
        if mesh.size("tensor") > 1:
            apply_tensor(stage, mesh, sequence_parallel=sequence_parallel)
        apply_checkpointing(stage, config.memory.checkpointing)
        _place(stage, config, mesh, fill, device, meet)
    pipeline = None
    if pipelined:
        pipeline = Pipeline(
            stages,
            mesh,
            config.parallel.pp_schedule,
            micro_batches=config.training.gradient_accumulation_steps,
            tokens=config.training.per_device_train_batch_size * config.data.max_length,
            token_ranks=mesh.size("tensor") if sequence_parallel else 1,
            device=device,
        )
    return ParallelModel(stages, mesh, config.parallel, pipeline)


def _place(
    stage: Decoder,
    config: RunConfig,
    mesh: Mesh,
    fill: Fill,
    device: torch.device | str,
    meet: Callable[[], None],
) -> None:
    """Give a stage's weights memory and values, and shard them if there are ranks for it."""

    def materialise(module: nn.Module) -> None:
        fresh = [name for name, parameter in stage.named_parameters() if parameter.is_meta]
        weights.materialise(module, device)
        fill(stage, [value for name, value in stage.named_parameters() if name in fresh and not value.is_meta])

    stage.rotary_frequencies = stage.rotary_frequencies.to(device)
    if mesh.size("shard") > 1:
        shard_model(
            stage,
            mesh,
            config.parallel,
            materialise,
            dtype=stage.dtype,
            pure_bf16=config.optim.pure_bf16,
            meet=meet,
        )
    else:
        materialise(stage)
        meet()
        if mesh.size("replicate") > 1:
            check_replicas(stage, mesh)
