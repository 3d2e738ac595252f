"""Batched generation: prompts of unlike lengths, no padding, finished sequences make room for waiting ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from gapless.adapters.lora import unchanged
from gapless.data.tokenizer import Tokenizer
from gapless.inference.kv_cache import KVCache
from gapless.inference.sampling import Sampler, Sampling
from gapless.models.decoder import Decoder

_PREFILL_TOKENS = 4096
"""Most prompt tokens in one forward (a longer prompt has one of its own); bounds the activations' memory."""


@dataclass(frozen=True)
class Completion:
    """What a prompt was answered with."""

    tokens: list[int]
    """The new tokens, without the one that stopped the sequence."""
    text: str
    """`tokens` decoded, special tokens left out."""
    finish_reason: Literal["stop", "length"]
    """stop: a stop token was drawn; length: max_new_tokens were."""


@dataclass
class _Sequence:
    index: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: Collection[int] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_token: Callable[[int, int], None] | None = None,
    on_completion: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """Answers prompts, `batch_size` of them at a time.

    Sequences share nothing but matrix products, and each draws from random numbers of its own. The rounding of the
    products differs with the number of rows, however: another batch_size may give another answer to the same seed, in
    bf16 often, in fp32 or greedily where two tokens are almost equally likely.

    Args:
        model: on any device; put into eval mode while it generates.
        tokenizer: decodes the answers and knows the tokens that end a turn.
        prompts: token ids, at least one each.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 is greedy.
        top_p: choose among the fewest likeliest tokens that hold this share of the probability.
        top_k: choose among the k likeliest tokens; 0 for all.
        stop_ids: tokens that end an answer; by default those of the generation config and the tokenizer.
        seed: of the draws.
        batch_size: sequences decoded together; bounds the cache's memory.
        on_token: called as (index of the prompt, token) when a token is chosen, the stop token included.
        on_completion: called as (index of the prompt, completion) when an answer is finished. Prompts are begun in
            their order; short answers overtake long ones.

    Returns:
        One completion per prompt, in order.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, a setting out of its range, or a piece of a model.
    """
    _check(model, prompts, max_new_tokens, batch_size)
    sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed))
    stops = frozenset(tokenizer.eos_ids if stop_ids is None else stop_ids)
    sequences = [_Sequence(index, list(prompt)) for index, prompt in enumerate(prompts)]
    completions: dict[int, Completion] = {}
    with _evaluating(model), unchanged(model), torch.no_grad():
        decoding = _Decoding(model, sampler, stops, max_new_tokens, on_token)
        for done in decoding.run(sequences, batch_size):
            completion = Completion(done.tokens, tokenizer.decode(done.tokens), done.finish_reason or "length")
            completions[done.index] = completion
            if on_completion is not None:
                on_completion(done.index, completion)
    return [completions[index] for index in range(len(prompts))]


class _Decoding:
    """The state of a run over all prompts: the sequences in the cache, in the order of their spans."""

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        stops: frozenset[int],
        max_new_tokens: int,
        on_token: Callable[[int, int], None] | None,
    ):
        self.model = model
        self.sampler = sampler
        self.stops = stops
        self.max_new_tokens = max_new_tokens
        self.on_token = on_token
        self.active: list[_Sequence] = []

    def run(self, sequences: list[_Sequence], batch_size: int) -> Iterator[_Sequence]:
        """Yields sequences as they finish."""
        if not sequences:
            return
        waiting = deque(sequences)
        capacity = max(len(sequence.prompt) for sequence in sequences) + self.max_new_tokens
        cache = new_cache(self.model, sequences=min(batch_size, len(waiting)), capacity=capacity)
        while waiting or self.active:
            if arrived := self._arrivals(waiting, cache.sequences - len(self.active)):
                spans = [cache.add() for _ in arrived]
                self.active += arrived
                self._forward(cache, spans, [sequence.prompt for sequence in arrived])
            else:
                self._forward(cache, range(len(self.active)), [sequence.tokens[-1:] for sequence in self.active])
            yield from self._retire(cache)

    @staticmethod
    def _arrivals(waiting: deque[_Sequence], free: int) -> list[_Sequence]:
        arrived, tokens = [], 0
        while waiting and len(arrived) < free and (not arrived or tokens + len(waiting[0].prompt) <= _PREFILL_TOKENS):
            arrived.append(waiting.popleft())
            tokens += len(arrived[-1].prompt)
        return arrived

    def _forward(self, cache: KVCache, spans: Sequence[int], tokens: Sequence[list[int]]) -> None:
        """Feeds tokens to the sequences in `spans` and chooses the next token of each."""
        counts = [len(part) for part in tokens]
        queries = cache.extend(spans, counts)
        flat = torch.tensor([token for part in tokens for token in part], dtype=torch.int32, device=cache.device)
        hidden = self.model(flat, queries, cache)
        last = torch.tensor(counts, device=cache.device).cumsum(0) - 1
        sequences = [self.active[span] for span in spans]
        chosen = self.sampler(self.model.logits(hidden[last]), [sequence.index for sequence in sequences])
        for sequence, token in zip(sequences, chosen, strict=True):
            if self.on_token is not None:
                self.on_token(sequence.index, token)
            if token in self.stops:
                sequence.finish_reason = "stop"
                continue
            sequence.tokens.append(token)
            if len(sequence.tokens) == self.max_new_tokens:
                sequence.finish_reason = "length"

    def _retire(self, cache: KVCache) -> Iterator[_Sequence]:
        for span in reversed(range(len(self.active))):
            sequence = self.active[span]
            if sequence.finish_reason is None:
                continue
            cache.remove(span)
            last = self.active.pop()
            if last is not sequence:
                self.active[span] = last
            self.sampler.forget(sequence.index)
            yield sequence


def new_cache(model: Decoder, *, sequences: int, capacity: int) -> KVCache:
    """An empty cache that fits a decoder.

    Args:
        model: gives layers, heads, dtype and device.
        sequences: most sequences at a time.
        capacity: most tokens of a sequence.
    """
    assert model.embed is not None
    config, weight = model.config, model.embed.weight
    return KVCache(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        sequences=sequences,
        capacity=capacity,
        dtype=model.dtype,
        device=weight.device,
        tiles=model.attention_tiles(),
    )


@contextmanager
def _evaluating(model: Decoder) -> Generator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int) -> None:
    if model.vocabulary is not None or None in (model.embed, model.norm, model.head):
        raise ValueError(
            "this is a piece of a model whose layers are cut by parallel.tp_size or parallel.pp_size, which cannot "
            "generate; load the result, or a checkpoint, in one process"
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    vocab = model.config.vocab
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise ValueError(f"prompt {index} is a text; prompts are token ids: tokenizer.encode or tokenizer.chat_ids")
        if not prompt:
            raise ValueError(f"prompt {index} has no tokens")
        if not 0 <= min(prompt) <= max(prompt) < vocab:
            wrong = next(token for token in prompt if not 0 <= token < vocab)
            raise ValueError(f"prompt {index} has token {wrong}, the vocabulary ends at {vocab - 1}")
