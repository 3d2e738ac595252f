"""Gradient norm, clip and AdamW over a list of tensors, however many, in a launch each.

The kernels find the tensors through a table of their addresses, so that hundreds of small adapters cost what one tensor
of their size costs. An update reads gradient, master and moments once, writes master, moments and the low-precision
copy, and clears the gradient: 30 bytes for each parameter of a bf16 model, 22 with moments in 8 bits. Decoupled weight
decay as in Loshchilov and Hutter 2019 ("Decoupled Weight Decay Regularization", algorithm 2). The reference is
`torch._fused_adamw_`, which `gapless.training.optim` runs on a CPU; the formulas and their order are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.kernels.quantized_state import (
    STATE_BLOCK,
    QuantizedMoment,
    dequantize_tile,
    limits,
    quantize_tile,
)
from gapless.kernels.runtime import cdiv, family, jit, launch, tl

_COLUMNS = 9
"""Of a tensor's row in the table: addresses of gradient, master, copy, both moments and their scales; elements; whether
it decays."""


@jit
def _locate(table, tensors, item, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """An item of the work list, (tensor, block in the tensor) in one int64: the tensor, its row, the first element."""
    work = tl.load(table + tensors * COLUMNS + item)
    tensor = work >> 32
    return tensor, table + tensor * COLUMNS, (work & 0xFFFFFFFF) * BLOCK


@jit
def _pointer(row, column: tl.constexpr, first, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """To a block's first element. Four elements are one access where addresses allow it: of 16, 8 or 4 bytes."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype)) + first
    if ALIGNED:
        pointer = tl.multiple_of(pointer, dtype.primitive_bitwidth // 2)
    return pointer


@jit
def _read(pointer, offsets, count, FULL: tl.constexpr):
    # A mask would keep the accesses of a full block from being wide.
    return tl.load(pointer + offsets) if FULL else tl.load(pointer + offsets, mask=offsets < count, other=0.0)


@jit
def _write(pointer, offsets, x, count, FULL: tl.constexpr):
    x = x.to(pointer.dtype.element_ty)
    if FULL:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=offsets < count)


@jit
def _squares_kernel(
    table, counted, partial, tensors, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of the squares of each block's gradients; 0 where the tensor is not counted."""
    item = tl.program_id(0).to(tl.int64)
    tensor, row, first = _locate(table, tensors, item, COLUMNS, BLOCK)
    count = tl.load(row + 7) - first
    offsets = tl.arange(0, BLOCK)
    total = 0.0
    if tl.load(counted + tensor) != 0:
        grad = _pointer(row, 0, first, tl.float32, ALIGNED)
        if count >= BLOCK:
            g = _read(grad, offsets, count, True)
            total = tl.sum(g * g, 0)
        else:
            g = _read(grad, offsets, count, False)
            total = tl.sum(g * g, 0)
    tl.store(partial + item, total)


@jit
def _prepare_kernel(
    loss,
    norm,
    learning_rate,
    is_open,
    step_count,
    finite_out,
    control,
    max_norm,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
):
    """All that a step does with scalars: whether it is made, and the factors of its update, in `control`."""
    size = tl.load(norm)
    finite = (tl.abs(tl.load(loss).to(tl.float32)) < float("inf")) & (tl.abs(size) < float("inf"))
    go = finite & (tl.load(is_open) != 0)
    count = tl.load(step_count) + go.to(tl.float32)
    tl.store(finite_out, finite.to(tl.uint8))
    tl.store(is_open, go.to(tl.uint8))
    tl.store(step_count, count)
    # beta^count by squaring, in float64: 1 - beta2^1 has no correct digits to lose in float32.
    power1 = tl.full((), 1.0, tl.float64)
    power2 = tl.full((), 1.0, tl.float64)
    base1 = tl.full((), BETA1, tl.float64)
    base2 = tl.full((), BETA2, tl.float64)
    left = count.to(tl.int64)
    for _ in range(25):  # float32 counts up to 2^24
        odd = (left & 1) != 0
        power1 = tl.where(odd, power1 * base1, power1)
        power2 = tl.where(odd, power2 * base2, power2)
        base1 *= base1
        base2 *= base2
        left = left >> 1
    rate = tl.load(learning_rate)
    # Gradients are never scaled up.
    tl.store(control, go.to(tl.float32))
    tl.store(control + 1, 1.0 / tl.maximum(size / max_norm, 1.0))
    tl.store(control + 2, rate)
    tl.store(control + 3, (rate.to(tl.float64) / (1.0 - power1)).to(tl.float32))
    tl.store(control + 4, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32))


@jit
def adamw_step(master, g, m, v, decay, step_size, correction, eps, rest1, rest2):
    """AdamW of float32 tiles: master, exp_avg, exp_avg_sq.

    `decay` is learning rate times weight decay, `step_size` the learning rate over the first bias correction,
    `correction` 1 over the root of the second; `rest1` and `rest2` are 1 - beta.
    """
    m += rest1 * (g - m)
    v += rest2 * (g * g - v)
    master -= decay * master
    master -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * correction + eps)
    return master, m, v


@jit
def _update_block(
    row, first, count, control, weight_decay, eps, rest1, rest2, MASTER: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    grad = _pointer(row, 0, first, tl.float32, ALIGNED)
    if tl.load(control) != 0:
        masters = _pointer(row, 1, first, MASTER, ALIGNED)
        exp_avgs = _pointer(row, 3, first, tl.float32, ALIGNED)
        exp_avg_sqs = _pointer(row, 4, first, tl.float32, ALIGNED)
        decay = tl.load(control + 2) * weight_decay * tl.load(row + 8).to(tl.float32)
        master, m, v = adamw_step(
            _read(masters, offsets, count, FULL).to(tl.float32),
            _read(grad, offsets, count, FULL) * tl.load(control + 1),
            _read(exp_avgs, offsets, count, FULL),
            _read(exp_avg_sqs, offsets, count, FULL),
            decay, tl.load(control + 3), tl.load(control + 4), eps, rest1, rest2,
        )  # fmt: skip
        _write(masters, offsets, master, count, FULL)
        _write(exp_avgs, offsets, m, count, FULL)
        _write(exp_avg_sqs, offsets, v, count, FULL)
        if COPY is not None:
            _write(_pointer(row, 2, first, COPY, ALIGNED), offsets, master, count, FULL)
    _write(grad, offsets, tl.zeros((BLOCK,), tl.float32), count, FULL)


@jit
def _update_kernel(
    table, tensors, start, control, weight_decay, eps, rest1, rest2, COLUMNS: tl.constexpr, MASTER: tl.constexpr,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW of a block, if the step is made; its gradient is cleared either way."""
    item = tl.program_id(0).to(tl.int64) + start
    _, row, first = _locate(table, tensors, item, COLUMNS, BLOCK)
    count = tl.load(row + 7) - first
    settings = (control, weight_decay, eps, rest1, rest2)
    if count >= BLOCK:
        _update_block(row, first, count, *settings, MASTER, COPY, ALIGNED, BLOCK, True)
    else:
        _update_block(row, first, count, *settings, MASTER, COPY, ALIGNED, BLOCK, False)


@jit
def _update_8bit_block(
    row, first, count, control, weight_decay, eps, rest1, rest2, MASTER: tl.constexpr, COPY: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, LIMITS1: tl.constexpr, LIMITS2: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    blocks = tl.arange(0, BLOCK // SCALED)
    offsets = blocks[:, None] * SCALED + tl.arange(0, SCALED)[None, :]
    grad = _pointer(row, 0, first, tl.float32, ALIGNED)
    if tl.load(control) != 0:
        masters = _pointer(row, 1, first, MASTER, ALIGNED)
        exp_avgs = _pointer(row, 3, first, tl.uint8, ALIGNED)
        exp_avg_sqs = _pointer(row, 4, first, tl.uint8, ALIGNED)
        scales1 = _pointer(row, 5, first // SCALED, tl.float32, False)
        scales2 = _pointer(row, 6, first // SCALED, tl.float32, False)
        ends = tl.cdiv(count, SCALED)
        scale1, scale2 = _read(scales1, blocks, ends, FULL), _read(scales2, blocks, ends, FULL)
        decay = tl.load(control + 2) * weight_decay * tl.load(row + 8).to(tl.float32)
        master, m, v = adamw_step(
            _read(masters, offsets, count, FULL).to(tl.float32),
            _read(grad, offsets, count, FULL) * tl.load(control + 1),
            dequantize_tile(_read(exp_avgs, offsets, count, FULL), scale1, True, LIMITS1),
            dequantize_tile(_read(exp_avg_sqs, offsets, count, FULL), scale2, False, LIMITS2),
            decay, tl.load(control + 3), tl.load(control + 4), eps, rest1, rest2,
        )  # fmt: skip
        _write(masters, offsets, master, count, FULL)
        if COPY is not None:
            _write(_pointer(row, 2, first, COPY, ALIGNED), offsets, master, count, FULL)
        codes, scale1 = quantize_tile(m, True, LIMITS1)
        _write(exp_avgs, offsets, codes, count, FULL)
        _write(scales1, blocks, scale1, ends, FULL)
        codes, scale2 = quantize_tile(v, False, LIMITS2)
        _write(exp_avg_sqs, offsets, codes, count, FULL)
        _write(scales2, blocks, scale2, ends, FULL)
    _write(grad, offsets, tl.zeros((BLOCK // SCALED, SCALED), tl.float32), count, FULL)


@jit
def _update_8bit_kernel(
    table, tensors, start, control, weight_decay, eps, rest1, rest2, COLUMNS: tl.constexpr,
    MASTER: tl.constexpr, COPY: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
    LIMITS1: tl.constexpr, LIMITS2: tl.constexpr,
):  # fmt: skip
    """The same with moments in 8 bits, whose limits are those of `quantized_state.limits`."""
    item = tl.program_id(0).to(tl.int64) + start
    _, row, first = _locate(table, tensors, item, COLUMNS, BLOCK)
    count = tl.load(row + 7) - first
    settings = (control, weight_decay, eps, rest1, rest2)
    if count >= BLOCK:
        _update_8bit_block(row, first, count, *settings, MASTER, COPY, ALIGNED, BLOCK, SCALED, LIMITS1, LIMITS2, True)
    else:
        _update_8bit_block(row, first, count, *settings, MASTER, COPY, ALIGNED, BLOCK, SCALED, LIMITS1, LIMITS2, False)


class Entry(NamedTuple):
    """A tensor of the list: contiguous tensors of as many elements each, on one device."""

    grad: Tensor
    """Float32; cleared by an update."""
    master: Tensor
    """Float32, or bf16 that is its own master."""
    copy: Tensor | None
    """Takes the updated master rounded to its dtype; None where there is none."""
    exp_avg: Tensor | QuantizedMoment
    """Float32, or in 8 bits."""
    exp_avg_sq: Tensor | QuantizedMoment
    """The same."""
    decays: bool
    """Whether weight decay applies."""

    def moments(self) -> tuple[Tensor, ...]:
        """Both, and their scales if they are in 8 bits."""
        m, v = self.exp_avg, self.exp_avg_sq
        if isinstance(m, Tensor) or isinstance(v, Tensor):
            assert isinstance(m, Tensor)
            assert isinstance(v, Tensor)
            return m, v
        return m.codes, v.codes, m.scales, v.scales

    def addresses(self) -> tuple[int, ...]:
        """Of gradient, master, copy, both moments, their scales; 0 for none."""
        copy = 0 if self.copy is None else self.copy.data_ptr()
        found = (self.grad.data_ptr(), self.master.data_ptr(), copy, *(part.data_ptr() for part in self.moments()))
        return found if len(found) == _COLUMNS - 2 else (*found, 0, 0)


@dataclass(frozen=True)
class _Run:
    """Items of the work list that follow one another and are updated by one launch."""

    start: int
    items: int
    kind: tuple[torch.dtype, torch.dtype | None, torch.dtype]
    """Dtypes of the masters, the copies and the moments."""
    aligned: bool


class Tiles(NamedTuple):
    """How the kernels are launched."""

    block: int
    """Elements of an item of the work list, a multiple of 256."""
    update_warps: int
    update_8bit_warps: int
    square_warps: int


_TILES = {80: Tiles(2048, 8, 16, 4), 90: Tiles(2048, 8, 16, 4), 100: Tiles(2048, 8, 8, 4)}
"""By the architecture from which on they hold. From 100 on, 16 warps would spill registers."""


def _tiles(device: torch.device) -> Tiles:
    return _TILES[max(known for known in _TILES if known <= family(device))]


def _tensors(entry: Entry) -> list[Tensor]:
    """Those with an element for each parameter."""
    return [entry.grad, entry.master, *(() if entry.copy is None else (entry.copy,)), *entry.moments()[:2]]


def _aligned(entry: Entry) -> bool:
    """Whether four elements of each tensor are one access of 16, 8 or 4 bytes."""
    return all(tensor.data_ptr() % (4 * tensor.element_size()) == 0 for tensor in _tensors(entry))


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without a wait."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class TensorList:
    """The table of a list's addresses, and the work on it. Holds no tensor: it is good while the addresses are."""

    def __init__(self, entries: Sequence[Entry], device: torch.device) -> None:
        """Write the table.

        Args:
            entries: the tensors; there may be none, and they may be empty.
            device: of the tensors.
        """
        self.device = device
        self.addresses = [entry.addresses() for entry in entries]
        self._tiles = _tiles(device)
        kinds = [(_dtypes(entry), _aligned(entry)) for entry in entries]
        self._aligned = all(entry.grad.data_ptr() % 16 == 0 for entry in entries)
        work, self._runs = [], []
        for kind, aligned in dict.fromkeys(kinds):
            start = sum(map(len, work))
            for index, entry in enumerate(entries):
                if kinds[index] == (kind, aligned):
                    blocks = cdiv(entry.grad.numel(), self._tiles.block)
                    work.append((index << 32) + torch.arange(blocks, dtype=torch.int64))
            self._runs.append(_Run(start, sum(map(len, work)) - start, kind, aligned))
        self.items, self._tensors = sum(map(len, work)), len(entries)
        rows = [
            [*addresses, entry.grad.numel(), int(entry.decays)]
            for entry, addresses in zip(entries, self.addresses, strict=True)
        ]
        table = torch.tensor(rows, dtype=torch.int64).flatten()
        self._table = on_device(torch.cat([table, *work]), device)

    def squares(self, counted: Tensor) -> Tensor:
        """The sum of the squares of the gradients, 0-d float32; the same bits each time.

        Args:
            counted: int32 [tensors], 0 for those that are left out.
        """
        partial = torch.empty(self.items, dtype=torch.float32, device=self.device)
        launch(
            _squares_kernel, (self.items,), self.device, self._table, counted, partial, self._tensors,
            COLUMNS=_COLUMNS, ALIGNED=self._aligned, BLOCK=self._tiles.block, num_warps=self._tiles.square_warps,
        )  # fmt: skip
        return partial.sum()

    def update(self, control: Tensor, weight_decay: float, eps: float, betas: tuple[float, float]) -> None:
        """AdamW of all tensors where `control` says so, and their gradients cleared.

        Args:
            control: of `prepare`.
            weight_decay: of the tensors that decay.
            eps: added to the root of the second moment.
            betas: decay of both moments.
        """
        settings = (control, weight_decay, eps, 1 - betas[0], 1 - betas[1])
        for run in self._runs:
            master, copy, moment = run.kind
            shape: dict[str, Any] = {"MASTER": _TYPES[master](), "COPY": _TYPES[copy](), "ALIGNED": run.aligned}
            kernel, warps = _update_kernel, self._tiles.update_warps
            if moment == torch.uint8:
                kernel, warps = _update_8bit_kernel, self._tiles.update_8bit_warps
                shape |= {
                    "SCALED": STATE_BLOCK,
                    "LIMITS1": tuple(limits(signed=True)),
                    "LIMITS2": tuple(limits(signed=False)),
                }
            launch(
                kernel, (run.items,), self.device, self._table, self._tensors, run.start, *settings,
                COLUMNS=_COLUMNS, **shape, BLOCK=self._tiles.block, num_warps=warps,
            )  # fmt: skip


_TYPES: dict[torch.dtype | None, Any] = {
    torch.float32: lambda: tl.float32,
    torch.bfloat16: lambda: tl.bfloat16,
    torch.float16: lambda: tl.float16,
    None: lambda: None,
}
"""Triton's names of dtypes, which are not there where Triton is not."""


def _dtypes(entry: Entry) -> tuple[torch.dtype, torch.dtype | None, torch.dtype]:
    tensors, (exp_avg, exp_avg_sq, *scales) = _tensors(entry), entry.moments()
    sizes = {tensor.numel() for tensor in tensors}
    assert len(sizes) == 1, f"tensors of {sizes} elements are updated together"
    for tensor in (*tensors, *scales):
        assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} is updated"
    for scale in scales:
        assert scale.numel() == cdiv(entry.grad.numel(), STATE_BLOCK)
    assert entry.grad.dtype == torch.float32
    assert exp_avg.dtype == exp_avg_sq.dtype == (torch.uint8 if scales else torch.float32)
    return entry.master.dtype, None if entry.copy is None else entry.copy.dtype, exp_avg.dtype


def prepare(
    loss: Tensor, norm: Tensor, learning_rate: Tensor, is_open: Tensor, step_count: Tensor, max_norm: float,
    betas: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decide whether a step is made, count it, and work out the factors of its update: one launch, no wait.

    Args:
        loss: 0-d.
        norm: global gradient norm, 0-d float32.
        learning_rate: 0-d float32.
        is_open: 0-d bool; becomes False where loss or norm is not finite.
        step_count: 0-d float32; grows by 1 if the step is made.
        max_norm: gradients are scaled down to this norm; infinite for never.
        betas: decay of both moments.

    Returns:
        `control` float32 [5] (whether the step is made; factors of the gradient; learning rate; the same over the first
        bias correction; 1 over the root of the second), and whether loss and norm are finite, 0-d bool.
    """
    control = torch.empty(5, dtype=torch.float32, device=norm.device)
    finite = torch.empty((), dtype=torch.uint8, device=norm.device)
    launch(
        _prepare_kernel, (1,), norm.device, loss, norm, learning_rate, is_open.view(torch.uint8), step_count,
        finite, control, max_norm, BETA1=betas[0], BETA2=betas[1], num_warps=1,
    )  # fmt: skip
    return control, finite.view(torch.bool)
