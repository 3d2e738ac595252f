"""What it costs to find out in every layer again what is known of a batch once.

Ours builds all that attention asks about documents once a batch, on the host. Beside it, by layer:

    rebuilt     cu_seqlens added up anew on the GPU, and the longest document read by the host, as what calls a
                variable-length kernel does; the kernel and its tables are ours
    masked      the mask [T, T] of documents and order made anew, and torch's masked attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest import mock

import torch
from common import Row, Stopwatch, assert_close
from torch.nn import functional

from cases.finetune_plan import LLAMA_8B, drawn_lengths
from cases.training import Training, random_store
from gapless.adapters.lora import unchanged
from gapless.batch import Segments
from gapless.data.loader import TrainStep
from gapless.kernels.attention import attention
from gapless.kernels.attention.reference import with_spare
from gapless.models import attention as attention_module
from gapless.parallel.loss import batch_loss

ONCE, REBUILT, MASKED = "once", "rebuilt", "masked"
TOLERANCE = 0.05
"""Of hidden states in bf16 after all layers, as a share of their norm."""
PARTS = ("forward", "backward", "step")
PUBLISHED = "published of another library's mask: +43.3 % forward, +5.8 % backward, +14.3 % batch"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained: steps of two micro-batches, a packed row each."""

    shape: Mapping[str, Any]
    row_tokens: int = 4096
    micro_batches: int = 2
    warm_up: int = 2
    rounds: int = 7
    """Steps of each way that are timed, each on other documents, all ways on the same."""
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


def setting_of(layers: int) -> Setting:
    """Llama-3.1-8B's layers, so many of them."""
    return Setting(shape=LLAMA_8B | {"num_hidden_layers": layers})


def rebuilt(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, _: Segments, *, window: None, spare: int
) -> torch.Tensor:
    """`gapless.attention` after a layer of the usual kind has found out where documents are."""
    starts = segments.seqused.cumsum(0, dtype=torch.int32) - segments.seqused
    known = torch.arange(len(starts), device=starts.device) < len(segments.lengths)
    # Those that are none begin and end with the stream.
    sums = functional.pad(torch.where(known, starts, segments.tokens), (0, 1), value=segments.tokens)
    again = replace(segments, cu_seqlens=sums)
    longest = int(segments.seqused.max())
    assert longest == segments.max_seqlen
    return attention(q, k, v, again, again, window=window, spare=spare)  # pyrefly: ignore


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, _: Segments, *, window: None, spare: int
) -> torch.Tensor:
    """Attention of torch with a dense mask; q [T, N, D], k and v [T, K, D]."""
    places = torch.arange(segments.tokens, device=q.device, dtype=torch.int32)
    documents = torch.searchsorted(segments.cu_seqlens[1:], places, right=True)
    mask = (documents[:, None] == documents) & (places[:, None] >= places)
    groups = q.shape[1] // k.shape[1]
    queries, keys, values = q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    heads = [x.transpose(0, 1)[None] for x in (queries, keys, values)]
    out = functional.scaled_dot_product_attention(*heads, attn_mask=mask[None, None])
    return with_spare(out[0].transpose(0, 1).contiguous(), spare)


WAYS: dict[str, Callable[..., Any]] = {ONCE: attention, REBUILT: rebuilt, MASKED: masked}


@contextmanager
def attending(way: str) -> Iterator[None]:
    """The model's layers attend in this way."""
    with mock.patch.object(attention_module, "attention", WAYS[way]):
        yield


def rows(name: str, setting: Setting) -> list[Row]:
    """A row for each part of a step: what `rebuilt` takes over what ours takes."""
    training = Training.of(setting.shape, setting.device, setting.dtype)
    steps = setting.warm_up + setting.rounds
    tokens = (steps + 1) * setting.micro_batches * setting.row_tokens
    lengths = drawn_lengths(max(tokens // 64, 64), setting.row_tokens)
    lengths = lengths[: int((lengths.cumsum() < tokens).sum()) + 1]
    store = random_store(lengths, setting.shape["vocab_size"])
    most = max(8, setting.row_tokens // 16)
    layout = training.decoder.batch_layout(rows=1, row_tokens=setting.row_tokens, row_documents=most)
    times: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    with training.loader(store, layout, gradient_accumulation_steps=setting.micro_batches) as loader:
        for number in range(steps):
            data = loader.next_step()
            if number == 0:
                _check_hidden(training, data)
            for way in (*WAYS, *WAYS)[number % len(WAYS) :][: len(WAYS)]:
                with attending(way):
                    found = timed_step(training, data)
                if number >= setting.warm_up:
                    times[way].append(found)
    found = {
        way: {part: median(step[place] for step in found) for place, part in enumerate(PARTS)}
        for way, found in times.items()
    }
    return [_row(name, setting, part, {way: of[part] for way, of in found.items()}) for part in PARTS]


def _row(name: str, setting: Setting, part: str, ms: Mapping[str, float]) -> Row:
    added = {f"{way} adds %": 100 * (ms[way] / ms[ONCE] - 1) for way in (REBUILT, MASKED)}
    layers, tokens = setting.shape["num_hidden_layers"], setting.micro_batches * setting.row_tokens
    return Row(
        case=name if part == "step" else f"{name}-{part}",
        unit="x",
        gapless=ms[REBUILT] / ms[ONCE],
        limit=1.0,
        beside={f"{way} ms": value for way, value in ms.items()} | added,
        note=f"{part}, {layers} layers, {tokens:,} tokens in packed rows of {setting.row_tokens:,}; {PUBLISHED}",
        bar=1.0,
    )


def timed_step(training: Training, data: TrainStep) -> tuple[float, ...]:
    """Milliseconds of a step's forwards, of its backwards, and of all of it, update included."""
    watch = Stopwatch(training.device)
    losses = []
    with unchanged(*training.adapted):
        training.optimizer.bind_gradients()
        watch.point()
        for batch in data.micro_batches:
            loss = batch_loss(training.decoder, batch) / batch.scalars.num_trained
            watch.point()
            loss.backward()
            watch.point()
            losses.append(loss.detach())
        rate = data.micro_batches[0].scalars.learning_rate
        training.optimizer.step(torch.stack(losses).sum(), rate, training.optimizer.squares().sqrt())
    watch.point()
    spans = watch.read()
    forward, backward = spans[:-1:2], spans[1:-1:2]
    return sum(forward), sum(backward), sum(spans)


@torch.no_grad()
def _check_hidden(training: Training, data: TrainStep) -> None:
    """The same bits where the kernel is the same, the same hidden states to rounding where it is not."""
    batch = data.micro_batches[0]
    used = batch.num_tokens  # what is behind belongs to no document
    hidden = {}
    for way in WAYS:
        with attending(way):
            hidden[way] = training.decoder(batch.tokens, batch.segments)[:used]
    assert_close(f"hidden states {REBUILT}", hidden[REBUILT], hidden[ONCE], tolerance=0.0)
    assert_close(f"hidden states {MASKED}", hidden[MASKED], hidden[ONCE], tolerance=TOLERANCE)
