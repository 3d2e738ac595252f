"""Data parallelism: whole replicas whose gradients are summed, or FSDP2, which shards weights, gradients and state.

Every rank runs backward on its own sum of losses / N (design.md, section 4), so gradients are summed over ranks,
never averaged, and always in float32.

Replicas do not go through torch's DDP wrapper: the optimizer owns the float32 gradients, DDP would reduce bf16 ones and
wants a backward from every rank. `GradientReducer` does what is left of it (Li et al. 2020, "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", section 3.2): buckets whose all-reduce overlaps with the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapless.adapters.lora import lora_layers
from gapless.config import ParallelConfig
from gapless.models.decoder import Decoder
from gapless.models.linear import DenseLinear
from gapless.parallel.mesh import Mesh

# FSDP2 is imported where it is used: that takes half a second, and one process has no use for it.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

Materialise = Callable[[nn.Module], None]
"""Gives every parameter of a module memory and its values; parameters that are shared stay shared."""

# ---- replicas ----


@dataclass
class _Bucket:
    """Gradients that travel together."""

    gradients: list[Tensor] = field(default_factory=list)
    parameters: set[int] = field(default_factory=set)
    """Ids of their parameters."""
    waiting: set[int] = field(default_factory=set)
    """Those that the armed backward has not reached."""
    flat: Tensor | None = None
    work: dist.Work | None = None

    def start(self, group: dist.ProcessGroup) -> None:
        # One gradient alone is reduced where it lies; the large ones always are.
        alone = len(self.gradients) == 1
        self.flat = self.gradients[0] if alone else torch.cat([gradient.flatten() for gradient in self.gradients])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    @property
    def arrived(self) -> bool:
        """Whether the sum is there, asked without waiting."""
        return self.work is not None and self.work.is_completed()

    def finish(self) -> None:
        assert self.work is not None
        assert self.flat is not None
        self.work.wait()  # with NCCL the stream waits, not the host
        if len(self.gradients) > 1:
            pieces = self.flat.split([gradient.numel() for gradient in self.gradients])
            sums = [piece.view(gradient.shape) for piece, gradient in zip(pieces, self.gradients, strict=True)]
            torch._foreach_copy_(self.gradients, sums)
        self.flat = self.work = None


class GradientReducer:
    """Sums the gradients of replicas over their ranks.

    In every accumulation window: backward of the micro-batches, with `arm` before the last one so that the reduction
    overlaps with it; then `finish`. A rank may leave out backwards, all of them included, and need not `arm`: what has
    not been started is started by `finish`, in the same order on every rank.
    """

    def __init__(
        self,
        gradients: Sequence[tuple[nn.Parameter, Tensor]],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        """Watch the parameters.

        Args:
            gradients: the parameters in the order in which the forward uses them, each with the contiguous float32
                buffer in which its gradient adds up. If a hook fills the buffer, it is registered already.
            group: the ranks to sum over. All of them pass the same shapes in the same order.
            bucket_bytes: a bucket is closed as soon as it has so many; a gradient of that size is one of its own and
                is not copied.
        """
        self._group = group
        self._buckets = _fill_buckets(gradients, bucket_bytes)
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter, _ in gradients]
        self._armed = False
        self._started = self._finished = 0

    def arm(self) -> None:
        """Reduce gradients as soon as the next backward, the window's last, has added to them."""
        assert not self._armed, "the last window was not finished"
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)

    def finish(self) -> None:
        """Leave the sums in the buffers; every rank calls it once in a window."""
        self._start(len(self._buckets))
        for bucket in self._buckets[self._finished :]:
            bucket.finish()
        self._armed, self._started, self._finished = False, 0, 0

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _ready(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        bucket = self._bucket_of[id(parameter)]
        assert id(parameter) in bucket.waiting, "a second backward after arm()"
        bucket.waiting.remove(id(parameter))
        # Only in their order: another rank may be ready with another bucket first.
        ready = self._started
        while ready < len(self._buckets) and not self._buckets[ready].waiting:
            ready += 1
        self._start(ready)

    @torch.no_grad()
    def _start(self, end: int) -> None:
        for bucket in self._buckets[self._started : end]:
            # What has arrived is put back first, so that few of the flat copies live at a time.
            while self._finished < self._started and self._buckets[self._finished].arrived:
                self._buckets[self._finished].finish()
                self._finished += 1
            bucket.start(self._group)
            self._started += 1


def _fill_buckets(gradients: Sequence[tuple[nn.Parameter, Tensor]], bucket_bytes: int) -> list[_Bucket]:
    """Cut the gradients into buckets in the order in which a backward is done with them."""
    buckets: list[_Bucket] = []
    room = 0
    for parameter, gradient in reversed(gradients):
        assert gradient.dtype == torch.float32
        assert gradient.is_contiguous()
        if room <= 0 or gradient.nbytes >= bucket_bytes:
            buckets.append(_Bucket())
            room = bucket_bytes
        buckets[-1].gradients.append(gradient)
        buckets[-1].parameters.add(id(parameter))
        room -= gradient.nbytes
    return buckets


# ---- shards ----


def shard_model(
    model: Decoder,
    mesh: Mesh,
    config: ParallelConfig,
    materialise: Materialise,
    *,
    dtype: torch.dtype,
    pure_bf16: bool = False,
    meet: Callable[[], None] = lambda: None,
) -> None:
    """Shard a decoder, or a pipeline stage of one, over the mesh's "shard" ranks with FSDP2 (Zhao et al. 2023).

    Each layer is a group that is gathered and freed as one; embedding, final norm and head are another, which stays
    gathered from the forward to its backward, as the loss reads the head's weight. A tied head stays the embedding's
    parameter. With "replicate" ranks the shards are replicated over them (HSDP). The model's parameters become
    DTensors, so views and the optimizer are built afterwards.

    Trained parameters in low precision become float32 masters, which are gathered in `dtype`.

    Args:
        model: cut by pipeline and tensor parallelism, adapters applied; its parameters may be on the meta device.
        mesh: its "shard" axis has several ranks.
        config: the ZeRO level, and whether frozen parameters are sharded too.
        materialise: called once for each layer and once for all that is outside layers, before they are sharded, so
            that only one of them is whole at any time.
        dtype: of the weights that the forward uses.
        pure_bf16: whether trained parameters keep their dtype. FSDP2 then rounds each reduced gradient to it.
        meet: waits for all ranks to have read their weights, which may take longer than a collective may.

    Raises:
        ValueError: ranks that must hold the same values do not.
    """
    sums: dict[str, Tensor] = {}
    settings = {"mesh": _data_mesh(mesh), "shard_frozen": config.shard_frozen}
    for layer in model.layers.values():
        materialise(layer)
        sums |= _checksums(model, layer)
        precision = _precision(layer, dtype, pure_bf16)
        _shard_group(layer, layer, precision, reshard_after_forward=config.zero_stage == 3, **settings)
    # The root of FSDP2, which the model is, takes what is left. The loss reads the head's weight after the forward.
    stem = nn.ModuleList(module for module in (model.embed, model.norm, model.head) if module is not None)
    materialise(stem)
    sums |= _checksums(model, stem)
    _shard_group(model, stem, _precision(stem, dtype, pure_bf16), reshard_after_forward=False, **settings)
    for group in _groups(model):
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to a sum
    meet()
    _compare(sums, mesh)


def _shard_group(
    module: nn.Module,
    content: nn.Module,
    precision: MixedPrecisionPolicy,
    *,
    reshard_after_forward: bool,
    mesh: DeviceMesh,
    shard_frozen: bool,
) -> None:
    """Make a group of a module, whose parameters, but for those in groups already, are those of `content`."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    axes = _shard_axes(content, mesh.size(mesh.ndim - 1))
    frozen = {parameter for parameter in axes if not parameter.requires_grad}
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=lambda parameter: Shard(axes[parameter]),
        mp_policy=precision,
        ignored_params=None if shard_frozen else frozen,
    )
    for layer in lora_layers(content):
        layer.gathered = True


def before_backward(model: Decoder, *, last: bool, zero_stage: int) -> None:
    """Say what a sharded model's next backward shall do; called before that of every micro-batch.

    Args:
        model: what `shard_model` sharded.
        last: whether it is the last backward before the optimizer's step.
        zero_stage: 3 frees weights after every forward and backward and reduces gradients to shards in every backward;
            2 keeps the gathered weights until the last backward; 1 also adds the gradients up whole until then. With
            replicas of the shards, the reduced shards are summed over them in the last backward alone.
    """
    for group in _groups(model):
        group.set_is_last_backward(last)
        group.set_reshard_after_backward(last or zero_stage == 3, recurse=False)
        group.set_requires_gradient_sync(last or zero_stage >= 2, recurse=False)
        group.set_requires_all_reduce(last, recurse=False)


def reshard(model: Decoder) -> None:
    """Free the gathered weights that a forward without a backward left.

    Until then the next forward uses those, whatever has become of the shards, and the parameters are not DTensors.
    """
    for group in _groups(model):
        group.reshard()


def _groups(model: Decoder) -> Iterator[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    for module in (*model.layers.values(), model):
        assert isinstance(module, FSDPModule)
        yield module


def _data_mesh(mesh: Mesh) -> DeviceMesh:
    # To FSDP2 a 2-D mesh means replicated shards, whatever the axes are called and however long they are.
    assert mesh.device_mesh is not None
    assert mesh.size("shard") > 1
    return mesh.device_mesh["replicate", "shard"] if mesh.size("replicate") > 1 else mesh.device_mesh["shard"]


def _precision(content: nn.Module, dtype: torch.dtype, pure_bf16: bool) -> MixedPrecisionPolicy:
    """Turn trained parameters in low precision into float32 masters; returns what a group of them is gathered in.

    Adapters are in float32 and frozen weights in `dtype`: both are gathered as they are, also when in one group.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    trained = [parameter for parameter in content.parameters() if parameter.requires_grad]
    masters = not pure_bf16 and any(parameter.dtype != torch.float32 for parameter in trained)
    if masters:
        assert all(parameter.dtype == dtype for parameter in trained), "adapters beside trained weights in one group"
        for parameter in trained:
            parameter.data = parameter.data.float()
    # Inputs are not cast: they hold float32 tables of positions.
    return MixedPrecisionPolicy(
        param_dtype=dtype if masters else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _shard_axes(content: nn.Module, ranks: int) -> dict[nn.Parameter, int]:
    """The axis to shard each parameter along, such that a shard is a box of each tensor that it has on disk.

    The first axis may be cut unevenly, and is unless a fused weight has a better one; FSDP2 cuts others evenly only.
    """
    axes = dict.fromkeys(content.parameters(), 0)
    for layer in content.modules():
        if isinstance(layer, DenseLinear) and len(layer.leading) > 1:
            axes[layer.weight] = _even_axis(layer.weight, (layer.shard_dim, len(layer.leading)), ranks)
            if layer.bias is not None:
                axes[layer.bias] = _even_axis(layer.bias, (layer.shard_dim,), ranks)
    return axes


def _even_axis(parameter: nn.Parameter, axes: Iterable[int], ranks: int) -> int:
    return next((axis for axis in axes if parameter.shape[axis] % ranks == 0), 0)


# ---- ranks that must hold the same ----


def check_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Refuse to go on where the data-parallel ranks' whole parameters differ. Every rank calls it.

    Raises:
        ValueError: by name, which do; on every rank.
    """
    _compare(_checksums(model, model), mesh)


def _checksums(model: nn.Module, content: nn.Module) -> dict[str, Tensor]:
    """Of the parameters of a part of the model, by their names in the model."""
    parameters = frozenset(content.parameters())
    return {name: _checksum(value) for name, value in model.named_parameters() if value in parameters}


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits modulo 2**64, 0-d."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    whole = len(content) // 8 * 8
    return content[:whole].view(torch.int64).sum() + content[whole:].sum()


def _compare(sums: Mapping[str, Tensor], mesh: Mesh) -> None:
    if not sums:
        return
    values = torch.stack(list(sums.values()))
    extremes = torch.stack([values, -values])
    for axis in ("replicate", "shard"):
        if (group := mesh.group(axis)) is not None:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    differ = [name for name, same in zip(sums, (extremes[0] == -extremes[1]).tolist(), strict=True) if not same]
    if differ:
        raise ValueError(
            f"{len(differ)} of {len(sums)} parameters differ between data-parallel ranks, the first is {differ[0]}; "
            "give every node the same model folder, adapter and seed"
        )
