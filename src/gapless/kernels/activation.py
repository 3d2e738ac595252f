"""The gated activations of the MLP (Shazeer 2020, "GLU Variants Improve Transformer": SwiGLU and GEGLU)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from gapless.kernels.runtime import Recipe, cdiv, empty_rows, jit, launch, next_power_of_2, tl, use_triton

_Kind = Literal["silu", "gelu", "gelu_tanh"]

_CUBIC = 0.044715
_TANH_SCALE = math.sqrt(2 / math.pi)
"""gelu_tanh(z) = z / 2 (1 + tanh(u)) = z sigmoid(2 u) with u = _TANH_SCALE (z + _CUBIC z^3)
(Hendrycks and Gimpel 2016, "Gaussian Error Linear Units")."""

# ---- reference ----

_ROWS = 256
"""Rows computed at a time, so that float32 copies stay in a CPU's cache: the backward takes half the time of one piece
at [2048, 2 x 1536] in bf16."""


def _reference_forward(gate_up: torch.Tensor, kind: _Kind, spare: int) -> torch.Tensor:
    out = empty_rows(gate_up, gate_up.shape[1] // 2, spare)
    for rows, out_rows in zip(gate_up.split(_ROWS), out.split(_ROWS), strict=True):
        gate, up = rows.float().chunk(2, dim=-1)
        if kind == "silu":
            active = functional.silu(gate)
        else:
            active = functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none")
        out_rows.copy_(active.mul_(up))
    return out


def _reference_backward(grad: torch.Tensor, gate_up: torch.Tensor, kind: _Kind) -> torch.Tensor:
    out = torch.empty_like(gate_up)
    for rows, grad_rows, out_rows in zip(*(x.split(_ROWS) for x in (gate_up, grad, out)), strict=True):
        gate, up = rows.float().chunk(2, dim=-1)
        grad_out = grad_rows.float()
        active, slope = _active_and_slope(gate, kind)
        grad_gate, grad_up = out_rows.chunk(2, dim=-1)
        grad_gate.copy_(slope.mul_(up).mul_(grad_out))
        grad_up.copy_(active.mul_(grad_out))
    return out


def _active_and_slope(gate: torch.Tensor, kind: _Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation and its derivative."""
    if kind == "gelu":
        share = torch.erf(gate * math.sqrt(0.5)).add_(1).mul_(0.5)
        density = gate.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        return gate * share, torch.addcmul(share, gate, density)
    if kind == "silu":
        sigmoid = torch.sigmoid(gate)
        active = gate * sigmoid
        # (z s)' = s + z s (1 - s) with s = sigmoid(z)
        return active, torch.addcmul(sigmoid, active, 1 - sigmoid)
    square = gate.square()
    sigmoid = torch.sigmoid(2 * _TANH_SCALE * gate * (1 + _CUBIC * square))
    active = gate * sigmoid
    # As above, times the derivative of what is in the sigmoid.
    inner_slope = 2 * _TANH_SCALE * (1 + 3 * _CUBIC * square)
    return active, torch.addcmul(sigmoid, active, (1 - sigmoid).mul_(inner_slope))


# ---- kernels: a program takes ROWS rows of COLUMNS features; those of one row follow one another ----


@jit
def _active(gate, KIND: tl.constexpr):
    """An activation and its derivative, where that is used; saturates to 0 or the gate without NaN."""
    if KIND == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
        slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        return gate * share, slope
    if KIND == "silu":
        share = 1.0 / (1.0 + tl.exp(-gate))
        return gate * share, share + gate * share * (1.0 - share)
    # sqrt(2 / pi) = 0.797...
    square = gate * gate
    share = 1.0 / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * gate * (1.0 + 0.044715 * square)))
    inner_slope = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * square)
    return gate * share, share + gate * share * (1.0 - share) * inner_slope


@jit
def _tile(rows, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows [ROWS, 1] in 64 bits (T F exceeds 32), columns [1, COLUMNS], and which of them there are."""
    across = tl.cdiv(F, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row.to(tl.int64), column, (row < rows) & (column < F)


@jit
def _gate_forward(
    gate_up,
    out,
    rows,
    stride,
    out_stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _tile(rows, F, ROWS, COLUMNS)
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + F, mask=mask, other=0.0)
    active, _ = _active(gate.to(tl.float32), KIND)
    active *= up.to(tl.float32)
    tl.store(out + row * out_stride + column, active.to(out.dtype.element_ty), mask=mask)


@jit
def _gate_backward(
    grad,
    gate_up,
    out,
    rows,
    grad_stride,
    stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, column, mask = _tile(rows, F, ROWS, COLUMNS)
    source = gate_up + row * stride + column
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + F, mask=mask, other=0.0)
    slope = tl.load(grad + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    active, active_slope = _active(gate.to(tl.float32), KIND)
    target = out + row * (2 * F) + column
    tl.store(target, (slope * up.to(tl.float32) * active_slope).to(out.dtype.element_ty), mask=mask)
    tl.store(target + F, (slope * active).to(out.dtype.element_ty), mask=mask)


# ---- launchers ----


class _Tiles(NamedTuple):
    """How a kernel's work is split."""

    elements: int
    """Of the output, that a program computes."""
    warps: int


def _tiles(item: int) -> _Tiles:
    """The split of a kernel's work, `item` bytes an element; there is nothing in shared memory, for any chip.

    A thread has a vector of 16 bytes of the gate and one of up.
    """
    return _Tiles(8 * 32 * 16 // item, 8)


def _split(tiles: _Tiles, rows: int, features: int) -> tuple[int, dict[str, Any]]:
    """Programs and constexprs: the widest columns of which few are beyond the last feature, and the rest as rows."""
    columns = min(tiles.elements, max(next_power_of_2(features), 16))
    while columns > 128 and 16 * (cdiv(features, columns) * columns - features) > features:
        columns //= 2
    tile_rows = tiles.elements // columns
    settings = {"F": features, "ROWS": tile_rows, "COLUMNS": columns, "num_warps": tiles.warps}
    return cdiv(rows, tile_rows) * cdiv(features, columns), settings


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the features of a row follow one another."""
    return x if x.stride(1) == 1 else x.contiguous()


def _fast_forward(gate_up: torch.Tensor, kind: _Kind, spare: int) -> torch.Tensor:
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = _dense_rows(gate_up)
    out = empty_rows(gate_up, features, spare)
    tiles = _tiles(gate_up.element_size())
    programs, settings = _split(tiles, rows, features)
    strides = gate_up.stride(0), features + spare
    launch(_gate_forward, (programs,), out.device, gate_up, out, rows, *strides, KIND=kind, **settings)
    return out


def _fast_backward(grad: torch.Tensor, gate_up: torch.Tensor, kind: _Kind) -> torch.Tensor:
    rows, features = grad.shape
    grad, gate_up = _dense_rows(grad), _dense_rows(gate_up)
    out = gate_up.new_empty(rows, 2 * features)
    tiles = _tiles(gate_up.element_size())
    programs, settings = _split(tiles, rows, features)
    strides = grad.stride(0), gate_up.stride(0)
    launch(_gate_backward, (programs,), out.device, grad, gate_up, out, rows, *strides, KIND=kind, **settings)
    return out


# ---- autograd ----


class _Gated(torch.autograd.Function):
    """Saves its input only; the activation is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, kind: _Kind, spare: int, fast: bool) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kind, ctx.fast = kind, fast
        return (_fast_forward if fast else _reference_forward)(gate_up, kind, spare)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore
        (grad,) = grads
        (gate_up,) = ctx.saved_tensors
        backward = _fast_backward if ctx.fast else _reference_backward
        return backward(grad, gate_up, ctx.kind), None, None, None


def _gated(gate_up: torch.Tensor, kind: _Kind, spare: int) -> torch.Tensor:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate and up have shape {list(gate_up.shape)}, not [T, 2F]")
    if spare < 0:
        raise ValueError(f"{spare} spare columns: a row has at least 0")
    return _Gated.apply(gate_up, kind, spare, use_triton(gate_up))


def swiglu(gate_up: torch.Tensor, *, spare: int = 0) -> torch.Tensor:
    """Compute silu(gate) * up in float32, rounded once.

    Args:
        gate_up: [T, 2F], the gate's F features, then up's.
        spare: columns of scratch memory behind each row of the result (`runtime.empty_rows`).

    Returns:
        [T, F] in the same dtype.

    Raises:
        ValueError: gate_up is not [T, 2F], or spare is negative.
    """
    return _gated(gate_up, "silu", spare)


def geglu(gate_up: torch.Tensor, *, approximate: Literal["none", "tanh"], spare: int = 0) -> torch.Tensor:
    """Compute gelu(gate) * up in float32, rounded once.

    Args:
        gate_up: [T, 2F], the gate's F features, then up's.
        approximate: "none" for gelu(z) = z / 2 (1 + erf(z / sqrt(2))), "tanh" for its approximation (Hendrycks and
            Gimpel 2016, "Gaussian Error Linear Units", section 2).
        spare: columns of scratch memory behind each row of the result (`runtime.empty_rows`).

    Returns:
        [T, F] in the same dtype.

    Raises:
        ValueError: gate_up is not [T, 2F], `approximate` is neither, or spare is negative.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is {approximate!r}, not "none" or "tanh"')
    return _gated(gate_up, "gelu_tanh" if approximate == "tanh" else "gelu", spare)


def swiglu_recipe(gate_up: torch.Tensor) -> Recipe:
    """How `swiglu` of gate_up makes its result again."""
    forward = _fast_forward if use_triton(gate_up) else _reference_forward
    return Recipe(lambda kept: forward(kept, "silu", 0), (gate_up,))
