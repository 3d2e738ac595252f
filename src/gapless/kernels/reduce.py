"""Sums over tokens, last step: what programs have added up on their own, added up in a fixed order."""

from __future__ import annotations

import torch

from gapless.kernels.runtime import cdiv, jit, launch, tl


@jit
def _add_partials(partial, out, programs, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, programs, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        total += tl.load(partial + row * C + column, mask=(row < programs) & (column < C), other=0.0)
    total = tl.sum(total, axis=0, keep_dims=True)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < C)


def add_partials(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over programs of float32 [programs, C], contiguous; a dense [C] in a dtype.

    The same bits each time; zeros if there are no programs.
    """
    programs, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    # Of few columns narrow pieces, so that there are enough programs to read them: 32 bytes of a row at least.
    rows, width = (1024, 8) if columns <= 512 else (128, 32)
    settings = {"C": columns, "ROWS": rows, "COLUMNS": width, "num_warps": 8}
    launch(_add_partials, (cdiv(columns, width),), out.device, partial, out, programs, **settings)
    return out
