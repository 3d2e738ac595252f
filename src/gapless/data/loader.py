"""The loader: optimizer steps of packed micro-batches, built and sent ahead by a worker thread, resumable at any step.

The rows of an epoch have one global order that follows from the seed alone. With G = rows x accumulation x world size,
step s takes the rows [s G, (s + 1) G); micro-batch m of rank r takes `rows` of them from s G + (m x world size + r) x
rows on. So an order survives a change of accumulation and world size as long as G stays. The last step of an epoch is
filled up with empty rows; a step never mixes epochs. N, the trained tokens of a step over all ranks, is known here from
the store, without any communication.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gapless.batch import BatchLayout, PackedBatch, build_batch
from gapless.data.packing import Plan, plan_epoch
from gapless.data.store import TokenStore
from gapless.data.transfer import Sent, Transfer

STATE_VERSION = 1


@dataclass
class TrainStep:
    """What a rank needs for one optimizer step."""

    micro_batches: list[PackedBatch]
    """This rank's, in order, on the device."""
    num_trained: int
    """N: trained tokens of the step over all micro-batches and ranks."""
    step: int
    """Optimizer steps before this one."""
    epoch: float
    """Passes over the data when this step is done."""
    store: TokenStore = field(repr=False)
    documents: np.ndarray = field(repr=False)
    """Store indices of the documents of all ranks."""

    def where(self) -> list[str]:
        """The places of the source rows in all ranks' micro-batches, for messages."""
        return [self.store.where(int(index)) for index in self.documents]


class Loader:
    """Steps of packed batches, without end.

    Args:
        store: the documents.
        layout: sizes of a micro-batch.
        seed: of the order of rows; also goes into the batches for dropout.
        gradient_accumulation_steps: micro-batches per step and rank.
        shuffle: a new order every epoch; False keeps the order of the store.
        packing: False gives each document a row of its own.
        packing_window: documents packed together.
        learning_rate: of a step, by the number of steps before it.
        rank: of this process among the data-parallel ones.
        world_size: data-parallel processes.
        device: where the batches go.
        prefetch: steps built and sent ahead.

    Raises:
        ValueError: a document does not fit in a row, or a number is out of range.
    """

    def __init__(
        self,
        store: TokenStore,
        layout: BatchLayout,
        *,
        seed: int,
        gradient_accumulation_steps: int = 1,
        shuffle: bool = True,
        packing: bool = True,
        packing_window: int = 4096,
        learning_rate: Callable[[int], float],
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
    ) -> None:
        _check_store(store, layout)
        for name, value in (
            ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("packing_window", packing_window),
            ("world_size", world_size),
            ("prefetch", prefetch),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not among {world_size} ranks")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed must be in [0, 2^31), not {seed}")
        self._store = store
        self._layout = layout
        self._seed = seed
        self._accumulation = gradient_accumulation_steps
        self._learning_rate = learning_rate
        self._rank, self._world_size = rank, world_size
        self._device = torch.device(device)
        self._prefetch = prefetch
        self._plans = _Plans(store, layout, packing=packing, window=packing_window, shuffle=shuffle, seed=seed)
        self._order = {
            "seed": seed,
            "shuffle": shuffle,
            "packing": packing,
            "packing_window": packing_window,
            "row_tokens": layout.row_tokens,
            "row_documents": layout.row_documents,
            "rows_per_step": self._step_rows,
        }
        self._position = _Position(step=0, epoch=0, step_in_epoch=0)
        self._next_to_build = self._position
        self._transfer: Transfer | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[_Built]] = deque()

    @property
    def _step_rows(self) -> int:
        """G."""
        return self._layout.rows * self._accumulation * self._world_size

    def rows_per_epoch(self, epoch: int) -> int:
        """Packed rows of an epoch; may differ between epochs when shuffled."""
        return self._plans.rows(epoch)

    def steps_per_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch, counted from 0; may differ between epochs when shuffled and packed."""
        return -(-self.rows_per_epoch(epoch) // self._step_rows)

    def next_step(self) -> TrainStep:
        """The next step, through the epochs without end. What went wrong in the worker is raised here."""
        if self._transfer is None:
            self._transfer = Transfer(self._device)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="gapless-loader", initializer=self._use_device)
        while len(self._ahead) < self._prefetch:
            # One worker runs these one after the other: each continues where the one before stopped.
            self._ahead.append(self._worker.submit(self._build))
        built = self._ahead[0].result()
        # Only now: a step that was waited for in vain (Ctrl-C) is the next one still.
        self._ahead.popleft()
        self._ahead.append(self._worker.submit(self._build))
        self._position = built.after
        built.step.micro_batches = built.sent.take()
        return built.step

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the last step handed out; JSON-able."""
        return {
            "format_version": STATE_VERSION,
            "data": self._store.fingerprint,
            "order": dict(self._order),
            "step": self._position.step,
            "epoch": self._position.epoch,
            "step_in_epoch": self._position.step_in_epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises:
            ValueError: the state is of other data, or of settings that give another order of rows.
        """
        if state.get("format_version") != STATE_VERSION:
            raise ValueError(
                f"the loader's state has format_version {state.get('format_version')}, known: {STATE_VERSION}; resume "
                "with the gapless that wrote it, or start a new output_dir"
            )
        if state["data"] != self._store.fingerprint:
            raise ValueError(
                "the checkpoint was made with other training data (or another tokenizer, template or max_length); "
                "resume with the same, or start a new output_dir"
            )
        changed = [
            f"{name} {state['order'].get(name)} -> {value}"
            for name, value in self._order.items()
            if state["order"].get(name) != value
        ]
        if changed:
            raise ValueError(
                f"the order of rows would differ from the checkpoint's: {', '.join(changed)}; resume with the same "
                f"settings{self._rows_remedy(state['order'])}"
            )
        self.close()
        self._position = _Position(step=state["step"], epoch=state["epoch"], step_in_epoch=state["step_in_epoch"])
        self._next_to_build = self._position

    def _rows_remedy(self, order: dict[str, Any]) -> str:
        before, once = order.get("rows_per_step"), self._layout.rows * self._world_size
        if before is None or before == self._step_rows:
            return ""
        ranks = f"{self._world_size} data-parallel rank{'s' if self._world_size > 1 else ''}"
        text = (
            f" (rows_per_step is batch size {self._layout.rows} x gradient accumulation {self._accumulation} x {ranks}"
        )
        if before % once:
            return f"{text}; {before} do not divide by {once}: use another number of ranks or another batch size)"
        return f"{text}; set training.gradient_accumulation_steps to {before // once})"

    def close(self) -> None:
        """Stop the worker. The loader can go on afterwards: the next step starts it again."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._worker = None
        self._ahead.clear()
        self._next_to_build = self._position

    # ---- in the worker ----

    def _use_device(self) -> None:
        # Pinned memory belongs to a GPU's context; in a new thread the first GPU would be current.
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)

    def _build(self) -> _Built:
        position = self._next_to_build
        while position.step_in_epoch >= self.steps_per_epoch(position.epoch):
            position = _Position(step=position.step, epoch=position.epoch + 1, step_in_epoch=0)
        plan = self._plans.get(position.epoch)
        first = position.step_in_epoch * self._step_rows
        end = min(first + self._step_rows, len(plan))
        num_trained = int(
            self._store.trained[plan.documents[plan.bounds[first] : plan.bounds[end]]].sum(dtype=np.int64)
        )
        learning_rate = self._learning_rate(position.step)
        rows = [self._micro_rows(first, micro, len(plan)) for micro in range(self._accumulation)]
        batches = [
            build_batch(
                self._layout,
                [[self._store.document(int(document)) for document in plan.row(row)] for row in micro],
                row_ids=list(micro),
                step_trained=num_trained,
                learning_rate=learning_rate,
                step=position.step,
                seed=self._seed,
            )
            for micro in rows
        ]
        assert self._transfer is not None, "next_step makes it before it starts the worker"
        sent = self._transfer.start(batches)
        after = _Position(position.step + 1, position.epoch, position.step_in_epoch + 1)
        step = TrainStep(
            micro_batches=sent.batches,
            num_trained=num_trained,
            step=position.step,
            epoch=position.epoch + after.step_in_epoch / self.steps_per_epoch(position.epoch),
            store=self._store,
            documents=plan.documents[plan.bounds[first] : plan.bounds[end]],
        )
        self._next_to_build = after
        return _Built(step, sent, after)

    def _micro_rows(self, first: int, micro: int, count: int) -> range:
        start = first + (micro * self._world_size + self._rank) * self._layout.rows
        return range(min(start, count), min(start + self._layout.rows, count))


@dataclass(frozen=True)
class _Position:
    step: int
    epoch: int
    step_in_epoch: int


@dataclass(frozen=True)
class _Built:
    step: TrainStep
    sent: Sent
    after: _Position


class _Plans:
    """The plans of the epochs in use, made on demand by either thread."""

    def __init__(
        self, store: TokenStore, layout: BatchLayout, *, packing: bool, window: int, shuffle: bool, seed: int
    ) -> None:
        self._store = store
        self._layout = layout
        self._packing = packing
        self._window = window
        self._shuffle = shuffle
        self._seed = seed
        self._lock = threading.Lock()
        self._kept: dict[int, Plan] = {}
        self._rows: dict[int, int] = {}

    def rows(self, epoch: int) -> int:
        if epoch not in self._rows:
            self.get(epoch)
        return self._rows[epoch]

    def get(self, epoch: int) -> Plan:
        with self._lock:
            if epoch not in self._kept:
                # The trainer asks for one epoch while the worker is in another; more are not in use at a time.
                for old in list(self._kept)[:-1]:
                    del self._kept[old]
                self._kept[epoch] = plan_epoch(
                    self._store.lengths,
                    row_tokens=self._layout.row_tokens,
                    row_documents=self._layout.row_documents,
                    window=self._window,
                    packing=self._packing,
                    shuffle=self._shuffle,
                    seed=self._seed,
                    epoch=epoch,
                )
                self._rows[epoch] = len(self._kept[epoch])
            return self._kept[epoch]


def _check_store(store: TokenStore, layout: BatchLayout) -> None:
    longest = int(np.argmax(store.lengths))
    if store.lengths[longest] > layout.row_tokens:
        raise ValueError(
            f"{store.where(longest)} has {store.lengths[longest]} tokens, a row has {layout.row_tokens}; "
            "tokenise with max_length at most that"
        )


def eval_batches(
    store: TokenStore,
    layout: BatchLayout,
    *,
    packing: bool = True,
    packing_window: int = 4096,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[PackedBatch]:
    """All documents once, in a fixed order; the same number of batches on every rank (empty ones fill up).

    The batches' `step_trained` is their own; the caller adds sums of losses and trained tokens up over all of them.
    """
    _check_store(store, layout)
    plan = plan_epoch(
        store.lengths,
        row_tokens=layout.row_tokens,
        row_documents=layout.row_documents,
        window=packing_window,
        packing=packing,
        shuffle=False,
        seed=0,
        epoch=0,
    )
    transfer = Transfer(device)
    for first in range(0, len(plan), layout.rows * world_size):
        start = min(first + rank * layout.rows, len(plan))
        rows = range(start, min(start + layout.rows, len(plan)))
        documents: Sequence[Any] = [[store.document(int(index)) for index in plan.row(row)] for row in rows]
        batch = build_batch(layout, documents, row_ids=list(rows))
        yield from transfer.start([batch]).take()
