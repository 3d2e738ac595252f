"""Steps without a loader: micro-batches of any composition, and models to train on them."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import BatchLayout, Document, PackedBatch, build_batch
from gapless.config import AdapterConfig, OptimConfig, ParallelConfig
from gapless.kernels.runtime import as_captured
from gapless.models.views import hf_views
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.training.optim import AdamW
from tiny import tiny_model


@dataclass
class Step:
    """What `train_step` reads of a `TrainStep`."""

    micro_batches: list[PackedBatch]
    num_trained: int


class Again:
    """A recorder for a CPU: runs what was recorded again."""

    def __init__(self, *, stale=False):
        """`stale`: with the arguments of then, as a CUDA graph does, and not with those of now."""
        self.stale, self.recorded, self.forgotten, self.replays = stale, [], 0, 0

    def run(self, work, *args):
        work(*args)

    def record(self, work, *args):
        self.recorded.append((work.__name__, *[(len(batch.trained), batch.room) for batch in args]))

        def replay(*now):
            self.replays += 1
            for batch in now:
                batch.buffer.fill_(2**30)  # its tensors are not read any more
            with as_captured():
                work(*(args if self.stale else now))

        return replay

    def forget(self):
        self.forgotten += 1


def varied_steps(layout: BatchLayout, count: int, *, accumulation: int = 3, device="cpu") -> list[Step]:
    """Steps of few and many documents, with no, few and many tokens trained; in the second all, in the eighth none."""
    draw = np.random.default_rng(0)
    steps = []
    for step in range(count):
        rows = [
            [_row(layout, draw, {1: 1.0, 7: 0.0}.get(step), whole=step == 1) for _ in range(layout.rows)]
            for _ in range(accumulation)
        ]
        trained = sum(int(document.trained[1:].sum()) for micro in rows for row in micro for document in row)
        batches = [
            build_batch(
                layout,
                micro,
                row_ids=range(layout.rows * index, layout.rows * (index + 1)),
                step_trained=trained,
                learning_rate=1e-2 * (1 + math.cos(math.pi * step / count)),
                step=step,
                seed=5,
            )
            for index, micro in enumerate(rows)
        ]
        steps.append(Step([batch.to(device) for batch in batches], trained))
    return steps


def _row(layout: BatchLayout, draw: np.random.Generator, share: float | None, *, whole: bool) -> list[Document]:
    left, row = layout.row_tokens if whole else int(draw.integers(1, layout.row_tokens + 1)), []
    share = draw.choice([0.0, 0.2, 0.6, 1.0]) if share is None else share
    while left and len(row) < layout.row_documents:
        length = left if whole else int(draw.integers(1, left + 1))
        row.append(Document(draw.integers(0, 256, length).astype(np.int32), draw.random(length) < share))
        left -= length
    return row


def make_training(kind: str, *, dtype="fp32", device="cpu", optim=None, **model) -> tuple[ParallelModel, AdamW]:
    """A tiny model, the same every time, with dropout on its adapters if it has any, and its optimizer."""
    decoder = tiny_model(dtype=dtype, **model)
    if kind == "lora":
        apply_lora(decoder, AdapterConfig(r=4, lora_dropout=0.2, modules_to_save=("lm_head",)), seed=1)
        with torch.no_grad():
            for view in adapter_views(decoder):  # B starts at 0, where A would have no gradient
                if "lora_B" in view.name:
                    view.parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(view.name)))
    decoder.to(device)
    views = list((adapter_views if kind == "lora" else hf_views)(decoder))
    optimizer = AdamW(views, optim or OptimConfig(weight_decay=0.01), device)
    return ParallelModel([decoder], Mesh.single(), ParallelConfig()), optimizer


def state_of(optimizer: AdamW) -> dict[str, torch.Tensor]:
    """All of it, on the host."""
    return {name: value.cpu().clone() for name, _, value in optimizer.tensors()}


def assert_same_state(found: AdamW, expected: AdamW) -> None:
    """To the last bit."""
    state = state_of(found)
    for name, value in state_of(expected).items():
        assert torch.equal(state[name], value), name
    assert found.step_count == expected.step_count
