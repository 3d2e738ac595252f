"""Pipeline parallelism: whole layers on each rank, micro-batches that pass through them, schedules from torch.

A schedule moves one tensor [T, H] over each boundary between stages, whose shape never changes. All that the host knows
of a micro-batch is on every rank already: stages take their batches from the window, not from each other. The last
stage's forward ends with the loss divided by N, so gradients add up over micro-batches to those of one large batch and
no schedule may scale them.

Schedules: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters", sections 2.2.1 and 2.2.2), zero bubble (Qi et al. 2023, "Zero Bubble Pipeline
Parallelism": ZB-H1 with interleaved stages, where the gradients of weights wait until there is nothing else to do).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gapless.batch import PackedBatch
from gapless.models.decoder import Decoder
from gapless.models.linear import DenseLinear
from gapless.parallel.mesh import Mesh

StageLoss = Callable[[Decoder, Tensor, PackedBatch], Tensor]
"""(last stage, what it gave for the batch, batch) -> the SUM of the token losses, 0-d, computed from what it was given
also where the batch has no trained token and the sum is 0."""


# ---- cutting the model ----


def stages_per_rank(schedule: str) -> int:
    """How many stages a schedule gives each rank."""
    return 2 if schedule in ("interleaved", "zero_bubble") else 1


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage: contiguous, at least one, the embedding and the head counted like a layer each.

    Raises:
        ValueError: fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers do not fill {stages} pipeline stages; lower pp_size")
    if stages == 1:
        return [range(layers)]
    least, spare = divmod(layers + 2, stages)
    # What is left over goes first to the two stages that have something beside layers, then to late stages, through
    # which fewer micro-batches are on their way at a time.
    order = [0, stages - 1, *range(stages - 2, 0, -1)]
    counts = [least + (order.index(stage) < spare) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def check_pipeline(
    layers: int,
    pp_size: int,
    schedule: str,
    micro_batches: int,
    *,
    frees_weights: bool = False,
    runs_again: bool = False,
) -> None:
    """Refuse a model or a number of micro-batches that a schedule cannot use.

    Args:
        layers: of the model.
        pp_size: pipeline ranks.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        micro_batches: of an optimizer step (`gradient_accumulation_steps`).
        frees_weights: whether the stages are sharded and freed after every forward (`zero_stage` 3).
        runs_again: whether layers run again in the backward (`memory.checkpointing`).

    Raises:
        ValueError: what does not fit, the numbers and what to change.
    """
    if pp_size == 1:
        return
    per_rank = stages_per_rank(schedule)
    if layers < pp_size * per_rank:
        most = layers // per_rank
        twice = f" x {per_rank} stages a rank (pp_schedule {schedule})" if per_rank > 1 else ""
        remedy = f"pp_size can be at most {most}" if most > 1 else "the model is too small for a pipeline"
        other = " with this schedule; 1f1b needs half as many" if per_rank > 1 and layers >= pp_size else ""
        raise ValueError(f"pp_size {pp_size}{twice} is more than the model's {layers} layers; {remedy}{other}")
    if schedule == "zero_bubble" and frees_weights:
        raise ValueError(
            "pp_schedule zero_bubble returns to a layer's weights after its backward, and zero_stage 3 has freed them "
            "by then; set zero_stage = 2, or use interleaved"
        )
    if schedule == "zero_bubble" and runs_again:
        raise ValueError(
            "pp_schedule zero_bubble cuts a layer's backward in two, and with memory.checkpointing the layer would run "
            'again in both; use interleaved, or set memory.checkpointing = "none"'
        )
    if schedule == "1f1b" and micro_batches < pp_size:
        raise ValueError(
            f"pp_schedule 1f1b needs at least as many micro-batches as pipeline ranks: gradient_accumulation_steps is "
            f"{micro_batches}, pp_size {pp_size}; raise gradient_accumulation_steps to {pp_size}, or use gpipe"
        )
    if per_rank > 1 and not _fills_rounds(micro_batches, pp_size):
        below = next(count for count in range(micro_batches - 1, 0, -1) if _fills_rounds(count, pp_size))
        above = next(count for count in range(micro_batches + 1, 2 * micro_batches) if _fills_rounds(count, pp_size))
        raise ValueError(
            f"pp_schedule {schedule} runs micro-batches in {micro_batches // pp_size} equal rounds of {pp_size} or "
            f"more: gradient_accumulation_steps is {micro_batches}, pp_size {pp_size}; set "
            f"gradient_accumulation_steps to {below} or {above}, or use 1f1b"
        )


def _fills_rounds(micro_batches: int, pp_size: int) -> bool:
    return micro_batches % max(1, micro_batches // pp_size) == 0


def split_stages(model: Decoder, mesh: Mesh, schedule: str) -> list[Decoder]:
    """This rank's stages of a model.

    Args:
        model: whole, on the meta device; adapters may have been applied. Left as it is.
        mesh: rank r of P along its axis "pipeline" has stage r and, where ranks have two, stage r + P.
        schedule: see `check_pipeline`.

    Returns:
        Decoders that keep the names and the indices of their layers. Only the first stage has `embed`, only the last
        `norm` and `head`; a tied head holds a parameter of its own (see `Pipeline.tied`).

    Raises:
        ValueError: fewer layers than stages.
    """
    ranks, rank = mesh.size("pipeline"), mesh.coordinate("pipeline")
    layers = stage_layers(model.config.layers, ranks * stages_per_rank(schedule))
    return [_stage(model, layers, index) for index in range(rank, len(layers), ranks)]


def _stage(model: Decoder, layers: Sequence[range], index: int) -> Decoder:
    stage = copy.deepcopy(model)
    for key in list(stage.layers):
        if int(key) not in layers[index]:
            del stage.layers[key]
    if index > 0:
        stage.embed = None
    if index < len(layers) - 1:
        stage.norm = stage.head = None
    return stage


# ---- running it ----


class Pipeline:
    """A model's stages on the ranks of one pipeline group, and the schedule that runs micro-batches through them.

    Every rank of the group calls the same methods with the same batches.
    """

    def __init__(
        self,
        stages: Sequence[Decoder],
        mesh: Mesh,
        schedule: str,
        *,
        micro_batches: int,
        tokens: int,
        token_ranks: int = 1,
        device: torch.device | str,
    ) -> None:
        """Build the schedule; all ranks of the group at once.

        Args:
            stages: what `split_stages` gave, with weights, sharded by FSDP2 or not.
            mesh: its axis "pipeline" has several ranks.
            schedule: see `check_pipeline`.
            micro_batches: of an optimizer step.
            tokens: T of a micro-batch.
            token_ranks: tensor ranks that share them by sequence parallelism: stages exchange [T / token_ranks, H].
            device: of the stages.
        """
        from gapless.parallel.schedules import build_schedule  # takes seconds, and most runs have no pipeline

        group = mesh.group("pipeline")
        assert group is not None, "a pipeline has several ranks"
        self._stages, self._group = list(stages), group
        self._rank, self._ranks = mesh.coordinate("pipeline"), mesh.size("pipeline")
        self._hidden, self._token_ranks = stages[0].config.hidden, token_ranks
        self._dtype, self._device = stages[0].dtype, torch.device(device)
        # What the schedule cuts into micro-batches: only the number of pieces matters. On the device, as FSDP2 moves
        # inputs there, and a copy from the host would wait.
        self._pieces = torch.zeros(micro_batches, dtype=torch.int32, device=self._device)
        total = self._ranks * len(self._stages)
        self._schedule = build_schedule(
            schedule,
            dict(zip(range(self._rank, total, self._ranks), self._stages, strict=True)),
            total=total,
            micro_batches=micro_batches,
            boundary=self._boundary(tokens, "meta").requires_grad_(),
            piece=self._pieces[:1].to("meta"),
            device=self._device,
            group=group,
        )
        # NCCL connects a group at its first use, which all of its ranks must make; a schedule's may be of a pair.
        distributed.all_reduce(torch.zeros(1, device=self._device), group=group)

    def train(self, batches: Sequence[PackedBatch], loss: StageLoss) -> Tensor:
        """Forward and backward of a step's micro-batches; gradients of the sum of losses / N add up in `.grad`.

        Args:
            batches: as many as `micro_batches`, on the device.
            loss: called on the last stage, as part of its forward.

        Returns:
            This rank's share of L, 0-d float32 on the device: all of it on the last stage's rank, 0 elsewhere.

        Raises:
            ValueError: from `loss`.
        """
        assert len(batches) == len(self._pieces), f"{len(batches)} micro-batches, built for {len(self._pieces)}"
        inputs = (self._pieces,) if self._stages[0].embed is not None else ()
        with _fed(self._stages, batches, loss) as losses, _kept_gradients(self._stages):
            try:
                self._schedule.step(*inputs, target=self._pieces, return_outputs=False)
            except RuntimeError as error:
                # torch wraps what a stage raised; a line meant for the user shall come through.
                raise error.__cause__ or error from None
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self._device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[PackedBatch], loss: StageLoss) -> Tensor:
        """Forward only, of any number of micro-batches; the caller puts the stages into evaluation mode.

        A rank holds what it sends and receives for all `batches` at once; more than a few are given in several calls.

        Returns:
            This rank's share of the sum of token losses, not divided, 0-d float64 on the device: all of it on the last
            stage's rank, 0 elsewhere.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for stage in self._stages:
            # All is received, then sent, stage after stage: the order in which the ranks of a pair meet is the same on
            # both, as NCCL needs.
            arriving = [self._receive(stage, batch) for batch in batches]
            sent = []
            for batch, arrival in zip(batches, arriving, strict=True):
                hidden = stage(_arrived(arrival) if arrival else batch.tokens, batch.segments)
                if stage.head is not None:
                    total += loss(stage, hidden, batch).double()
                else:
                    sent.append((hidden, self._send(hidden)))
            for _, work in sent:
                work.wait()
        return total

    @property
    def tied(self) -> nn.Parameter | None:
        """The trained weight that the first and the last stage both hold (a tied embedding), on their ranks.

        Each of the two has its own part of the gradient: `sum_tied` before the optimizer's step makes them, and with
        them the weights, equal. A norm over all ranks must count one of them.
        """
        first, last = self._stages[0], self._stages[-1]
        weight = None
        if first.embed is not None:
            weight = first.embed.weight
        elif last.head is not None:
            base = last.head.base_layer()
            assert isinstance(base, DenseLinear)
            weight = base.weight
        return weight if weight is not None and first.config.tied and weight.requires_grad else None

    @torch.no_grad()
    def sum_tied(self, gradient: Tensor) -> None:
        """Add up the gradients of `tied` in place; called on both ranks that hold it, after all other reductions.

        Args:
            gradient: a plain contiguous tensor; of a sharded one the local shard.
        """
        peer = self._ranks - 1 - self._rank
        other = torch.empty_like(gradient)
        exchange = [
            distributed.P2POp(distributed.isend, gradient, group=self._group, group_peer=peer),
            distributed.P2POp(distributed.irecv, other, group=self._group, group_peer=peer),
        ]
        for work in distributed.batch_isend_irecv(exchange):
            work.wait()
        gradient.add_(other)  # a + b and b + a are the same bits

    def _boundary(self, tokens: int, device: torch.device | str) -> Tensor:
        """Room for what the stages exchange."""
        return torch.empty(tokens // self._token_ranks, self._hidden, dtype=self._dtype, device=device)

    def _receive(self, stage: Decoder, batch: PackedBatch) -> tuple[Tensor, Any] | None:
        """A tensor that the stage before will send, and when it is there."""
        if stage.embed is not None:
            return None
        hidden = self._boundary(batch.segments.tokens, self._device)  # evaluation may have other rows than training
        return hidden, distributed.irecv(hidden, group=self._group, group_src=(self._rank - 1) % self._ranks)

    def _send(self, hidden: Tensor) -> Any:
        return distributed.isend(hidden, group=self._group, group_dst=(self._rank + 1) % self._ranks)


def _arrived(arrival: tuple[Tensor, Any]) -> Tensor:
    hidden, work = arrival
    work.wait()
    return hidden


@contextmanager
def _fed(stages: Sequence[Decoder], batches: Sequence[PackedBatch], loss: StageLoss) -> Generator[list[Tensor]]:
    """Stages whose forwards, called with what the stage before gave, take the next of `batches`; yields the losses.

    Every schedule runs a stage's forwards in the order of the micro-batches. Hooks, and not a module around the stage,
    so that the loss is inside the forward of what FSDP2 sharded.
    """
    losses: list[Tensor] = []
    handles = []
    for stage in stages:
        feed = _Feed(batches, loss, losses)
        handles.append(stage.register_forward_pre_hook(feed.before))
        handles.append(stage.register_forward_hook(feed.after, prepend=True))
    try:
        yield losses
    finally:
        for handle in handles:
            handle.remove()


class _Feed:
    """The hooks of one stage, see `_fed`."""

    def __init__(self, batches: Sequence[PackedBatch], loss: StageLoss, losses: list[Tensor]) -> None:
        self._batches, self._loss, self._losses = iter(batches), loss, losses
        self._batch: PackedBatch | None = None

    def before(self, stage: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._batch = batch = next(self._batches)
        assert isinstance(stage, Decoder)
        return batch.tokens if stage.embed is not None else args[0], batch.segments

    def after(self, stage: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor:
        batch = self._batch
        assert isinstance(stage, Decoder)
        assert batch is not None
        if stage.head is None:
            return output
        loss = self._loss(stage, output, batch).float() / batch.scalars.num_trained
        self._losses.append(loss.detach())
        return loss


@contextmanager
def _kept_gradients(stages: Sequence[Decoder]) -> Generator[None]:
    """Gradients that were there are added to, in their own memory, which may be the optimizer's.

    torch 2.13 sets those of FSDP2's parameters to None at a schedule's first step.
    """
    before = [(value, value.grad) for stage in stages for value in stage.parameters() if value.grad is not None]
    yield
    for parameter, total in before:
        if parameter.grad is not total:
            if parameter.grad is not None:
                total.add_(parameter.grad)
            parameter.grad = total
