"""Counter-based dropout: the mask is a function of where a value stands, not of how many were drawn before.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3",
section 3.3). Key and counter are

    key     = (seed, step)
    counter = (channel // 4, column, row, layer << 8 | site)

and word `channel % 4` of the output decides. The same bits come out in any layout of rows over micro-batches and ranks,
on recompute, and after a resume, with no state to save.
"""

from __future__ import annotations

from typing import Any

import torch

from gapless.batch import DropoutCounters

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in units of 2^-32
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def dropout(
    x: torch.Tensor, p: float, counters: DropoutCounters, layer: int, site: int, first_channel: int = 0
) -> torch.Tensor:
    """Zero each value with probability p and scale the others by 1 / (1 - p).

    Only the counters are kept for the backward, which computes the mask again.

    Args:
        x: [T, C].
        p: in [0, 1).
        counters: of the batch.
        layer: below 2^23.
        site: which dropout in the layer, below 256.
        first_channel: channel of the layer's whole input that x begins with, where x is a range of its channels.

    Returns:
        [T, C] in x's dtype.
    """
    assert 0 <= p < 1
    assert 0 <= site < 256
    assert 0 <= layer < 2**23
    if p == 0:
        return x
    return _Dropout.apply(x, p, counters, (layer, site, first_channel))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, counters: DropoutCounters, place: tuple[int, int, int]
    ) -> torch.Tensor:
        ctx.save_for_backward(counters.key, counters.row, counters.column)
        ctx.p, ctx.place = p, place
        return _masked(x, p, counters, place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return _masked(grad, ctx.p, DropoutCounters(*ctx.saved_tensors), ctx.place), None, None, None


def _masked(x: torch.Tensor, p: float, counters: DropoutCounters, place: tuple[int, int, int]) -> torch.Tensor:
    kept = keep_mask(x.shape[1], p, counters, *place)
    return torch.where(kept, x * (1 / (1 - p)), 0)


def keep_mask(
    channels: int, p: float, counters: DropoutCounters, layer: int, site: int, first_channel: int = 0
) -> torch.Tensor:
    """Which values `dropout` keeps, bool [T, channels]."""
    skipped = first_channel % 4  # words of the first group that belong to channels before x's
    row, column = counters.row.long() & _MASK, counters.column.long() & _MASK
    group = torch.arange(first_channel // 4, -(-(first_channel + channels) // 4), device=row.device)
    place = torch.full_like(row, layer << 8 | site)
    key = counters.key.long() & _MASK
    words = philox((group[None, :], column[:, None], row[:, None], place[:, None]), (key[0], key[1]))
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(1)[:, skipped : skipped + channels]
    return bits >= round(p * 2**32)


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_:
            k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
        # The products wrap modulo 2^64, so all their bits are right; masking undoes the sign of the shift.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
    return c0, c1, c2, c3
