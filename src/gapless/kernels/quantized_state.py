"""Moments of an optimizer in 8 bits: a code for each value, and a scale for every 256 of them.

Dettmers, Lewis, Shleifer and Zettlemoyer 2022 ("8-bit Optimizers via Block-wise Quantization", sections 2 and 3): a
code is a dynamic tree. Its leading zeros are a decimal exponent, the first 1 ends them, the bits that are left count
equal parts of the decade [0.1, 1], and the value is the middle of its part. A first moment has a sign bit, a second
moment one more bit of fraction. A value takes the code that is nearest, to within 1/200 of the distance between two.
Two things are not as in the paper:

* The scale of a first moment has the sign of the value that is largest, which is therefore 1, a code of its own: its
  block comes back from the values with the same scale and codes, so that float32 values lose nothing.
* A second moment above 0 never becomes 0: the update divides by its root, and would be thousands of times too large.

Codes are chosen with integers, since floating point may be contracted in one place and not in another: the kernels and
the reference give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.runtime import jit, tl

STATE_BLOCK = 256
"""Values that share a scale."""
_DECADES = 7
_GRID = 1 << 30
"""Magnitudes are compared as multiples of its reciprocal."""
_FRACTION = 9
"""Bits behind the point of a code that is being computed: int32 has no room for more."""
_TINY = 2.0**-100
"""A block whose largest value is below becomes zeros: its smallest would be no normal float32."""


@functools.cache
def code_values(signed: bool) -> Tensor:
    """The value of each of the 256 codes, float32 [256], between -1 (not itself among them) and 1, or 0 and 1."""
    values = torch.zeros(256, dtype=torch.float32)
    for code in range(*_codes(signed)):
        first = 1 << (code.bit_length() - 1)
        # 0.1 + 0.9 (code + 0.5 - first) / first, in units of a 20th of 1 / first: one product, rounded once.
        unit = torch.tensor(_units(signed)[first.bit_length() - _codes(signed)[0].bit_length()], dtype=torch.float32)
        values[code] = (9 * (2 * code + 1) - 16 * first) * unit
    if signed:
        values[129:] = -values[1:128]
    values[_one(signed)] = 1.0
    return values


def _units(signed: bool) -> tuple[float, ...]:
    """What the values of each decade are whole multiples of."""
    lowest = _top(signed) - _DECADES + 1
    return tuple(0.05 * 10.0 ** (lead - _top(signed)) / 2**lead for lead in range(lowest, _top(signed) + 1))


def _codes(signed: bool) -> tuple[int, int]:
    """The magnitudes that are a tree, from and to."""
    return (1, 128) if signed else (2, 256)


def _top(signed: bool) -> int:
    """The leading bit of the largest decade's codes."""
    return 6 if signed else 7


def _one(signed: bool) -> int:
    """The code of 1: minus 0, or the tree without a fraction."""
    return 128 if signed else 1


class Limits(NamedTuple):
    """Where codes change, for magnitudes on the grid."""

    zero: int
    """Below is 0."""
    decades: tuple[int, ...]
    """Where each decade but the lowest begins: halfway between the values on both sides."""
    slopes: tuple[int, ...]
    """Codes (with their fraction bits) for each unit of magnitude, of each decade."""
    one: int
    """From here on it is 1."""
    units: tuple[float, ...]
    """What the values of each decade are whole multiples of."""


@functools.cache
def limits(signed: bool) -> Limits:
    """Those of first moments (signed), or of second moments."""
    values, top = code_values(signed).double().tolist(), _top(signed)
    leads = range(top - _DECADES + 1, top + 1)
    middles = [(values[2**lead] + values[2**lead - 1]) / 2 for lead in leads[1:]]
    return Limits(
        zero=round(values[1] / 2 * _GRID) if signed else 0,
        decades=tuple(round(middle * _GRID) for middle in middles),
        slopes=tuple(round(2**lead * 10 ** (top - lead) / 0.9 * 2**_FRACTION) for lead in leads),
        one=round((1 + values[2 ** (top + 1) - 1]) / 2 * _GRID),
        units=_units(signed),
    )


_AT_ONCE = 2**22
"""Values that are quantised at a time: the steps take 72 bytes a value, 38 GB for a head of 128,256 x 4,096."""
_OFFSET = round(8 / 9 * 2**16)
"""A decade's first code is 2^leading, at 0.1: the line through its codes meets 0 at 8/9 of that."""


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n] and scales float32 [ceil(n / 256)] of the values [n], finite float32."""
    pieces = [_quantize(piece, signed) for piece in x.split(_AT_ONCE)]
    codes, scales = zip(*pieces, strict=True)
    return torch.cat(codes), torch.cat(scales)


def _quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    bounds, top = limits(signed), _top(signed)
    blocks = torch.nn.functional.pad(x, (0, -len(x) % STATE_BLOCK)).view(-1, STATE_BLOCK)
    if not len(blocks):
        return x.to(torch.uint8), x.clone()
    high, low = blocks.amax(1), blocks.amin(1)
    scales = torch.where(high >= -low, high, low) if signed else high
    scales = torch.where(scales.abs() < _TINY, 0.0, scales)
    y = blocks * torch.where(scales == 0, 0.0, 1 / scales)[:, None]
    size = (y.abs() * _GRID).to(torch.int64)
    leading = torch.full_like(size, top - _DECADES + 1)
    slope = torch.full_like(size, bounds.slopes[0])
    for start, steeper in zip(bounds.decades, bounds.slopes[1:], strict=True):
        leading += size >= start
        slope = torch.where(size >= start, steeper, slope)
    first = 1 << leading
    codes = (size * slope // _GRID + (_OFFSET * first >> 16 - _FRACTION)) >> _FRACTION
    codes = codes.maximum(first).minimum(2 * first - 1)
    codes = torch.where((size < bounds.zero) | (y == 0), 0, codes)
    if signed:
        codes = torch.where((y < 0) & (codes > 0), codes + 128, codes)
    codes = torch.where((size >= bounds.one) & (y > 0), _one(signed), codes)
    return codes.to(torch.uint8).flatten()[: len(x)], scales


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The values, float32 [n], of codes [n] and scales [ceil(n / 256)]."""
    values = torch.empty(len(codes), dtype=torch.float32, device=codes.device)
    table = code_values(signed).to(codes.device)
    pieces = values.split(_AT_ONCE), codes.split(_AT_ONCE), scales.split(_AT_ONCE // STATE_BLOCK)
    for out, mine, scale in zip(*pieces, strict=True):
        torch.mul(table[mine.int()], scale.repeat_interleave(STATE_BLOCK)[: len(mine)], out=out)
    return values


@jit
def dequantize_tile(codes, scales, SIGNED: tl.constexpr, LIMITS: tl.constexpr):
    """The values [blocks, 256] of codes uint8 [blocks, 256] and scales [blocks].

    Computed: a table in memory would be read in another layout than everything else.
    """
    codes = codes.to(tl.int32)
    size = codes & 127 if SIGNED else codes
    first = tl.full(codes.shape, 1 if SIGNED else 2, tl.int32)
    unit = tl.full(codes.shape, LIMITS[4][0], tl.float32)
    for decade in tl.static_range(6):
        start = 2 << decade if SIGNED else 4 << decade
        first = tl.where(size >= start, start, first)
        unit = tl.where(size >= start, LIMITS[4][decade + 1], unit)
    values = (18 * size + 9 - 16 * first).to(tl.float32) * unit
    values = tl.where(size == 0, 0.0, values)
    values = tl.where(codes == (128 if SIGNED else 1), 1.0, values)
    if SIGNED:
        values = tl.where(codes > 128, -values, values)
    return values * scales[:, None]


@jit
def quantize_tile(x, SIGNED: tl.constexpr, LIMITS: tl.constexpr):
    """Codes uint8 [blocks, 256] and scales float32 [blocks] of values [blocks, 256]: `quantize`, step by step.

    LIMITS is what `limits` gives, a plain tuple.
    """
    high = tl.max(x, 1)
    if SIGNED:
        low = tl.min(x, 1)
        scales = tl.where(high >= -low, high, low)
    else:
        scales = high
    scales = tl.where(tl.abs(scales) < 2.0**-100, 0.0, scales)
    inverse = tl.where(scales == 0, 0.0, tl.div_rn(1.0, tl.where(scales == 0, 1.0, scales)))
    y = x * inverse[:, None]
    size = (tl.abs(y) * 1073741824.0).to(tl.int32)
    first = tl.full(x.shape, 1 if SIGNED else 2, tl.int32)
    slope = tl.full(x.shape, LIMITS[2][0], tl.int32)
    for decade in tl.static_range(6):
        above = size >= LIMITS[1][decade]
        first = tl.where(above, 2 << decade if SIGNED else 4 << decade, first)
        slope = tl.where(above, LIMITS[2][decade + 1], slope)
    line = ((size.to(tl.int64) * slope.to(tl.int64)) >> 30).to(tl.int32)
    codes = (line + ((58254 * first) >> 7)) >> 9
    codes = tl.minimum(tl.maximum(codes, first), 2 * first - 1)
    codes = tl.where((size < LIMITS[0]) | (y == 0), 0, codes)
    if SIGNED:
        codes = tl.where((y < 0) & (codes > 0), codes + 128, codes)
    codes = tl.where((size >= LIMITS[3]) & (y > 0), 128 if SIGNED else 1, codes)
    return codes.to(tl.uint8), scales


@dataclass(frozen=True)
class QuantizedMoment:
    """A moment in 8 bits, which is read and written as float32."""

    codes: Tensor
    """uint8 [n]."""
    scales: Tensor
    """float32 [ceil(n / 256)]."""
    shape: Sequence[int]
    signed: bool

    @classmethod
    def zeros(cls, like: Tensor, signed: bool) -> QuantizedMoment:
        """Of a tensor's shape, on its device."""
        count = like.numel()
        scales = torch.zeros(-(-count // STATE_BLOCK), dtype=torch.float32, device=like.device)
        return cls(torch.zeros(count, dtype=torch.uint8, device=like.device), scales, like.shape, signed)

    def read(self) -> Tensor:
        """The values, float32."""
        return dequantize(self.codes, self.scales, self.signed).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Take over float32 values; those that `read` gave leave every bit as it was."""
        codes, scales = quantize(values.reshape(-1), self.signed)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
