"""From logits to the next token: greedy, temperature, top-k, top-p.

Every sequence draws from a stream of its own, keyed by (seed, index of the sequence), one number a token. What a prompt
is answered with therefore depends neither on which prompts share its batch nor on when it entered it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ValueError: a value out of its range.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy and makes the other settings irrelevant."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that hold this share of the probability (after top-k)."""
    seed: int = 0
    """Of all sequences' random numbers."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


class Sampler:
    """Draws the next tokens of a batch of sequences."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self._streams: dict[int, np.random.Generator] = {}

    def __call__(self, logits: torch.Tensor, sequences: Sequence[int]) -> list[int]:
        """The next token of each sequence.

        Args:
            logits: float32 [S, V].
            sequences: index of each row's sequence, which names its stream of random numbers; each call takes one
                number from each stream.
        """
        if self.sampling.temperature == 0.0:
            return logits.argmax(dim=-1).tolist()
        uniform = torch.tensor(
            [self._stream(sequence).random() for sequence in sequences], dtype=torch.float64, device=logits.device
        )
        return draw(logits, uniform, self.sampling).tolist()

    def forget(self, sequence: int) -> None:
        """Drops the stream of a finished sequence."""
        self._streams.pop(sequence, None)

    def _stream(self, sequence: int) -> np.random.Generator:
        if sequence not in self._streams:
            key = np.array([self.sampling.seed, sequence], dtype=np.uint64)
            self._streams[sequence] = np.random.Generator(np.random.Philox(key=key))
        return self._streams[sequence]


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tokens at the given quantiles of the filtered distributions, likeliest tokens first.

    Top-k comes before top-p, as in transformers. The likeliest token is never filtered out.

    Args:
        logits: float32 [S, V].
        uniform: float64 [S] in [0, 1).
        sampling: temperature > 0, top_k, top_p.

    Returns:
        int64 [S].
    """
    count = min(sampling.top_k or logits.shape[-1], logits.shape[-1])
    if count < logits.shape[-1]:
        scores, order = logits.topk(count, dim=-1)
    else:
        scores, order = logits.sort(dim=-1, descending=True, stable=True)
    # float64, so that the sum over a vocabulary is 1 to far more digits than a uniform number can tell.
    # The largest score first becomes 0: no temperature, however small, then makes an infinity out of it.
    scores = scores.double()
    probabilities = ((scores - scores[:, :1]) / sampling.temperature).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = (before < sampling.top_p).sum(dim=-1, keepdim=True)
    cumulative = before + probabilities
    target = uniform.double().unsqueeze(-1) * cumulative.gather(-1, kept - 1)
    rank = torch.searchsorted(cumulative, target, right=True)
    return order.gather(-1, torch.minimum(rank, kept - 1)).squeeze(-1)
