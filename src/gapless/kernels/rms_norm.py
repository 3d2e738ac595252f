"""RMS normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gapless.kernels.reduce import add_partials
from gapless.kernels.runtime import (
    SHARED_MEMORY,
    Recipe,
    cdiv,
    empty_rows,
    family,
    jit,
    launch,
    multiprocessors,
    next_power_of_2,
    tl,
    use_triton,
)

WIDEST = 32768
"""Features that a row may have on a GPU: in the backward it is held in the registers of one program."""

# ---- reference ----


def _reference_forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, spare: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x32 = x.float()
    rstd = torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = (x32 * rstd).mul_(weight)
    return (empty_rows(x, x.shape[1], spare).copy_(normed) if spare else normed.to(x.dtype)), rstd


def _reference_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    normed = x.float() * rstd
    grad32 = grad.float()
    grad_x = grad_weight = None
    if wanted[1]:
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
    if wanted[0]:
        # d(x rstd)/dx is rstd (I - n n^T / C) with n = x rstd.
        grad_normed = grad32 * weight
        inner = torch.linalg.vecdot(grad_normed, normed).unsqueeze_(-1).div_(x.shape[-1])
        grad_x = grad_normed.addcmul_(normed, inner, value=-1).mul_(rstd).to(x.dtype)
    return grad_x, grad_weight


# ---- kernels: a program takes ROWS rows at a time, whole ----


@jit
def _begin_of(row, inner, outer_stride, inner_stride):
    """Where rows begin, in elements; 64 bits, as T C exceeds 32."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@jit
def _norm_forward(
    x,
    weight,
    out,
    rstd,
    rows,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows that registers hold. A loop over steps, even of one, would take 2 % more at 4,096 features on an H200."""
    column = tl.arange(0, PADDED)[None, :]
    inside = column < C
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    mask = (row < rows) & inside
    begin = _begin_of(row, x_inner, x_outer_stride, x_inner_stride)
    values = tl.load(x + begin + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    # Columns beyond C and rows beyond the last are zeros: they add nothing, and are not stored.
    factor = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / C + eps)
    normed = (values * factor * scale).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * out_stride + column, normed, mask=mask)
    tl.store(rstd + row, factor, mask=row < rows)


@jit
def _wide_norm_forward(
    x,
    weight,
    out,
    rstd,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    out_stride,
    eps,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A row, COLUMNS at a time, read again out of the cache.

    At 14,336 features it reaches 0.989 of the byte limit on an H200, held in registers 0.940.
    """
    row = tl.program_id(0)
    begin = _begin_of(row, x_inner, x_outer_stride, x_inner_stride)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.range(0, C, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(x + begin + column, mask=column < C, other=0.0, eviction_policy="evict_last").to(tl.float32)
        total += values * values
    factor = tl.rsqrt(tl.sum(total, axis=0) / C + eps)
    tl.store(rstd + row, factor)
    for first in tl.range(0, C, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        values = tl.load(x + begin + column, mask=column < C, other=0.0, eviction_policy="evict_first").to(tl.float32)
        scale = tl.load(weight + column, mask=column < C, other=0.0, eviction_policy="evict_last").to(tl.float32)
        normed = (values * factor * scale).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * out_stride + column, normed, mask=column < C)


@jit
def _row_gradients(places, row, rows, strides, total, C: tl.constexpr, PADDED: tl.constexpr, WEIGHT: tl.constexpr):
    """Store the gradient of some rows of x; with WEIGHT returns `total` [ROWS, PADDED] with their part in its own."""
    grad, x, weight, rstd, out = places
    grad_inner, grad_outer_stride, grad_inner_stride, x_inner, x_outer_stride, x_inner_stride = strides
    column = tl.arange(0, PADDED)[None, :]
    inside = column < C
    mask = (row < rows) & inside
    begin = _begin_of(row, x_inner, x_outer_stride, x_inner_stride)
    values = tl.load(x + begin + column, mask=mask, other=0.0)
    begin = _begin_of(row, grad_inner, grad_outer_stride, grad_inner_stride)
    slope = tl.load(grad + begin + column, mask=mask, other=0.0)
    factor = tl.load(rstd + row, mask=row < rows, other=0.0)
    # Here rather than before a loop, where it would be waited for before any row is asked for.
    scale = tl.load(weight + column, mask=inside, other=0.0)
    normed = values.to(tl.float32) * factor
    slope = slope.to(tl.float32)
    if WEIGHT:
        total += slope * normed
    # d(x rstd)/dx is rstd (I - n n^T / C) with n = x rstd.
    slope *= scale.to(tl.float32)
    inner = tl.sum(slope * normed, axis=1, keep_dims=True) / C
    slope = (slope - normed * inner) * factor
    tl.store(out + row.to(tl.int64) * C + column, slope.to(out.dtype.element_ty), mask=mask)
    return total


@jit
def _norm_backward(
    grad,
    x,
    weight,
    rstd,
    out,
    partial,
    rows,
    grad_inner,
    grad_outer_stride,
    grad_inner_stride,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """The gradient of x; with WEIGHT also float32 [programs, C], the part of each program in that of the weight.

    Then a program goes on by as many rows as all of them take at once.
    """
    places = grad, x, weight, rstd, out
    strides = grad_inner, grad_outer_stride, grad_inner_stride, x_inner, x_outer_stride, x_inner_stride
    first = tl.program_id(0) * ROWS
    some = tl.arange(0, ROWS)[:, None]
    if WEIGHT:
        total = tl.zeros((ROWS, PADDED), tl.float32)
        for start in tl.range(first, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
            total = _row_gradients(places, start + some, rows, strides, total, C, PADDED, True)
        column = tl.arange(0, PADDED)[None, :]
        part = tl.sum(total, axis=0, keep_dims=True)
        tl.store(partial + tl.program_id(0) * C + column, part, mask=column < C)
    else:
        _row_gradients(places, first + some, rows, strides, 0.0, C, PADDED, False)


# ---- launchers ----


class _Tiles(NamedTuple):
    """How a kernel's work is split."""

    rows: int
    """That a program has at once."""
    warps: int
    columns: int = 0
    """Of a forward, that it reads at a time, in two passes; 0 for whole rows in one."""
    programs: int = 0
    """Of a backward with the weight, per multiprocessor, each taking many steps; others take one."""
    stages: int = 1
    """Of its loop over steps: rows of up to `stages - 1` steps are on their way to shared memory meanwhile."""


def _tiles(kind: str, features: int, item: int, chip: int) -> _Tiles:
    """The split for "forward", "backward", or "weight" (a backward with the gradient of the weight).

    Args:
        kind: of kernel.
        features: of a row.
        item: bytes of an element.
        chip: as `runtime.family` gives it.
    """
    padded = next_power_of_2(features)
    size = padded * item
    if padded <= 1024:
        # A warp has rows of its own, which need no shared memory.
        return _Tiles(max(1, min(1024 // padded, 8)), 1, programs=16)
    if kind == "forward" and padded > 8192:
        return _Tiles(1, 16, columns=4096)
    if kind != "weight":
        # A thread has 16 to 64 features of a row.
        return _Tiles(1, 16 if padded > 16384 else min(size // (1024 if kind == "forward" else 2048), 8))
    if size > 16384:
        # Registers allow one program a multiprocessor; it must ask for rows while it computes.
        return _Tiles(1, 32, programs=1, stages=_stages(size, 1, chip))
    # A thread holds 4 vectors of 16 bytes of a row, or 2.
    warps = size // 2048
    more = min(2 * warps, 8)
    stages = _stages(size, 16 // more, chip)
    # On an H200 two stages are slower than one.
    if stages > 2:
        return _Tiles(1, more, programs=16 // more, stages=stages)
    return _Tiles(1, warps, programs=16 // warps)


def _stages(row: int, programs: int, chip: int) -> int:
    """Up to 3, of a backward with rows of so many bytes: a stage is a row of x, one of its gradient, and the weight."""
    room = SHARED_MEMORY[chip] // programs - 2048
    return min(3, 1 + room // (3 * row))


class _Rows(NamedTuple):
    """The rows of a tensor: row i begins at (i // inner) * outer_stride + (i % inner) * inner_stride."""

    data: torch.Tensor
    inner: int
    outer_stride: int
    inner_stride: int


def _rows_of(x: torch.Tensor) -> _Rows:
    """Of [..., C]: of a copy, if features do not follow one another, or rows have more than two strides."""
    if x.ndim == 2 and x.stride(1) == 1:
        return _Rows(x, 1, x.stride(0), 0)
    axes: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size != 1:
            axes.append((size, stride))
    if len(axes) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return _rows_of(x.contiguous())
    if len(axes) == 2:
        return _Rows(x, axes[1][0], axes[0][1], axes[1][1])
    return _Rows(x, 1, axes[0][1] if axes else 0, 0)


def _settings(tiles: _Tiles, features: int) -> dict[str, Any]:
    padded = next_power_of_2(features)
    return {"C": features, "PADDED": padded, "ROWS": tiles.rows, "num_warps": tiles.warps}


def _fast_forward(x: torch.Tensor, weight: torch.Tensor, eps: float, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    features = x.shape[-1]
    data, *strides = _rows_of(x)
    out = empty_rows(x, features, spare) if spare else x.new_empty(x.shape)
    rows = out.numel() // max(features, 1)
    rstd = x.new_empty(rows, dtype=torch.float32)
    tensors, numbers = (data, weight.contiguous(), out, rstd), (*strides, features + spare, eps)
    tiles = _tiles("forward", features, x.element_size(), family(x.device))
    if tiles.columns:
        settings = {"C": features, "COLUMNS": tiles.columns, "num_warps": tiles.warps}
        launch(_wide_norm_forward, (rows,), x.device, *tensors, *numbers, **settings)
    else:
        settings = _settings(tiles, features)
        launch(_norm_forward, (cdiv(rows, tiles.rows),), x.device, *tensors, rows, *numbers, **settings)
    return out, rstd


def _fast_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    features, rows = x.shape[-1], rstd.shape[0]
    x_rows, *x_strides = _rows_of(x)
    grad_rows, *grad_strides = _rows_of(grad)
    out = x.new_empty(x.shape)
    tiles = _tiles("weight" if wanted[1] else "backward", features, x.element_size(), family(x.device))
    programs = cdiv(rows, tiles.rows)
    if wanted[1]:
        programs = min(programs, tiles.programs * multiprocessors(x.device))
    partial = x.new_empty(programs, features, dtype=torch.float32) if wanted[1] else None
    launch(
        _norm_backward,
        (programs,),
        x.device,
        grad_rows,
        x_rows,
        weight.contiguous(),
        rstd,
        out,
        partial,
        rows,
        *grad_strides,
        *x_strides,
        STAGES=tiles.stages,
        WEIGHT=wanted[1],
        **_settings(tiles, features),
    )
    return out if wanted[0] else None, None if partial is None else add_partials(partial, weight.dtype)


# ---- autograd ----


class _RMSNorm(torch.autograd.Function):
    """Saves the input and one float per row, and recomputes the normalised values in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, spare: int, fast: bool) -> torch.Tensor:
        out, rstd = (_fast_forward if fast else _reference_forward)(x, weight, eps, spare)
        ctx.save_for_backward(x, weight, rstd)
        ctx.fast = fast
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        backward = _fast_backward if ctx.fast else _reference_backward
        return *backward(grad, x, weight, rstd, ctx.needs_input_grad[:2]), None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, spare: int = 0) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, rounded once.

    The sum of squares must be finite in float32: rows of up to about 1e19 / sqrt(C) in root mean square.

    Args:
        x: [..., C], any floating dtype.
        weight: [C], its dtype may be another.
        eps: added to the mean square.
        spare: columns of scratch memory behind each row of the result (`runtime.empty_rows`), for [T, C].

    Returns:
        [..., C] in x's dtype, contiguous but for spare columns.

    Raises:
        ValueError: the weight is not [C]; spare columns without 2 dimensions, or less than 0; C is over `WIDEST` on a
            GPU.
    """
    features = x.shape[-1] if x.ndim else 0
    if weight.shape != (features,):
        raise ValueError(f"the norm's weight has shape {list(weight.shape)}: rows have {features} features")
    if spare < 0 or (spare and x.ndim != 2):
        raise ValueError(f"{spare} spare columns for {list(x.shape)}: only [T, C] has any, and none less than 0")
    fast = use_triton(x)
    if fast and features > WIDEST:
        raise ValueError(f"rows have {features} features: on a GPU the norm takes up to {WIDEST}")
    return _RMSNorm.apply(x, weight, eps, spare, fast)


def rms_norm_recipe(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Recipe:
    """How `rms_norm` of x makes its result again."""
    forward = _fast_forward if use_triton(x) else _reference_forward
    return Recipe(lambda x, weight: forward(x, weight, eps, 0)[0], (x, weight))
