"""Tensor parallelism: every layer's matrices cut over the ranks of one group, with sequence parallelism.

Megatron's plan (Shoeybi et al. 2019, section 3): the layers that widen (qkv, gate_up) are cut by output, those that
narrow (o, down) by input, so that between the two each rank works on heads and features of its own; the embedding and
the head are cut by rows of the vocabulary. A `Region` is what lies between such a pair. Tokens enter it whole and leave
it as a sum over the ranks, so a pair costs two collectives: one in the forward and one in the backward.

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) the residual stream between regions is cut by tokens,
[T / ranks, H]. Entering gathers and leaving scatters the sum: the same bytes on the wire as the sum alone, but norms
and what they keep for the backward are not repeated on every rank. What was gathered is kept whole for the gradients of
the weights, where the paper gathers it again.

The collectives are explicit autograd functions and all tensors are plain local ones: a layer works on its piece as if
it were alone. Parameters that every rank holds whole but sees only some of the work of (`partial_parameters`) have
gradients that the ranks must add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from gapless.adapters.lora import LoraLinear
from gapless.batch import DropoutCounters
from gapless.kernels.cross_entropy import VocabularyShard
from gapless.kernels.runtime import Recipe
from gapless.models.config import DecoderConfig
from gapless.models.decoder import Decoder, DecoderLayer, Embedding
from gapless.models.linear import Cut, DenseLinear, Linear, plain_linear
from gapless.models.norm import RMSNorm
from gapless.parallel.mesh import Mesh


def check_tensor(
    config: DecoderConfig,
    tp_size: int,
    tokens: int,
    sequence_parallel: bool,
    batch_size: str = "per_device_train_batch_size",
) -> None:
    """Refuse a model or a batch that cannot be cut.

    Args:
        config: of the model.
        tp_size: ranks of a tensor group.
        tokens: T, the tokens of a micro-batch.
        sequence_parallel: whether the residual stream is cut too.
        batch_size: the setting that T follows from, beside max_length.

    Raises:
        ValueError: what does not divide, both numbers and what to change.
    """
    for name, size in (("key-value heads", config.kv_heads), ("features of the MLP", config.ffn)):
        if size % tp_size:
            possible = [n for n in range(1, tp_size) if config.kv_heads % n == 0 and config.ffn % n == 0]
            raise ValueError(
                f"tp_size = {tp_size} does not divide the model's {size} {name}; possible: "
                f"{', '.join(map(str, possible))}, with the other ranks in dp_shard_size or pp_size"
            )
    if _vocabulary_range(config.vocab, tp_size - 1, tp_size)[1] < 1:
        raise ValueError(
            f"tp_size = {tp_size} leaves no token of a vocabulary of {config.vocab} to the last rank; use a smaller one"
        )
    if sequence_parallel and tokens % tp_size:
        raise ValueError(
            f"tp_size = {tp_size} does not divide the {tokens} tokens of a micro-batch ({batch_size} x max_length); "
            f"make max_length a multiple of {tp_size}, or set sequence_parallel = false"
        )


def apply_tensor(model: Decoder, mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Replace the modules of a decoder, or of a pipeline stage of one, by this rank's pieces.

    Args:
        model: on the meta device, or with weights, of which the pieces are copies; adapters have been applied. What is
            frozen and what is tied stays so.
        mesh: whose axis "tensor" shares the model.
        sequence_parallel: cut the residual stream by tokens.

    Raises:
        ValueError: something does not divide by the ranks (`check_tensor` says more about it).
    """
    group = mesh.group("tensor")
    if group is None:
        return
    region = Region(group, mesh.coordinate("tensor"), mesh.size("tensor"), sequence_parallel)
    tied = model.embed is not None and model.head is not None and _weight(model.head) is model.embed.weight
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        attention, mlp = layer.attention, layer.mlp
        attention.qkv, attention.out = region.column(attention.qkv), region.row(attention.out)
        mlp.gate_up, mlp.down = region.column(mlp.gate_up), region.row(mlp.down)
    if model.embed is not None:
        model.embed = VocabularyParallelEmbedding(model.embed, region).train(model.training)
    if model.norm is not None:
        model.norm = HeadNorm(model.norm, region).train(model.training)
    if model.head is not None:
        shared = model.embed.weight if model.embed is not None and tied else None
        model.head = VocabularyParallelHead(model.head, region, shared).train(model.training)
        model.vocabulary = VocabularyShard(_cut_of(model.head).start, group)


def partial_parameters(model: Decoder) -> list[nn.Parameter]:
    """Trained parameters that all tensor ranks hold whole, each with a gradient of a part of the work: to be added up.

    They are the norms of queries and keys (each rank has some heads), A of adapters on layers cut by output and B on
    those cut by input, and with sequence parallelism all other norms (each rank has some tokens).
    """
    return [parameter for parameter in _partial(model) if parameter.requires_grad]


def _partial(model: Decoder) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, DecoderLayer) and isinstance(module.attention.qkv, ColumnParallelLinear):
            norms = [module.attention.q_norm, module.attention.k_norm]
            if module.attention.qkv.region.sequence_parallel:
                norms += [module.attention_norm, module.mlp_norm]
            yield from (norm.weight for norm in norms if norm is not None)
        elif isinstance(module, ColumnParallelLinear) and isinstance(module.inner, LoraLinear):
            yield module.inner.lora_a
        elif isinstance(module, RowParallelLinear) and isinstance(module.inner, LoraLinear):
            yield from module.inner.lora_b.values()
        elif isinstance(module, HeadNorm) and module.region.sequence_parallel:
            yield module.weight


@dataclass(frozen=True)
class Region:
    """How tokens enter and leave the part of a layer that is cut over the ranks."""

    group: distributed.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    """Whether tokens are cut over the ranks outside."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] on every rank, from [T / size, C] with sequence parallelism. The gradients are added up."""
        return _GatherTokens.apply(x, self) if self.sequence_parallel else _Copy.apply(x, self)

    def leave(self, x: torch.Tensor, *, value: bool = True) -> torch.Tensor:
        """The ranks' sum of [T, C], which may be overwritten; with sequence parallelism this rank's [T / size, C].

        Without `value` what is returned is there to be differentiated alone.
        """
        if self.sequence_parallel:
            return _ScatterTokens.apply(x, self, value)
        return _Reduce.apply(x, self) if value else x

    def column(self, linear: Linear) -> ColumnParallelLinear:
        """This rank's piece of a layer, cut by output."""
        return ColumnParallelLinear(linear.shard(0, self.rank, self.size), self).train(linear.training)

    def row(self, linear: Linear) -> RowParallelLinear:
        """This rank's piece of a layer, cut by input."""
        return RowParallelLinear(linear.shard(1, self.rank, self.size), self).train(linear.training)


# ---- modules ----


class _ParallelLinear(Linear):
    """A piece of a layer and what the ranks exchange around it; as a `Linear` it looks like the piece."""

    def __init__(self, inner: Linear, region: Region) -> None:
        super().__init__()
        self.inner, self.region = inner, region
        self.in_features, self.leading, self.parts = inner.in_features, inner.leading, inner.parts
        self.shard_dim, self.cut = inner.shard_dim, inner.cut

    def dequantize(self) -> torch.Tensor:
        """The piece's weight."""
        return self.inner.dequantize()

    def shard(self, dim: int, rank: int, world: int) -> Linear:
        """The piece's; a piece is not cut again."""
        return self.inner.shard(dim, rank, world)

    def base_layer(self) -> Linear:
        """See `Linear.base_layer`."""
        return self.inner.base_layer()

    def local_layer(self) -> Linear:
        """The piece."""
        return self.inner


class ColumnParallelLinear(_ParallelLinear):
    """A layer cut by output: tokens enter the region before it."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Apply the piece to all tokens: [T, in], or [T / size, in] with sequence parallelism -> [T, out / size].

        Args:
            x: tokens outside the region.
            residual: none: what it would be added to is outside the region, the output inside.
            counters: of all tokens of the batch.
            spare: see `Linear.forward`.
            value: likewise.
            recipe: of x; what the ranks gather has none.
        """
        assert residual is None
        recipe = None if self.region.sequence_parallel else recipe
        return self.inner(self.region.enter(x), None, counters, spare=spare, value=value, recipe=recipe)

    @property
    def spare(self) -> int:
        """The piece's, unless other ranks' tokens are put beside these first."""
        return 0 if self.region.sequence_parallel else self.inner.spare


class RowParallelLinear(_ParallelLinear):
    """A layer cut by input: tokens leave the region behind it."""

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """Add up the pieces' outputs: [T, in / size] -> [T, out], or [T / size, out] with sequence parallelism.

        Args:
            x: all tokens, this rank's features.
            residual: of the result's shape; added once, after the sum.
            counters: of all tokens of the batch.
            spare: see `Linear.forward`.
            value: likewise; without it the ranks add up nothing.
            recipe: see `Linear.forward`.
        """
        y = self.inner(x, None, counters, spare=spare, value=value, recipe=recipe)
        y = self.region.leave(y, value=value)
        return y if residual is None else y + residual

    @property
    def spare(self) -> int:
        """The piece's."""
        return self.inner.spare


class VocabularyParallelEmbedding(Embedding):
    """A range of an embedding's rows; tokens leave the region behind it."""

    def __init__(self, whole: Embedding, region: Region) -> None:
        weight = whole.weight
        vocab, hidden = weight.shape
        start, length = _vocabulary_range(vocab, region.rank, region.size)
        super().__init__(length, hidden, dtype=weight.dtype, device="meta")
        self.weight, self.region = _rows(weight, start, length), region
        self.cut = Cut(0, start, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens int32 [T]: [T, H], or [T / size, H] with sequence parallelism."""
        rows = tokens - _cut_of(self).start
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        found = super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0)
        return self.region.leave(found)


class VocabularyParallelHead(_ParallelLinear):
    """A range of a head's rows, for hidden states that `HeadNorm` has brought into the region."""

    def __init__(self, whole: Linear, region: Region, shared: nn.Parameter | None) -> None:
        """Cut a head; `shared` is the embedding's piece if the two are tied."""
        weight = _weight(whole)
        vocab, hidden = weight.shape
        start, length = _vocabulary_range(vocab, region.rank, region.size)
        inner = plain_linear(whole.parts[0].name, hidden, length, dtype=weight.dtype, device="meta")
        inner.weight = _rows(weight, start, length) if shared is None else shared
        inner.cut = Cut(0, start, vocab)
        super().__init__(inner, region)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        counters: DropoutCounters | None = None,
        *,
        spare: int = 0,
        value: bool = True,
        recipe: Recipe | None = None,
    ) -> torch.Tensor:
        """The logits of the whole vocabulary on every rank: x [M, H] -> [M, V].

        Their gradient must be the same on all ranks, each of which takes its own range of it.
        """
        assert residual is None
        return _GatherVocabulary.apply(self.inner(x), _cut_of(self), self.region)


class HeadNorm(RMSNorm):
    """The last norm, whose output enters the head's region."""

    def __init__(self, norm: RMSNorm, region: Region) -> None:
        super().__init__(len(norm.weight), norm.eps, dtype=norm.weight.dtype, device="meta")
        self.weight, self.region = norm.weight, region

    def forward(self, x: torch.Tensor, spare: int = 0) -> torch.Tensor:
        """Normalise x [T, H], or [T / size, H] with sequence parallelism: [T, H]."""
        return self.region.enter(super().forward(x, spare))


def _vocabulary_range(vocab: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of a rank: equal ranges, the last one shorter where they do not divide."""
    longest = -(-vocab // size)
    return rank * longest, min(longest, vocab - rank * longest)


def _rows(weight: nn.Parameter, start: int, length: int) -> nn.Parameter:
    return nn.Parameter(weight.detach()[start : start + length].clone(), weight.requires_grad)


def _weight(head: Linear) -> nn.Parameter:
    base = head.base_layer()
    assert isinstance(base, DenseLinear)
    assert base.bias is None
    return base.weight


def _cut_of(module: Embedding | Linear) -> Cut:
    assert module.cut is not None
    return module.cut


# ---- collectives ----


class _Copy(torch.autograd.Function):
    """The same tensor on all ranks; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # A copy: autograd may hold the gradient that arrives elsewhere too.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.region.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """The ranks' sum, in place; the gradient of each summand is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.mark_dirty(x)
        distributed.all_reduce(x, group=region.group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class _GatherTokens(torch.autograd.Function):
    """All tokens from each rank's; the gradients of a rank's tokens are added up on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        return _gathered(x, region)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _scattered(grads[0], ctx.region), None


class _ScatterTokens(torch.autograd.Function):
    """A rank's tokens of the ranks' sum; the gradient of each summand is that of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region, value: bool) -> torch.Tensor:
        ctx.region = region
        return _scattered(x, region) if value else x.new_empty(()).expand(len(x) // region.size, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gathered(grads[0], ctx.region), None, None


class _GatherVocabulary(torch.autograd.Function):
    """Logits of the whole vocabulary from each rank's range; a rank's gradient is its range of the whole one."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, cut: Cut, region: Region) -> torch.Tensor:
        ctx.range = (cut.start, logits.shape[1])
        longest = _vocabulary_range(cut.total, 0, region.size)[1]
        padded = nn.functional.pad(logits, (0, longest - logits.shape[1]))
        pieces = _gathered(padded, region).unflatten(0, (region.size, len(logits)))
        return pieces.transpose(0, 1).flatten(1)[:, : cut.total]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(1, *ctx.range).contiguous(), None, None


def _collective(*names: str) -> Any:
    """The first that this release of torch has: newer ones warn of the older names."""
    return next(getattr(distributed, name) for name in names if hasattr(distributed, name))


_all_gather = _collective("all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")


def _gathered(x: torch.Tensor, region: Region) -> torch.Tensor:
    out = x.new_empty(len(x) * region.size, *x.shape[1:])
    _all_gather(out, x.contiguous(), group=region.group)
    return out


def _scattered(x: torch.Tensor, region: Region) -> torch.Tensor:
    assert len(x) % region.size == 0, "check_tensor refuses such batches"
    out = x.new_empty(len(x) // region.size, *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=region.group)
    return out
