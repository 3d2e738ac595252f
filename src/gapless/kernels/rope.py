"""Rotary position embedding (Su et al. 2021, "RoFormer", section 3.4) of fused queries and keys, with optional qk-norm.

Pairs of features of a head are rotated together: i with i + R/2 (the half-split layout of Hugging Face) or 2i with
2i + 1 (interleaved, as in the paper); features from R on pass through (partial rotary). The RMS norm of queries and
keys over their features comes first (Henry et al. 2020, "Query-Key Normalization", with RMS as in Qwen 3). One launch
forward turns q and k; one launch backward writes the whole gradient of the fused tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gapless.kernels.reduce import add_partials
from gapless.kernels.runtime import cdiv, jit, launch, multiprocessors, next_power_of_2, tl, use_triton


@dataclass(frozen=True)
class RotaryTable:
    """The rotation of every token of one stream, computed once per forward and shared by all layers."""

    cos: torch.Tensor
    """float32 [T, R/2]."""
    sin: torch.Tensor
    """float32 [T, R/2]."""


def rotary_table(positions: torch.Tensor, frequencies: torch.Tensor, scaling: float = 1.0) -> RotaryTable:
    """The table for a stream.

    Args:
        positions: int32 [T].
        frequencies: float32 [R/2], radians per position; R features of a head are rotated.
        scaling: factor on cosine and sine (YaRN's attention factor).
    """
    angles = positions[:, None].float() * frequencies
    return RotaryTable(angles.cos().mul_(scaling), angles.sin().mul_(scaling))


# ---- reference ----


class _Settings(NamedTuple):
    """What is not a tensor."""

    eps: float
    interleaved: bool
    fast: bool
    """Whether kernels run; decided in the forward for both directions."""


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate float32 [T, K, G, D] by the angles of its tokens; with -sin, back."""
    half = cos.shape[1]
    cos, sin = cos[:, None, None], sin[:, None, None]
    out = x.clone() if 2 * half < x.shape[-1] else torch.empty_like(x)
    places = [slice(0, 2 * half, 2), slice(1, 2 * half, 2)] if interleaved else [slice(half), slice(half, 2 * half)]
    first, second = (x[..., place] for place in places)
    out[..., places[0]] = (first * cos).addcmul_(second, sin, value=-1)
    out[..., places[1]] = (second * cos).addcmul_(first, sin)
    return out


def _rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _reference_forward(
    qkv: torch.Tensor, table: RotaryTable, weights: list[torch.Tensor], settings: _Settings
) -> list[torch.Tensor]:
    groups = qkv.shape[2] - 2
    outs = []
    for index, x in enumerate((qkv[:, :, :groups], qkv[:, :, groups : groups + 1])):
        x32 = x.float()
        if weights:
            x32 = (x32 * _rstd(x32, settings.eps)).mul_(weights[index])
        outs.append(_turn(x32, table.cos, table.sin, settings.interleaved).to(qkv.dtype).flatten(1, 2))
    return outs


def _reference_backward(
    grads: list[torch.Tensor],
    qkv: torch.Tensor | None,
    table: RotaryTable,
    weights: list[torch.Tensor],
    settings: _Settings,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gradients of the fused tensor, and of the weights."""
    tokens, kv_heads, features = grads[1].shape
    groups = grads[0].shape[1] // kv_heads
    out = grads[0].new_empty(tokens, kv_heads, groups + 2, features)
    out[:, :, groups + 1] = grads[2]
    grad_weights = []
    for index, place in enumerate((slice(groups), slice(groups, groups + 1))):
        grad = grads[index].reshape(tokens, kv_heads, -1, features).float()
        grad = _turn(grad, table.cos, -table.sin, settings.interleaved)
        if qkv is not None:
            x = qkv[:, :, place].float()
            rstd = _rstd(x, settings.eps)
            normed = x * rstd
            grad_weights.append((grad * normed).flatten(0, -2).sum(0).to(weights[index].dtype))
            # d(x rstd)/dx is rstd (I - n n^T / D) with n = x rstd.
            grad = grad * weights[index]
            inner = torch.linalg.vecdot(grad, normed).unsqueeze_(-1).div_(features)
            grad = grad.addcmul_(normed, inner, value=-1).mul_(rstd)
        out[:, :, place] = grad
    return out, grad_weights


# ---- kernels ----
#
# A tile is ROWS consecutive heads, counted through all tokens, so that no lane is idle whatever the number of heads;
# cosines, sines and weights come again from the L1 cache for every head. All loads of a tile have one shape, and so
# one layout: a thread has 16 bytes of either half of a row (interleaved: 16 bytes of the row), and nothing goes
# through shared memory. A program that takes several steps keeps its heads and goes on to later tokens.


@jit
def _choose(condition, first, second, ALIGNMENT: tl.constexpr):
    """tl.where of pointers that are multiples of ALIGNMENT bytes, which Triton 3.9 would not know any more."""
    return tl.multiple_of(tl.where(condition, first, second), [ALIGNMENT, ALIGNMENT])


@jit
def _load_pair(start, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rotated features of rows, float32 [rows, PADDED] twice; start: pointers [rows, 1] to their first features."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.load(start + column, mask=inside & (column < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], PADDED, 2)))
    else:
        column = tl.arange(0, PADDED)[None, :]
        mask = inside & (column < HALF)
        first = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(start + HALF + column, mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def _store_pair(start, first, second, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        column = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * PADDED))
        tl.store(start + column, both.to(start.dtype.element_ty), mask=inside & (column < 2 * HALF))
    else:
        column = tl.arange(0, PADDED)[None, :]
        mask = inside & (column < HALF)
        tl.store(start + column, first.to(start.dtype.element_ty), mask=mask)
        tl.store(start + HALF + column, second.to(start.dtype.element_ty), mask=mask)


@jit
def _load_columns(start, inside, BEGIN: tl.constexpr, END: tl.constexpr, PADDED: tl.constexpr):
    """Columns BEGIN to END of rows, float32 [rows, PADDED]; 0 where PADDED is."""
    if PADDED:
        column = BEGIN + tl.arange(0, PADDED)[None, :]
        x = tl.load(start + column, mask=inside & (column < END), other=0.0).to(tl.float32)
    else:
        x = tl.full((), 0.0, tl.float32)
    return x


@jit
def _store_columns(start, x, inside, BEGIN: tl.constexpr, END: tl.constexpr, PADDED: tl.constexpr):
    if PADDED:
        column = BEGIN + tl.arange(0, PADDED)[None, :]
        tl.store(start + column, x.to(start.dtype.element_ty), mask=inside & (column < END))


@jit
def _load_row(
    start,
    inside,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    first, second = _load_pair(start, inside, HALF, PADDED, INTERLEAVED)
    return first, second, _load_columns(start, inside, 2 * HALF, D, REST)


@jit
def _row_sum(first, second, rest, REST: tl.constexpr):
    total = tl.sum(first + second, axis=1, keep_dims=True)
    if REST:
        total += tl.sum(rest, axis=1, keep_dims=True)
    return total


@jit
def _rotate_forward(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    q_out,
    k_out,
    tokens,
    steps,
    stride,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // (K * (G + 1)), row % (K * (G + 1))
    group = head // (G + 1)
    is_query = head - group * (G + 1) < G
    ahead = tl.num_programs(0) * ROWS // (K * (G + 1))
    for _ in range(steps):
        inside = token < tokens
        place = token.to(tl.int64)
        source = qkv + place * stride + (head + group) * D
        x1, x2, x3 = _load_row(source, inside, D, HALF, PADDED, REST, INTERLEAVED)
        c = _load_columns(cos + place * HALF, inside, 0, HALF, PADDED)
        s = _load_columns(sin + place * HALF, inside, 0, HALF, PADDED)
        if NORM:
            weight = _choose(is_query, q_weight, k_weight, ALIGNMENT)
            w1, w2, w3 = _load_row(weight, inside, D, HALF, PADDED, REST, INTERLEAVED)
            rstd = tl.rsqrt(_row_sum(x1 * x1, x2 * x2, x3 * x3, REST) / D + eps)
            x1, x2, x3 = x1 * rstd * w1, x2 * rstd * w2, x3 * rstd * w3
        target = q_out + (place * (K * G) + head - group) * D
        target = _choose(is_query, target, k_out + (place * K + group) * D, ALIGNMENT)
        _store_pair(target, x1 * c - x2 * s, x2 * c + x1 * s, inside, HALF, PADDED, INTERLEAVED)
        _store_columns(target, x3, inside, 2 * HALF, D, REST)
        token += ahead


@jit
def _norm_backward(x, y, w, inside, is_value, eps, D: tl.constexpr, REST: tl.constexpr):
    """The gradient of rows x from y, that of normalised rows times weights w; and normalised rows."""
    x1, x2, x3 = x
    y1, y2, y3 = y
    w1, w2, w3 = w
    z1, z2 = tl.where(is_value, y1, y1 * w1), tl.where(is_value, y2, y2 * w2)
    z3 = tl.where(is_value, y3, y3 * w3) if REST else 0.0
    square = _row_sum(x1 * x1, x2 * x2, x3 * x3, REST)
    inner = _row_sum(x1 * z1, x2 * z2, x3 * z3, REST)
    # Rows that there are not are zeros: with eps = 0 they would become NaN in the sums. Values pass as they are,
    # infinite ones too: x is 0, whatever the sum.
    rstd = tl.where(is_value, 1.0, tl.where(inside, tl.rsqrt(square / D + eps), 0.0))
    inner = tl.where(is_value, 0.0, inner * rstd / D)
    n1, n2, n3 = x1 * rstd, x2 * rstd, x3 * rstd
    return ((z1 - n1 * inner) * rstd, (z2 - n2 * inner) * rstd, (z3 - n3 * inner) * rstd), (n1, n2, n3)


@jit
def _rotate_backward(
    q_grad,
    k_grad,
    v_grad,
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    out,
    partial,
    tokens,
    steps,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    stride,
    eps,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // (K * (G + 2)), row % (K * (G + 2))
    group = head // (G + 2)
    is_query, is_value = head - group * (G + 2) < G, head - group * (G + 2) == G + 1
    ahead = tl.num_programs(0) * ROWS // (K * (G + 2))
    # One pointer and one stride a row from here on, rather than those of three tensors.
    place, wide = token.to(tl.int64), group.to(tl.int64)
    grad = v_grad + place * v_stride + wide * v_head_stride
    grad = _choose(is_value, grad, k_grad + place * k_stride + wide * k_head_stride, ALIGNMENT)
    grad = _choose(is_query, q_grad + place * q_stride + (head - 2 * wide) * q_head_stride, grad, ALIGNMENT)
    jump = tl.where(is_query, q_stride, tl.where(is_value, v_stride, k_stride)).to(tl.int64) * ahead
    if WEIGHTS:
        sum1 = tl.zeros((ROWS, PADDED), tl.float32)
        sum2, sum3 = sum1, tl.zeros((ROWS, REST if REST else 1), tl.float32)
    else:
        sum1, sum2, sum3 = 0.0, 0.0, 0.0
    for step in range(steps):
        now = token + step * ahead
        inside, place = now < tokens, now.to(tl.int64)
        turned = inside & (is_value == 0)
        source = tl.multiple_of(grad + step * jump, [ALIGNMENT, ALIGNMENT])
        a1, a2, y3 = _load_row(source, inside, D, HALF, PADDED, REST, INTERLEAVED)
        c = _load_columns(cos + place * HALF, turned, 0, HALF, PADDED)
        s = _load_columns(sin + place * HALF, turned, 0, HALF, PADDED)
        # Values are copied.
        y1, y2 = tl.where(is_value, a1, a1 * c + a2 * s), tl.where(is_value, a2, a2 * c - a1 * s)
        if NORM:
            source = qkv + place * stride + head * D
            x = _load_row(source, turned, D, HALF, PADDED, REST, INTERLEAVED)
            # Here rather than before the loop, where they would be waited for first, and take registers ever after.
            weight = _choose(is_query, q_weight, k_weight, ALIGNMENT)
            w = _load_row(weight, inside, D, HALF, PADDED, REST, INTERLEAVED)
            slopes, n = _norm_backward(x, (y1, y2, y3), w, inside, is_value, eps, D, REST)
            if WEIGHTS:
                sum1, sum2, sum3 = sum1 + y1 * n[0], sum2 + y2 * n[1], sum3 + y3 * n[2]
            y1, y2, y3 = slopes
        if out is not None:
            target = out + place * (K * (G + 2) * D) + head * D
            _store_pair(target, y1, y2, inside, HALF, PADDED, INTERLEAVED)
            _store_columns(target, y3, inside, 2 * HALF, D, REST)
    if WEIGHTS:
        target = partial + tl.program_id(0) * 2 * D
        _store_sums(target, is_query, sum1, sum2, sum3, D, HALF, INTERLEAVED, PADDED, REST)
        is_key = (is_query | is_value) == 0
        _store_sums(target + D, is_key, sum1, sum2, sum3, D, HALF, INTERLEAVED, PADDED, REST)


@jit
def _store_sums(
    start,
    wanted,
    first,
    second,
    rest,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
):
    always = tl.full((1, 1), True, tl.int1)
    first = tl.sum(tl.where(wanted, first, 0.0), axis=0, keep_dims=True)
    second = tl.sum(tl.where(wanted, second, 0.0), axis=0, keep_dims=True)
    _store_pair(start, first, second, always, HALF, PADDED, INTERLEAVED)
    if REST:
        total = tl.sum(tl.where(wanted, rest, 0.0), axis=0, keep_dims=True)
        _store_columns(start, total, always, 2 * HALF, D, REST)


# ---- launchers ----


class _Tiles(NamedTuple):
    """How a kernel's work is split."""

    vectors: int
    """16-byte vectors of either half of a row that a thread has at once."""
    warps: int
    programs: int
    """Per multiprocessor, each taking many steps; 0 for one step each."""


def _tiles(*, backward: bool, norm: bool, weights: bool) -> _Tiles:
    """The split of a kernel's work; nothing is in shared memory but sums, so it is the same for all chips."""
    if weights:
        # As many as are on a multiprocessor at once, with up to 102 registers a thread: starting one, and adding up
        # its sums at the end, takes as long as some steps.
        return _Tiles(1, 4, 5)
    if norm and not backward:
        return _Tiles(2, 2, 0)
    return _Tiles(1, 4, 0)


class _Split(NamedTuple):
    """The grid and the constexprs that all kernels share."""

    programs: int
    steps: int
    settings: dict[str, Any]


def _split(
    tiles: _Tiles, x: torch.Tensor, heads: int, shape: torch.Size, half: int, norm: bool, interleaved: bool
) -> _Split:
    """Split the T tokens of x with `heads` heads each, of a fused tensor of a shape [T, K, G + 2, D]."""
    tokens, kv_heads, parts, features = shape
    padded = next_power_of_2(half)
    rest = next_power_of_2(features - 2 * half) if 2 * half < features else 0
    lanes = tiles.vectors * tiles.warps * 32 * (16 // x.element_size())
    # With norms much is in registers for every feature: those that are not rotated count.
    # Two at least: of one row Triton 3.6 makes scalars, and stops at what `_choose` says of their two dimensions.
    rows = next_power_of_2(max(2, lanes // (padded + rest // 2 if norm else padded)))
    count = cdiv(tokens * heads, rows)
    # A step goes on by whole tokens. Rather fewer programs than more: a few too many would take a turn of their own.
    unit = heads // math.gcd(heads, rows)
    programs = max(tiles.programs * multiprocessors(x.device) // unit, 1) * unit
    if tiles.programs == 0 or programs >= count:
        programs = count
    settings = {"K": kv_heads, "G": parts - 2, "D": features, "HALF": half, "PADDED": padded, "REST": rest}
    settings |= {"NORM": norm, "INTERLEAVED": interleaved, "ROWS": rows, "num_warps": tiles.warps}
    return _Split(programs, cdiv(count, max(programs, 1)), settings)


def _fast_forward(
    qkv: torch.Tensor, table: RotaryTable, weights: list[torch.Tensor], settings: _Settings
) -> list[torch.Tensor]:
    tokens, kv_heads, parts, features = qkv.shape
    qkv = _dense_heads(qkv)
    q = qkv.new_empty(tokens, kv_heads * (parts - 2), features)
    k = qkv.new_empty(tokens, kv_heads, features)
    tiles = _tiles(backward=False, norm=bool(weights), weights=False)
    heads, half = kv_heads * (parts - 1), table.cos.shape[1]
    split = _split(tiles, q, heads, qkv.shape, half, bool(weights), settings.interleaved)
    inputs = qkv, table.cos, table.sin, *(weights or (None, None))
    sizes = tokens, split.steps, qkv.stride(0), settings.eps
    split.settings["ALIGNMENT"] = _alignment([q, k, *weights])
    launch(_rotate_forward, (split.programs,), qkv.device, *inputs, q, k, *sizes, **split.settings)
    return [q, k]


def _fast_backward(
    grads: list[torch.Tensor],
    qkv: torch.Tensor | None,
    table: RotaryTable,
    weights: list[torch.Tensor],
    settings: _Settings,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gradients of the fused tensor, and of the weights, where they are `wanted`."""
    tokens, kv_heads, features = grads[1].shape
    parts = grads[0].shape[1] // kv_heads + 2
    # Rows of 16 bytes at a time: features one after the other, other strides as they come.
    grads = [grad if grad.stride(2) == 1 else grad.contiguous() for grad in grads]
    qkv = None if qkv is None else _dense_heads(qkv)
    shape = torch.Size((tokens, kv_heads, parts, features))
    out = grads[0].new_empty(shape) if wanted[0] else None
    tiles = _tiles(backward=True, norm=bool(weights), weights=wanted[1])
    heads, half = kv_heads * parts, table.cos.shape[1]
    split = _split(tiles, grads[0], heads, shape, half, bool(weights), settings.interleaved)
    partial = grads[0].new_empty(split.programs, 2 * features, dtype=torch.float32) if wanted[1] else None
    launch(
        _rotate_backward,
        (split.programs,),
        grads[0].device,
        *grads,
        qkv,
        table.cos,
        table.sin,
        *(weights or (None, None)),
        out,
        partial,
        tokens,
        split.steps,
        *(stride for grad in grads for stride in grad.stride()[:2]),
        0 if qkv is None else qkv.stride(0),
        settings.eps,
        WEIGHTS=wanted[1],
        ALIGNMENT=_alignment([*grads, *weights]),
        **split.settings,
    )
    if partial is None:
        return out, []
    return out, list(add_partials(partial, weights[0].dtype).chunk(2))


def _alignment(tensors: list[torch.Tensor]) -> int:
    """Bytes, at most 16, of which the starts of all rows are multiples."""
    steps = [step * x.element_size() for x in tensors for step in x.stride()[:-1]]
    return math.gcd(16, *steps, *(x.data_ptr() for x in tensors))


def _dense_heads(qkv: torch.Tensor) -> torch.Tensor:
    """Qkv itself where all features of a token follow one another; tokens may be further apart."""
    parts, features = qkv.shape[2:]
    return qkv if qkv.stride()[1:] == (parts * features, features, 1) else qkv.contiguous()


# ---- autograd ----


class _RotateQKV(torch.autograd.Function):
    """Saves the fused tensor if there is a norm, otherwise nothing but the table."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        table: RotaryTable,
        settings: _Settings,
    ) -> tuple[torch.Tensor, ...]:
        weights = [] if q_weight is None or k_weight is None else [q_weight, k_weight]
        if settings.fast:  # the kernels take rows of tables, and weights, to be dense
            table = RotaryTable(table.cos.contiguous(), table.sin.contiguous())
            weights = [weight.contiguous() for weight in weights]
        ctx.save_for_backward(table.cos, table.sin, *([qkv, *weights] if weights else []))
        ctx.settings, ctx.shape, ctx.like = settings, qkv.shape, qkv.new_empty(0)
        ctx.set_materialize_grads(False)
        forward = _fast_forward if settings.fast else _reference_forward
        q, k = forward(qkv, table, weights, settings)
        # Of a detached alias: autograd takes v for an output of this function, with a gradient of its own.
        return q, k, qkv.detach()[:, :, -1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        cos, sin, *saved = ctx.saved_tensors
        qkv, weights = (saved[0], saved[1:]) if saved else (None, [])
        table = RotaryTable(cos, sin)
        tokens, kv_heads, parts, features = ctx.shape
        shapes = [(tokens, heads, features) for heads in (kv_heads * (parts - 2), kv_heads, kv_heads)]
        given = [
            ctx.like.new_zeros(features).expand(shape) if grad is None else grad
            for grad, shape in zip(grads, shapes, strict=True)
        ]
        needs = ctx.needs_input_grad[:3]
        if ctx.settings.fast:
            out, sums = _fast_backward(given, qkv, table, weights, ctx.settings, (needs[0], needs[1] or needs[2]))
        else:
            out, sums = _reference_backward(given, qkv, table, weights, ctx.settings)
        found = (out, *(sums or (None, None)))
        return *(x if needed else None for x, needed in zip(found, needs, strict=True)), None, None


def rotate_qkv(
    qkv: torch.Tensor,
    rotary: RotaryTable,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split fused queries, keys and values; normalise queries and keys if there are weights, and rotate them.

    Computed in float32 and rounded once.

    Args:
        qkv: [T, K, G + 2, D], float32, bfloat16 or float16: for every kv head its G queries, its key, its value.
        rotary: the table of the stream, [T, R/2] with R at most D; features from R on are not rotated.
        q_weight: [D], of the RMS norm of every query.
        k_weight: [D], of the RMS norm of every key; both or neither, in one dtype.
        eps: of the norms, added to the mean square.
        interleaved: rotate features 2i and 2i + 1 together, rather than i and i + R/2.

    Returns:
        q [T, K G, D] and k [T, K, D], contiguous, and v [T, K, D], a view of qkv; all in qkv's dtype.

    Raises:
        ValueError: shapes, or dtypes of the weights, do not go together.
    """
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(f"qkv has shape {list(qkv.shape)}, not [T, K, G + 2, D]")
    tokens, features = qkv.shape[0], qkv.shape[3]
    half = rotary.cos.shape[-1]
    if rotary.cos.shape != (tokens, half) or rotary.sin.shape != (tokens, half) or not 0 < 2 * half <= features:
        shapes = f"{list(rotary.cos.shape)} and {list(rotary.sin.shape)}"
        raise ValueError(f"the rotary table has shapes {shapes}: {tokens} tokens have heads of {features} features")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("queries and keys have a norm both or neither")
    for weight in (q_weight, k_weight):
        if weight is not None and weight.shape != (features,):
            raise ValueError(f"a norm's weight has shape {list(weight.shape)}: heads have {features} features")
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        raise ValueError(f"the norms' weights have dtypes {q_weight.dtype} and {k_weight.dtype}, not one")
    return _RotateQKV.apply(qkv, q_weight, k_weight, rotary, _Settings(eps, interleaved, use_triton(qkv)))
