"""Packed rows against padded batches: the same documents, the same step, once without padding and once with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from common import Row, Stopwatch

from cases.finetune_plan import LLAMA_8B, drawn_lengths
from cases.training import LEARNING_RATE, Training, random_store
from gapless.batch import BatchLayout, Document, PackedBatch, build_batch
from gapless.data.loader import TrainStep
from gapless.data.store import TokenStore
from gapless.training.step import mean_loss

TOLERANCE = 2e-4
"""How far apart the losses of both may be, as a share."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained."""

    shape: Mapping[str, Any]
    documents: int = 456
    """The first of 4,096, whose padded batches have 2.97 times their tokens; of these 2.96, and they fill 31 steps."""
    rows: int = 2
    row_tokens: int = 4096
    batch: int = 8
    """Documents of a padded batch, as long as its longest."""
    passes: int = 2
    """Over all documents, that are timed, after one that is not: each padded batch has a shape that is new once."""
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


SETTING = Setting(shape=LLAMA_8B | {"num_hidden_layers": 16})


def rows(setting: Setting = SETTING) -> list[Row]:
    """Trained tokens per second, packed over padded."""
    lengths = drawn_lengths(setting.documents, setting.row_tokens)
    training = Training.of(setting.shape, setting.device, setting.dtype)
    store = random_store(lengths, setting.shape["vocab_size"])
    assert store.lengths.tolist() == lengths.tolist()
    padded = [host_batch(training, store, chosen) for chosen in batches_of(setting)]
    tokens = {"packed": int(lengths.sum()), "padded": sum(step.micro_batches[0].layout.tokens for step in padded)}
    _check_losses(training, setting, store, padded)
    ways: dict[str, Callable[[], Iterator[TrainStep]]] = {
        "packed": lambda: packed_steps(training, setting, store),
        "padded": lambda: (_on_device(step, training.device) for step in padded),
    }
    longest = max(padded, key=lambda step: step.micro_batches[0].layout.tokens)
    training.step(_on_device(longest, training.device))  # the allocator has what it needs from now on
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + setting.passes):
        for name, steps in ways.items():
            seconds = _seconds(training, steps())
            if number:
                times[name].append(seconds)
    trained = int(store.trained.sum())
    rates = {name: trained / median(seconds) for name, seconds in times.items()}
    limit = tokens["padded"] / tokens["packed"]
    return [
        Row(
            case="packing",
            unit="x",
            gapless=rates["packed"] / rates["padded"],
            limit=limit,
            beside={f"{name} tokens/s": rate for name, rate in rates.items()},
            note=_note(setting, limit),
            bar=0.9 * limit,
        )
    ]


def _note(setting: Setting, limit: float) -> str:
    shape = setting.shape
    return (
        f"trained tokens/s of {setting.documents} documents of round(exp(N(ln 350, 1))) tokens, 16 to "
        f"{setting.row_tokens:,}, packed in {setting.rows} x {setting.row_tokens:,} over padded batches of "
        f"{setting.batch}, which have {limit:.2f} times their tokens; LoRA r=16 on {shape['num_hidden_layers']} layers "
        f"of {shape['hidden_size']} features, plain launches, both the step of ours"
    )


def batches_of(setting: Setting) -> list[range]:
    """The documents of each padded batch, in their order."""
    starts = range(0, setting.documents, setting.batch)
    return [range(start, min(start + setting.batch, setting.documents)) for start in starts]


def host_batch(training: Training, store: TokenStore, chosen: Sequence[int]) -> TrainStep:
    """A padded batch on the host: each document a row, as long as the longest."""
    documents = [store.document(index) for index in chosen]
    longest = max(len(document.tokens) for document in documents)
    layout = training.decoder.batch_layout(rows=len(documents), row_tokens=longest, row_documents=1)
    rows = [[padded_document(document, longest)] for document in documents]
    batch = build_batch(layout, rows, learning_rate=LEARNING_RATE)
    if training.device.type == "cuda":
        batch = batch.pin_memory()
    return TrainStep([batch], batch.num_trained, step=0, epoch=0.0, store=store, documents=np.array(chosen))


def padded_document(document: Document, tokens: int) -> Document:
    """The document with tokens behind it that are not trained."""
    added = tokens - len(document.tokens)
    return Document(np.pad(document.tokens, (0, added)), np.pad(document.trained, (0, added)))


def packed_steps(training: Training, setting: Setting, store: TokenStore) -> Iterator[TrainStep]:
    """All documents once, through our loader."""
    with training.loader(store, _layout(training, setting)) as loader:
        for _ in range(loader.steps_per_epoch(0)):
            yield loader.next_step()


def _layout(training: Training, setting: Setting) -> BatchLayout:
    most = max(8, setting.row_tokens // 16)
    return training.decoder.batch_layout(rows=setting.rows, row_tokens=setting.row_tokens, row_documents=most)


def _on_device(step: TrainStep, device: torch.device) -> TrainStep:
    batches: list[PackedBatch] = [batch.to(device) for batch in step.micro_batches]
    return TrainStep(batches, step.num_trained, step.step, step.epoch, step.store, step.documents)


def _seconds(training: Training, steps: Iterator[TrainStep]) -> float:
    """Of all steps, the first of which is ready when the clock starts, as in a run that goes on."""
    watch, first = Stopwatch(training.device), next(steps)
    watch.point()
    for step in itertools.chain([first], steps):
        training.step(step)
    watch.point()
    return watch.read()[0] / 1e3


def _check_losses(training: Training, setting: Setting, store: TokenStore, padded: Sequence[TrainStep]) -> None:
    """Both ways must find the same loss of all documents."""
    ways = {
        "packed": (batch for step in packed_steps(training, setting, store) for batch in step.micro_batches),
        "padded": (batch.to(training.device) for step in padded for batch in step.micro_batches),
    }
    losses = {name: mean_loss(training.model, batches) for name, batches in ways.items()}
    print(f"  losses: {losses}", flush=True)
    one, other = losses.values()
    assert one is not None
    assert other is not None
    if not abs(one - other) <= TOLERANCE * other:
        raise AssertionError(f"the mean loss of all documents is {one:.5f} packed and {other:.5f} padded")
