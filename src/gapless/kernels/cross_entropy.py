"""The output projection and the cross-entropy in one operation that never holds the logits of all tokens.

Logits exist for a chunk of rows at a time: made by a matmul, turned into their gradients in place, and used up by the
matmuls of the gradients of hidden states and head. Options: the softcap of Gemma 2 (Gemma team 2024, section 2), the
scale on logits of Cohere's Command models, and PaLM's z-loss (Chowdhery et al. 2022, section 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from gapless.batch import IGNORE
from gapless.kernels.runtime import cdiv, jit, launch, next_power_of_2, tanh, tl, use_triton

CHUNK_TOKENS = 256
"""Tokens whose logits exist at a time on a CPU; 256 rows of a vocabulary of 49,152 are 50 MB in float32."""
_CUT_ROWS = 2048
"""The same for kernels, where a vocabulary is cut over ranks."""
_BYTES = 512 * 2**20
"""Of logits that exist at a time."""
_TRAINED_BYTES = 2**30
"""The most where the head is trained and as large: its gradient is copied in the backward, which takes as much."""
_LOW_PRECISION_CHUNKS = 4
"""Summands that the head's gradient may have in low precision; of more it is a float32 sum."""


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the head are here, where tensor ranks hold consecutive ranges of the vocabulary."""

    start: int
    """Token of the first row."""
    group: distributed.ProcessGroup
    """The ranks that hold the whole vocabulary together."""


class _Options(NamedTuple):
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0
    vocabulary: VocabularyShard | None = None


# ---- reference ----


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        options: _Options,
    ) -> torch.Tensor:
        loss_sum = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for rows, targets in _chunks(hidden, labels, chunk_tokens):
            chunk = _chunk_loss(rows, targets, weight, options)
            loss_sum += chunk.loss
            # softmax - one_hot, in the memory of the logits; rows that count nothing give zero.
            grad_logits = chunk.exponentials.mul_((chunk.factor / chunk.total)[:, None])
            grad_logits.scatter_add_(1, chunk.index, -chunk.kept_here[:, None])
            if chunk.slope is not None:
                grad_logits.mul_(chunk.slope)
            if options.logit_scale != 1:
                grad_logits.mul_(options.logit_scale)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + len(rows)])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits, rows)
            start += len(rows)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None


def _chunks(hidden: torch.Tensor, labels: torch.Tensor, chunk_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not len(labels):
        return []
    return list(zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True))


@dataclass(frozen=True)
class _Chunk:
    loss: torch.Tensor
    """0-d."""
    exponentials: torch.Tensor
    """exp(logits - maximum), float32 [M, V]."""
    total: torch.Tensor
    """[M]: their sum over the whole vocabulary."""
    factor: torch.Tensor
    """float32 [M]: of the softmax in the gradient of the logits; 0 for rows that count nothing."""
    slope: torch.Tensor | None
    """float32 [M, V]: derivative of the softcap, where there is one."""
    index: torch.Tensor
    """int64 [M, 1]: row of the label here; any one where it is elsewhere or there is none."""
    kept_here: torch.Tensor
    """float32 [M]: 1 for rows that count and whose label's row is here, 0 for others."""


def _chunk_loss(hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, options: _Options) -> _Chunk:
    vocabulary = options.vocabulary
    logits, slope = torch.mm(hidden, weight.t()).float(), None
    if options.logit_scale != 1:
        logits.mul_(options.logit_scale)
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(options.softcap)
    counts = labels != IGNORE
    index = labels.long() - (0 if vocabulary is None else vocabulary.start)
    here = (index >= 0) & (index < len(weight)) & counts
    kept, kept_here = counts.float(), here.float()
    index = index.clamp(0, len(weight) - 1)[:, None]
    target = logits.gather(1, index).squeeze(1)
    maximum = logits.amax(dim=1)
    if vocabulary is not None:
        distributed.all_reduce(maximum, distributed.ReduceOp.MAX, group=vocabulary.group)
    exponentials = logits.sub_(maximum[:, None]).exp_()
    total, found = exponentials.sum(dim=1), kept_here
    if vocabulary is not None:
        sums = torch.stack([total, target.masked_fill(~here, 0), kept_here])
        distributed.all_reduce(sums, group=vocabulary.group)
        total, target, found = sums.unbind()
    total = total.masked_fill(found < kept, torch.nan)  # a label that is nowhere
    log_sum = total.log() + maximum
    losses, factor = log_sum - target, kept
    if options.z_loss:
        losses = losses + options.z_loss * log_sum.square()
        factor = kept * (1 + 2 * options.z_loss * log_sum)
    return _Chunk((losses * kept).sum(), exponentials, total, factor, slope, index, kept_here)


def _add_product(total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add grad_logits^T @ hidden to the total, which is float32."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total += torch.mm(grad_logits.t(), hidden)


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, options: _Options
) -> torch.Tensor:
    if hidden.device.type == "cpu":
        # Rows that count nothing are left out; on a GPU their number would have to be copied to the host first.
        rows = (labels != IGNORE).nonzero().squeeze(1)
        if len(rows) < len(labels):
            hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
        if options.vocabulary is None and len(unknown := labels[(labels < 0) | (labels >= len(weight))]):
            raise ValueError(
                f"label {int(unknown[0])} is not in the vocabulary of {len(weight)}; {IGNORE} is for a row that counts "
                "nothing"
            )
    if not _needs_grad(hidden, weight):
        losses = [_chunk_loss(*chunk, weight, options).loss for chunk in _chunks(hidden, labels, chunk_tokens)]
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, options)


def _needs_grad(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)


# ---- kernels ----
#
# A program has a row. It reads the row for the maximum and the sum of the exponentials, lane by lane, and once more
# from its end, where L2 still has it, to write the gradients over the logits. In the kernels a logit is k y: y is the
# value in memory and k the scale on logits, or y is the tanh and k the softcap; and exp(k y) is 2^(c y). Differences
# of two y come first, where they are exact.


@jit
def _value(logit, inner, SOFTCAP: tl.constexpr):
    y = logit.to(tl.float32)
    if SOFTCAP:
        y = tanh(y * inner)
    return y


@jit
def _add_exponentials(y, largest, total, c):
    """Take a block into each lane's largest y and its sum of 2^(c (y - largest)): one exponential an element."""
    difference = y - largest
    larger = difference > 0.0
    e = tl.exp2(-tl.abs(difference) * c)
    total = tl.where(larger, total * e + 1.0, total + e)
    return tl.where(larger, y, largest), total


@jit
def _maximum_and_sum(row, columns, inner, c, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    # The lowest number in place of -inf, whose difference with a masked lane's -inf would be NaN.
    largest = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    whole = columns // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        y = _value(tl.load(row + first + lane), inner, SOFTCAP)
        largest, total = _add_exponentials(y, largest, total, c)
    if whole < columns:
        inside = whole + lane < columns
        y = _value(tl.load(row + whole + lane, mask=inside, other=0.0), inner, SOFTCAP)
        largest, total = _add_exponentials(tl.where(inside, y, -float("inf")), largest, total, c)
    maximum = tl.max(largest, 0)
    return maximum, tl.sum(total * tl.exp2((largest - maximum) * c), 0)


@jit
def _gradient(logit, column, target, maximum, factor, slope, inner, c, SOFTCAP: tl.constexpr):
    """Factor times exp(logit - largest), less slope at the target; times the derivative of the softcap."""
    y = _value(logit, inner, SOFTCAP)
    grad = tl.exp2((y - maximum) * c) * factor
    grad = tl.where(column == target, grad - slope, grad)
    if SOFTCAP:
        grad *= 1.0 - y * y
    return grad.to(logit.dtype)


@jit
def _write_gradients(
    row, columns, target, maximum, factor, slope, inner, c, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    whole = columns // BLOCK * BLOCK
    if whole < columns:
        column = whole + lane
        logit = tl.load(row + column, mask=column < columns, other=0.0)
        grad = _gradient(logit, column, target, maximum, factor, slope, inner, c, SOFTCAP)
        tl.store(row + column, grad, mask=column < columns)
    for done in range(0, whole, BLOCK):
        column = whole - BLOCK - done + lane
        logit = tl.load(row + column)
        grad = _gradient(logit, column, target, maximum, factor, slope, inner, c, SOFTCAP)
        tl.store(row + column, grad)


@jit
def _clear(row, columns, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), row.dtype.element_ty)
    for first in range(0, columns, BLOCK):
        tl.store(row + first + lane, zeros, mask=first + lane < columns)


@jit
def _loss_kernel(
    logits, labels, losses, columns, stride, k, c, inner, slope, z_loss, IGNORE: tl.constexpr, SOFTCAP: tl.constexpr,
    GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss of each row; and with GRAD d loss / d logits (before softcap and scale) in the place of the logits."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    label = tl.load(labels + index)
    if label == IGNORE:
        tl.store(losses + index, 0.0)
        if GRAD:
            _clear(row, columns, BLOCK)
    else:
        # Before the barriers in the sums, after which other threads may write here.
        known = (label >= 0) & (label < columns)
        target = _value(tl.load(row + label, mask=known, other=float("nan")), inner, SOFTCAP)
        maximum, total = _maximum_and_sum(row, columns, inner, c, SOFTCAP, BLOCK)
        # NaN where there is no such label, and so is the gradient. `known` itself would take a register until here.
        total = tl.where(target == target, total, target)
        log_total = tl.log(total)
        log_sum = k * maximum + log_total
        tl.store(losses + index, log_total + k * (maximum - target) + z_loss * log_sum * log_sum)
        if GRAD:
            factor = (1.0 + 2.0 * z_loss * log_sum) * slope / total
            _write_gradients(row, columns, label, maximum, factor, slope, inner, c, SOFTCAP, BLOCK)


@jit
def _statistics_kernel(
    logits, labels, statistics, rows, columns, stride, start, c, inner, IGNORE: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part of the vocabulary: largest y, sum of exp(k y - k largest), the label's y, whether the label is here.

    In float32 [4, rows]. The label's y is 0 where it is elsewhere; all are 0 for rows that count nothing.
    """
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    label = tl.load(labels + index)
    maximum, total, target, found = 0.0, 0.0, 0.0, 0.0
    if label != IGNORE:
        column = label - start
        here = (column >= 0) & (column < columns)
        found = here.to(tl.float32)
        target = tl.where(here, _value(tl.load(row + column, mask=here, other=0.0), inner, SOFTCAP), 0.0)
        maximum, total = _maximum_and_sum(row, columns, inner, c, SOFTCAP, BLOCK)
    tl.store(statistics + index, maximum)
    tl.store(statistics + rows + index, total)
    tl.store(statistics + 2 * rows + index, target)
    tl.store(statistics + 3 * rows + index, found)


@jit
def _cut_loss_kernel(
    logits, labels, statistics, losses, rows, columns, stride, start, k, c, inner, slope, z_loss,
    IGNORE: tl.constexpr, SOFTCAP: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_loss_kernel` writes, from statistics over the whole vocabulary."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    label = tl.load(labels + index)
    if label == IGNORE:
        tl.store(losses + index, 0.0)
        if GRAD:
            _clear(row, columns, BLOCK)
    else:
        maximum = tl.load(statistics + index)
        # As in `_loss_kernel`, a label that is nowhere.
        total = tl.where(tl.load(statistics + 3 * rows + index) > 0, tl.load(statistics + rows + index), float("nan"))
        target = tl.load(statistics + 2 * rows + index)
        log_total = tl.log(total)
        log_sum = k * maximum + log_total
        tl.store(losses + index, log_total + k * (maximum - target) + z_loss * log_sum * log_sum)
        if GRAD:
            factor = (1.0 + 2.0 * z_loss * log_sum) * slope / total
            _write_gradients(row, columns, label - start, maximum, factor, slope, inner, c, SOFTCAP, BLOCK)


@jit
def _scale_kernel(x, grad, out, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    y = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * tl.load(grad)
    tl.store(out + offset, y.to(out.dtype.element_ty), mask=inside)


# ---- launchers ----


def _tiles(columns: int, element_size: int) -> tuple[int, int]:
    """Columns of a block, and warps: a thread has 32 bytes of a row, two loads in flight."""
    block = min(next_power_of_2(columns), 8192 if element_size == 2 else 2048)
    return block, max(1, block * element_size // 1024)


def _rows_of_chunks(tokens: int, weight: torch.Tensor, *, trained: bool, cut: bool) -> int:
    """How many rows of logits are held at a time.

    Logits take up to 512 MiB. A trained head's gradient is read and written again for every chunk, and is rounded each
    time: the logits may take what the gradient takes, up to 1 GiB, as the backward needs that for a copy of it anyway.
    Of 8,192 rows, 4,096 features, a vocabulary of 128,256 and bf16 that makes 4 chunks of 2,048 rows (0.49 GiB) with
    the head frozen, and 2 of 4,096 (0.98 GiB) with it trained.

    Args:
        tokens: rows in all.
        weight: [V, H].
        trained: whether it gets a gradient.
        cut: whether other ranks have other parts of the vocabulary, maybe of other sizes: all must take equal chunks.
    """
    most = _CUT_ROWS
    if not cut:
        own = weight.numel() * weight.element_size()
        budget = min(max(_BYTES, own), _TRAINED_BYTES) if trained else _BYTES
        most = max(budget // (len(weight) * weight.element_size()) // 256 * 256, 256)
    chunks = max(cdiv(tokens, most), 1)
    return max(cdiv(cdiv(tokens, chunks), 128), 1) * 128


def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk_tokens: int | None,
    options: _Options,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The loss, and for an upstream gradient of 1 the gradients of hidden states and weight that are needed.

    The latter is float32 where it has many summands.
    """
    tokens, columns, labels = len(labels), len(weight), labels.contiguous()
    rows = chunk_tokens or _rows_of_chunks(tokens, weight, trained=needs[1], cut=options.vocabulary is not None)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight = None
    if needs[1]:
        low = cdiv(tokens, rows) <= _LOW_PRECISION_CHUNKS
        grad_weight = torch.empty_like(weight, dtype=weight.dtype if low else torch.float32)
        if not tokens:
            grad_weight.zero_()
    # Rows that begin at multiples of 32 bytes, whatever the vocabulary: for wide accesses, and for the matmuls.
    buffer = hidden.new_empty(min(rows, tokens), cdiv(columns, 16) * 16)
    for start in range(0, tokens, rows):
        part = slice(start, min(start + rows, tokens))
        x, targets = hidden[part], labels[part]
        logits = buffer[: len(targets), :columns]
        torch.mm(x, weight.t(), out=logits)
        _loss(logits, targets, losses[part], options, grad=any(needs))
        if grad_hidden is not None:
            torch.mm(logits, weight, out=grad_hidden[part])
        if grad_weight is not None:
            # A row that counts nothing has zeros in `logits`, but zero times NaN is NaN.
            x = x.masked_fill((targets == IGNORE)[:, None], 0)
            _accumulate(grad_weight, logits, x, first=start == 0)
    return losses.sum(), grad_hidden, grad_weight


def _loss(logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, options: _Options, *, grad: bool) -> None:
    """Launch the kernels for a chunk; with `grad` the logits become their gradients."""
    rows, columns = logits.shape
    block, warps = _tiles(columns, logits.element_size())
    scale, softcap, cut = options.logit_scale, options.softcap, options.vocabulary
    k = scale if softcap is None else softcap
    c, inner = k * math.log2(math.e), 0.0 if softcap is None else scale / softcap
    fixed: dict[str, Any] = {"IGNORE": IGNORE, "SOFTCAP": softcap is not None, "BLOCK": block, "num_warps": warps}
    factors = (k, c, inner, scale, options.z_loss)
    grid, device, stride = (rows,), logits.device, logits.stride(0)
    if cut is None:
        shape = (columns, stride)
        launch(_loss_kernel, grid, device, logits, labels, losses, *shape, *factors, GRAD=grad, **fixed)
        return
    statistics = logits.new_empty(4, rows, dtype=torch.float32)
    shape = (rows, columns, stride, cut.start)
    launch(_statistics_kernel, grid, device, logits, labels, statistics, *shape, c, inner, **fixed)
    own = statistics[0].clone()
    distributed.all_reduce(statistics[0], distributed.ReduceOp.MAX, group=cut.group)
    statistics[1].mul_(own.sub_(statistics[0]).mul_(k).exp_())
    distributed.all_reduce(statistics[1:], group=cut.group)
    launch(_cut_loss_kernel, grid, device, logits, labels, statistics, losses, *shape, *factors, GRAD=grad, **fixed)


def _accumulate(total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor, *, first: bool) -> None:
    """Add grad_logits^T @ hidden to the total, or begin with it."""
    beta = 0 if first else 1
    if total.dtype == hidden.dtype:
        total.addmm_(grad_logits.t(), hidden, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, grad_logits.t(), hidden, torch.float32, beta=beta, out=total)
    else:
        product = torch.mm(grad_logits.t(), hidden)
        _ = total.copy_(product) if first else total.add_(product)


def _scaled(x: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product with a number that the device has, in another tensor."""
    out = torch.empty_like(x, dtype=dtype)
    block = 4096
    launch(_scale_kernel, (cdiv(x.numel(), block),), x.device, x, grad, out, x.numel(), BLOCK=block, num_warps=8)
    return out


# ---- autograd ----


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int | None,
        options: _Options,
    ) -> torch.Tensor:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        loss, grad_hidden, grad_weight = _fused(hidden, weight, labels, chunk_tokens, options, needs)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        outs = [None if saved is None else _scaled(saved, grad, ctx.dtype) for saved in ctx.saved_tensors]
        return *outs, None, None, None


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> None:
    if hidden.ndim != 2 or weight.shape[1:] != hidden.shape[1:] or labels.shape != hidden.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, labels))
        raise ValueError(f"hidden [M, H], weight [V, H] and labels [M] have shapes {shapes}")
    if not hidden.is_floating_point() or weight.dtype != hidden.dtype:
        raise ValueError(f"hidden has dtype {hidden.dtype} and weight {weight.dtype}: not one of floating point")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels have dtype {labels.dtype}, not torch.int32 or torch.int64")
    if not len(weight):
        raise ValueError("weight has no rows: there is no vocabulary")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    vocabulary: VocabularyShard | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Sum over tokens of log(sum(exp(logits))) - logits[label] + z_loss log(sum(exp(logits)))^2.

    The logits are softcap tanh(logit_scale hidden @ weight^T / softcap), without the softcap logit_scale hidden @
    weight^T, rounded before softcap and scale to the dtype of the inputs.

    The gradients are computed chunk by chunk together with the loss, so the logits are needed once; the backward only
    multiplies them by the gradient that arrives and changes nothing saved, hence it may run again. Of c chunks a GPU's
    kernels add up the gradient of a 16-bit weight in its dtype while c <= 4, with at most about sqrt((c + 1) / 2) times
    the rounding error of one sum, and in float32 above, which takes 4 bytes for each weight until the backward.

    Rows with label -100 add exactly 0 to the loss and to the gradient of the weight and have 0 as gradient, also where
    their hidden states are not finite. Any other label outside of the vocabulary makes the loss NaN, where it cannot be
    refused without a wait: on a GPU, and with a cut vocabulary.

    With a `vocabulary` cut over ranks (Shoeybi et al. 2019, section 3) they exchange, of each chunk, the largest logit
    and then, together, the sum of the exponentials, the label's logit and whether it is theirs; nothing in the
    backward. The gradient of `hidden` that comes out is then this rank's summand: whoever copied `hidden` to the ranks
    adds them up.

    Args:
        hidden: [M, H], bf16, fp16 or fp32; the same on all ranks of a cut vocabulary.
        weight: [V, H] in the same dtype, or the rows that are here.
        labels: int32 or int64 [M]; -100 for a row that counts nothing.
        chunk_tokens: rows of logits held at a time; by default 256, and for a GPU's kernels what makes 0.5 to 1 GiB of
            logits, or 2,048 with a cut vocabulary.
        vocabulary: which rows are here; None for all.
        softcap: bound of the logits, above 0; None for none (Gemma 2).
        logit_scale: factor on the logits, above 0 (Cohere).
        z_loss: weight of the square of the log of the sum, at least 0 (PaLM, section 5).

    Returns:
        0-d float32 sum of the losses (0 if no row counts); the same on all ranks.

    Raises:
        ValueError: shapes or dtypes that do not belong together, an empty vocabulary, an option out of its range or not
            finite, or, on a CPU, a label outside of the vocabulary.
    """
    _check(hidden, weight, labels)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be finite and above 0, not {softcap}; None for none")
    if not 0 < logit_scale < math.inf:
        raise ValueError(f"logit_scale must be finite and above 0, not {logit_scale}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss must be finite and at least 0, not {z_loss}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    options = _Options(softcap, logit_scale, z_loss, vocabulary)
    if not use_triton(hidden):
        return _reference(hidden, weight, labels, chunk_tokens or CHUNK_TOKENS, options)
    if not _needs_grad(hidden, weight):
        return _fused(hidden, weight, labels, chunk_tokens, options, (False, False))[0]
    return _FusedLinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, options)
