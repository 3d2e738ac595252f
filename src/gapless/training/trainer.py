"""The trainer: a run from its configuration to its result.

    device, model, adapter and files checked; then folder, rows tokenised, model and optimizer, newest checkpoint
    evaluate
    for every step:  micro-batches -> train_step -> read the metrics of the step before -> evaluate, save when due
    evaluate, save, write the adapter or the model

Metrics are read one step late, so that the device never waits for the host. Before a checkpoint is published its own
step's metrics are read: a step that went wrong is never saved.

Every rank of a job runs all of this. What there is once (run folder, metrics, result) is rank 0's, for which the others
wait outside of collectives; what one of them decides (to stop) or knows (where to go on) all learn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch.profiler import record_function

from gapless.adapters.lora import lora_layers, unchanged
from gapless.batch import BatchLayout
from gapless.checkpoint_file import folder_name, open_written
from gapless.config import RunConfig
from gapless.config_file import check_config
from gapless.data.loader import TrainStep
from gapless.data.store import TokenStore
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import pick_device
from gapless.kernels.gluon import hopper_note
from gapless.kernels.runtime import reference_note
from gapless.models.decoder import Decoder
from gapless.parallel import check_layout
from gapless.parallel.launch import launched
from gapless.parallel.mesh import build_mesh, mesh_sizes
from gapless.parallel.ownership import Ownership
from gapless.training import run_folder, setup
from gapless.training.callbacks import Callback, TrainResult, check_callbacks
from gapless.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Fault,
    Piece,
    check_names,
    list_checkpoints,
    no_fault,
)
from gapless.training.compile_ahead import CompilingProcess, compile_ahead
from gapless.training.display import Clock, make_display
from gapless.training.graph import CudaRecorder, GraphStep, obstacle
from gapless.training.logs import NoLog, RunLog, check_loggers
from gapless.training.metrics import Metrics
from gapless.training.optim import AdamW, state_shapes
from gapless.training.result import existing_result, write_result
from gapless.training.samples import write_samples
from gapless.training.schedule import make_schedule
from gapless.training.signals import StopSignals
from gapless.training.start import start_facts
from gapless.training.step import LossFunction, PendingMetrics, StepMetrics, StepNumbers, mean_loss, train_step

NEXT_BATCH, READ_METRICS = "next batch", "read metrics"
"""How a profiler's record names the two places where the loop may wait."""


class NonFiniteLossError(ValueError):
    """The loss or the gradient is infinite or not a number; weights are as before the step."""


@dataclass
class Totals:
    """Sums over the steps whose metrics were read; saved with checkpoints."""

    loss_sum: float = 0.0
    trained_tokens: int = 0
    eval_loss: float | None = None


@dataclass
class Pending:
    """A step that was launched and whose metrics were not read."""

    step: int
    data: TrainStep
    metrics: PendingMetrics
    finished: float | None
    """When it was done, if that is known."""


def train(
    config: RunConfig, *, train_rows: setup.RowSequence | None = None, eval_rows: setup.RowSequence | None = None
) -> TrainResult:
    """Run a configuration; see `Trainer`."""
    return Trainer(config, train_rows=train_rows, eval_rows=eval_rows).train()


class Trainer:
    """A run.

    Attributes (once training has begun):
        model: the decoder, adapters applied; of a job's many ranks each has its part.
        rank: of this process; the main one is 0.
        tokenizer: the model's.
        optimizer: AdamW over what is trained.
        device: where the model is.
        step: optimizer steps launched.
        total_steps: of the whole run.
        fault: called between the writes of a checkpoint; tests kill the process there.
    """

    fault: Fault = staticmethod(no_fault)

    def __init__(
        self,
        config: RunConfig,
        loss_fn: LossFunction | None = None,
        callbacks: Iterable[Callback] = (),
        *,
        train_rows: setup.RowSequence | None = None,
        eval_rows: setup.RowSequence | None = None,
    ) -> None:
        """Check the configuration; nothing is loaded yet.

        Args:
            config: the run.
            loss_fn: (logits float32 [M, V], labels int64 [M]) -> the SUM of the M token losses, in place of
                cross-entropy.
            callbacks: see `Callback`.
            train_rows: rows in memory in place of the files of data.train, which is then empty: any sequence of dicts,
                a list or a Hugging Face dataset for instance. A run goes on with the same rows only.
            eval_rows: the same in place of data.eval.

        Raises:
            ValueError: settings are out of range or contradict each other, or an argument is not what it must be.
        """
        config = check_config(config, train_rows=train_rows is not None, eval_rows=eval_rows is not None)
        self.config = config
        self.step = self.rank = 0
        self._loss_fn = loss_fn
        self._settings = run_folder.settings(config, own_loss=loss_fn is not None)
        self._train_rows = setup.check_sequence("train_rows", train_rows)
        self._eval_rows = setup.check_sequence("eval_rows", eval_rows)
        self._callbacks = check_callbacks(callbacks)
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function, not {type(loss_fn).__name__}")

    def stop(self) -> None:
        """End the run after the current step, as if it were the last: save, evaluate, write the result.

        In a job of many ranks any one of them may ask; all end after the same step, up to two steps later.
        """
        self._asked = True

    def train(self) -> TrainResult:
        """Train, from the newest checkpoint in the run folder if there is one.

        Raises:
            ValueError: bad settings, data, model or checkpoint; a non-finite loss; a disk that is full.
            FileNotFoundError: a file of the run is missing.
        """
        self.step = 0
        self._asked = self._stop = False
        self._stopped_by: str | None = None
        self._totals = Totals()
        self._pending: Pending | None = None
        self._evaluated: int | None = None
        self._saved: int | None = None
        self._unannounced: Path | None = None
        self._result: Path | None = None
        with ExitStack() as self._opened:
            self._opened.enter_context(setup.determinism(self.config.training.deterministic))
            self.device = pick_device(self.config.model.device)
            self._world = self._opened.enter_context(launched(self.config.parallel, self.device.type))
            self.rank = self._world.rank
            self._signals = StopSignals(self.rank, self._world.size)
            if self.device.type == "cuda":
                # With its number: what is current in this thread is not in others.
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._start_compiling()
            described = self._check()
            self._open_folder()
            checkpoint = self._prepare(described)
            if self._result is not None and self.step == self.total_steps:
                self._display.message(f"already finished at step {self.step}; the result is {self._result}")
                return self._train_result(self._result)
            self._begin(checkpoint)
            with self._signals:
                self._loop()
                self._writer.finish()  # a signal while the last checkpoint is written is no reason to lose it
            return self._finish()

    # ---- before the first step ----

    def _start_compiling(self) -> None:
        """Have kernels compiled by one process on each node."""
        evaluates = bool(self.config.data.eval) or self._eval_rows is not None
        first = self._world.local_rank == 0
        self._compiling: CompilingProcess | None = (
            compile_ahead(self.config, self.device, evaluates=evaluates) if first else None
        )
        if self._compiling is not None:
            self._opened.enter_context(closing(self._compiling))

    def _check(self) -> Decoder:
        """Refuse what can be refused before the run folder is made and rows are read; returns the model described."""
        check_loggers(self.config)
        self.tokenizer = Tokenizer.from_folder(self.config.model.path, self.config.data.chat_template)
        described = setup.describe_model(self.config, self.tokenizer)
        sizes = mesh_sizes(self.config.parallel, self._world.size)
        check_layout(self.config, described.config, sizes)
        self._obstacle = obstacle(
            described.config, described.dtype, self.device, sizes, own_loss=self._loss_fn is not None
        )
        if self._obstacle and self.config.training.cuda_graphs is True:
            raise ValueError(f'training.cuda_graphs is true, but {self._obstacle}; set it to "auto" or false')
        self._rows = setup.open_data(self.config, self._train_rows, self._eval_rows)
        self._base = run_folder.base_identity(self.config.model.path)
        facts = {"the model's digest": self._base["digest"], "loss_fn": self._settings.get("loss_fn", "cross-entropy")}
        self._world.agree("the start", start_facts(self.config, **facts))
        self._mesh = build_mesh(
            self.config.parallel, rank=self.rank, world_size=self._world.size, device_type=self.device.type
        )
        return described

    def _open_folder(self) -> None:
        """Open the run folder, which rank 0 makes and locks, and what is shown."""
        opened = run_folder.open_run_folder(self.config)
        made = self._world.first("folder", lambda: str(self._opened.enter_context(opened)))
        self._folder = Path(self.config.training.output_dir)
        if not (self._folder / "checkpoints").is_dir():
            raise ValueError(
                f"rank {self.rank} does not see {made}, which rank 0 has made; training.output_dir must be on a file "
                "system that all nodes share, and a relative path start from the same folder on all of them"
            )
        self._world.open_log(self._folder / "logs")
        self._display = self._opened.enter_context(closing(make_display(self._world)))

    def _prepare(self, described: Decoder) -> Checkpoint | None:
        """Everything as the newest checkpoint, which is returned, left it; nothing in the folder is changed."""
        checkpoint = run_folder.open_checkpoint_to_resume(self.config, self._settings, self._folder, self._world)
        if checkpoint:
            run_folder.check_base(checkpoint, self._base)
        train_store, self._eval_store = setup.build_stores(
            self.config, self.tokenizer, self._rows, self._display.message, self._world
        )
        digests = {
            f"the {name} rows' digest": store.fingerprint
            for name, store in (("training", train_store), ("evaluation", self._eval_store))
            if store
        }
        self._world.agree("the rows", digests)
        for name, store in (("train", train_store), ("eval", self._eval_store)):
            for line in store.report.lines() if store else ():
                self._display.message(f"{name}: {line}")
        if checkpoint:
            views = setup.trained_views(self.config, described)
            check_names(checkpoint, state_shapes(views, self.config.optim))
        self._build(described, train_store)
        if checkpoint:
            self._restore(checkpoint)
        return checkpoint

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Open the logs, once nothing can be refused any more."""
        state = checkpoint.state if checkpoint else {"seconds": 0.0, "wandb_id": None}
        self._clock = Clock(state["seconds"])
        if self.rank == 0:
            run_folder.write_resolved(self.config, self._folder)
            log = RunLog(self.config, after_step=self.step if checkpoint else None, wandb_id=state["wandb_id"])
        else:
            log = NoLog()
        self._log = self._opened.enter_context(closing(log))
        if self._world.first("evaluated", lambda: self._log.evaluated(self.step)):
            self._evaluated = self.step
        self._writer = self._opened.enter_context(
            CheckpointWriter(
                self._folder / "checkpoints",
                self._world,
                keep=self.config.training.save_total_limit,
                fault=self.fault,
                asynchronous=self.config.training.async_save,
            )
        )
        self._announce(checkpoint)

    def _build(self, described: Decoder, store: TokenStore) -> None:
        """Model, optimizer, loader and schedule."""
        training = self.config.training
        self._parallel = setup.build_model(self.config, described, self._mesh, self.device, self._world)
        self._opened.enter_context(closing(self._parallel))
        self.model = self._parallel.stages[0]
        views = setup.trained_views(self.config, *self._parallel.stages)
        self._ownership = Ownership(views, self._world)
        self.optimizer = self._opened.enter_context(closing(AdamW(views, self.config.optim, self.device)))
        self._parallel.bind(self.optimizer.buffers())
        self._adapted = [layer for stage in self._parallel.stages for layer in lora_layers(stage)]
        rows = training.per_device_train_batch_size
        layout = setup.build_layout(self.config, self.model, rows)
        self._eval_layout = setup.build_layout(self.config, self.model, training.per_device_eval_batch_size or rows)
        self._graphs = self._build_graphs(layout)
        loader = setup.build_loader(self.config, store, layout, self._learning_rate, self._mesh, self.device)
        self._loader = self._opened.enter_context(closing(loader))
        setup.check_rows(loader, self._mesh)
        self.total_steps = setup.count_steps(self.config, self._loader)
        self._schedule = make_schedule(self.config.optim, self.total_steps)

    def _build_graphs(self, layout: BatchLayout) -> GraphStep | None:
        """The steps as CUDA graphs, if they can be and are to."""
        if self._obstacle or not self.config.training.cuda_graphs:
            return None
        counts, show = self._ownership.counts, self._display.message
        recorder = CudaRecorder(self.device)
        graphs = GraphStep(self._parallel, self.optimizer, layout, recorder, counts=counts, show=show)
        return self._opened.enter_context(closing(graphs))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Put everything where the checkpoint left it."""
        run_folder.check_total_steps(checkpoint, self.config, self.total_steps)
        self.optimizer.load(
            lambda name, view: checkpoint.read(name, view.offset, view.shape), checkpoint.state["optimizer_steps"]
        )
        self._loader.load_state_dict(checkpoint.state["loader"])
        self._totals = Totals(**checkpoint.state["totals"])
        self.step = self._saved = checkpoint.step
        found = self._world.first("result", lambda: str(existing_result(self.config, checkpoint.path) or ""))
        self._result = Path(found) if found else None

    def _announce(self, checkpoint: Checkpoint | None) -> None:
        trained = sum(self._world.share("trained", self._ownership.elements))
        where = f"{self.device.type}"
        if self._world.size > 1:
            where = f"{self._world.size} ranks ({self._mesh}) on {where}"
        self._display.message(f"training {trained:,} parameters for {self.total_steps} steps on {where}")
        graphs = None
        if self._obstacle and self.config.training.cuda_graphs:
            graphs = f"note: training steps are not CUDA graphs: {self._obstacle}"
        for note in (setup.length_note(self.config), reference_note(self.device), hopper_note(self.device), graphs):
            if note:
                self._display.message(note)
        if checkpoint:
            self._display.message(f"going on from {checkpoint.path}")
        if self._compiling is not None:
            self._compiling.wait(self._display.message)
        for callback in self._callbacks:
            callback.on_train_begin(self)
        self._world.meet("begun")

    # ---- steps ----

    def _loop(self) -> None:
        self._evaluate_if_due()
        self._world.meet("evaluated")
        self._clock.resume()
        while self.step < self.total_steps and not self._ending:
            self._train_step()
            if self._evaluation_due or self._save_due:
                self._pause()
        self._pause()

    def _train_step(self) -> None:
        """Launch a step, then read the metrics of the one before it."""
        self._writer.poll()
        with record_function(NEXT_BATCH):
            data = self._loader.next_step()
        metrics = self._launch(data, stop=self._asked or self._signals.received is not None)
        self.step += 1
        self._result = None
        newest = None
        if metrics is None:
            self._display.message(f"step {self.step} has no trained token in its rows and was skipped")
        else:
            # A CPU is done now; a GPU when the metrics can be read.
            finished = time.perf_counter() if self.device.type == "cpu" else None
            newest = Pending(self.step, data, PendingMetrics(metrics), finished)
        self._read_metrics()
        self._pending = newest

    def _launch(self, data: TrainStep, *, stop: bool) -> StepMetrics | None:
        """Launch a step, replayed or not."""
        if self._graphs is not None:
            return self._graphs(data, stop=stop)
        counts = self._ownership.counts
        with unchanged(*self._adapted):  # but by its end; callbacks, which may change them too, come after it
            return train_step(self._parallel, self.optimizer, data, self._loss_fn, counts=counts, stop=stop)

    def _pause(self) -> None:
        """Catch up with the device, then evaluate and save if due."""
        self._read_metrics()
        self._tell_saved()
        self._evaluate_if_due()
        if self._save_due or self._ending:
            self._save()
        # What callbacks and sample answers take on one rank shall not count as waiting in a collective.
        self._world.meet("pause")
        self._clock.resume()

    @property
    def _ending(self) -> bool:
        self._learn_of_stop()
        return self._stop or self._stopped_by is not None

    def _learn_of_stop(self, numbers: StepNumbers | None = None) -> None:
        """One process stops as soon as it is told to. Many do after a step whose numbers told all that one is to."""
        if self._world.size > 1 and not (numbers and numbers.stop):
            return
        told = self._world.share("stop", [self._asked, self._signals.received])
        self._stop = any(asked for asked, _ in told)
        self._stopped_by = next((signal for _, signal in told if signal), None)

    @property
    def _save_due(self) -> bool:
        every = self.config.training.save_steps
        return self.step == self.total_steps or bool(every and self.step % every == 0)

    @property
    def _evaluation_due(self) -> bool:
        every = self.config.training.eval_steps
        return self.step in (0, self.total_steps) or self._stop or bool(every and self.step % every == 0)

    def _learning_rate(self, step: int) -> float:
        # The loader is built before the schedule: it knows how many steps there are.
        return self._schedule(step)

    def _read_metrics(self) -> None:
        """Wait for the pending step, if any, and log it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with record_function(READ_METRICS):
            numbers = pending.metrics.read()
        loss, grad_norm = numbers.loss, numbers.grad_norm
        if not numbers.finite:
            raise NonFiniteLossError(self._non_finite_text(pending, loss, grad_norm))
        self._totals.loss_sum += loss * pending.data.num_trained
        self._totals.trained_tokens += pending.data.num_trained
        seconds = self._clock.step(pending.finished or time.perf_counter())
        line = {
            "step": pending.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": self._schedule(pending.data.step),
            "epoch": pending.data.epoch,
            "trained_tokens": self._totals.trained_tokens,
            "tokens_per_second": numbers.tokens / max(seconds, 1e-9),
            "seconds": self._clock.seconds,
            "memory_gib": setup.memory_gib(self.device),
        }
        if pending.step % self.config.logging.logging_steps == 0 or pending.step == self.total_steps:
            self._log.write(line)
            remaining = self._clock.remaining(self.total_steps - pending.step)
            self._display.step(line, self.total_steps, remaining)
        for callback in self._callbacks:
            callback.on_step_end(self, line)
        self._learn_of_stop(numbers)

    def _non_finite_text(self, pending: Pending, loss: float, grad_norm: float) -> str:
        rows = pending.data.where()
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        return (
            f"step {pending.step}: the loss is {loss} and the gradient norm {grad_norm}; the weights are those before "
            f"the step, {self._last_checkpoint()}; a lower optim.learning_rate usually helps, or a look at the rows of "
            f"the step: {', '.join(rows[:8])}{more}"
        )

    def _non_finite_evaluation_text(self, loss: float) -> str:
        so_far = "though every training step so far was finite" if self.step else "before the first training step"
        suspects = ["loss_fn (it returned this)"] if self._loss_fn else [] if self.step else ["the model's weights"]
        return (
            f"step {self.step}: the evaluation loss is {loss}, {so_far}; look at "
            f"{' and at '.join([*suspects, 'what is special in the evaluation rows'])}; {self._last_checkpoint()}"
        )

    def _last_checkpoint(self) -> str:
        saved = list_checkpoints(self._folder / "checkpoints")
        return f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"

    # ---- evaluation and saving ----

    def _evaluate_if_due(self) -> None:
        """Evaluate and sample, unless this was done at this step, or the log shows it was before a resume."""
        if not self._evaluation_due or self._evaluated == self.step:
            return
        if self._interrupted():
            return  # the resumed run does it
        if self._eval_store is not None:
            batches = setup.evaluation_batches(
                self.config, self._eval_store, self._eval_layout, self._mesh, self.device
            )
            uninterrupted = takewhile(lambda _: not self._interrupted(), batches)
            with unchanged(*self._adapted):
                loss = mean_loss(self._parallel, uninterrupted, self._loss_fn)
            if loss is None or self._interrupted():
                return  # cut short
            self._display.message(f"step {self.step}/{self.total_steps}  eval loss {loss:.4f}")
            if not math.isfinite(loss):
                raise NonFiniteLossError(self._non_finite_evaluation_text(loss))
            self._totals.eval_loss = loss
            line: Metrics = {"step": self.step, "eval_loss": loss}
            self._log.write(line)
            for callback in self._callbacks:
                callback.on_evaluate(self, line)
        if self.config.logging.sample_prompts and (self.rank == 0 or self._parallel.together):
            path = self._folder / "samples.md" if self.rank == 0 else None
            write_samples(path, self.model, self.tokenizer, self.config.logging, self.step)
            self._parallel.rest()
        self._log.draw()
        self._evaluated = self.step

    def _interrupted(self) -> bool:
        """Whether a signal wants the evaluation to end. Ranks that evaluate together do not: they see it apart."""
        return self._stopped_by is not None or (self._world.size == 1 and self._signals.received is not None)

    def _save(self) -> None:
        """Publish a checkpoint of this step, whose metrics were read."""
        if self._saved == self.step:
            return
        self._writer.finish()
        self._tell_saved()  # of the save before
        self._log.sync()
        state = {
            "settings": self._settings,
            "total_steps": self.total_steps,
            "base": self._base,
            "loader": self._loader.state_dict(),
            "optimizer_steps": int(self.optimizer.step_count),
            "totals": vars(self._totals),
            "seconds": self._clock.seconds,
            "wandb_id": self._log.wandb_id,
        }
        pieces = (
            Piece(name, tensor, view.offset, view.full_shape)
            for name, view, tensor in self.optimizer.tensors(self._ownership.writes)
        )
        self._unannounced = self._writer.save(self.step, pieces, state)
        self._saved = self.step
        self._tell_saved()

    def _tell_saved(self) -> None:
        """Tell the callbacks of a checkpoint that is on the disk by now."""
        path = self._unannounced
        if path is not None and self._writer.idle:
            self._unannounced = None
            for callback in self._callbacks:
                callback.on_save(self, path)

    # ---- the end ----

    def _finish(self) -> TrainResult:
        self._log.draw()
        self._tell_saved()
        if self._stopped_by:
            self._display.message(
                f"stopped by {self._stopped_by} after step {self.step} of {self.total_steps}, saved in "
                f"{self._folder}; run the same command again to go on"
            )
            return self._train_result(None)
        result_dir = self._result
        if result_dir is None:
            result_dir = Path(self._world.first("result", self._write_result))
            self._display.message(f"wrote {result_dir}")
        result = self._train_result(result_dir)
        for callback in self._callbacks:
            callback.on_train_end(self, result)
        return result

    def _write_result(self) -> str:
        checkpoint = open_written(self._folder / "checkpoints" / folder_name(self.step))
        whole = setup.describe_model(self.config, self.tokenizer)
        return str(write_result(checkpoint, whole, self.tokenizer, self.config, self._folder))

    def _train_result(self, result_dir: Path | None) -> TrainResult:
        totals = self._totals
        return TrainResult(
            step=self.step,
            finished=self.step == self.total_steps and result_dir is not None,
            train_loss=totals.loss_sum / totals.trained_tokens if totals.trained_tokens else None,
            eval_loss=totals.eval_loss,
            output_dir=self._folder,
            result_dir=result_dir,
            stopped_by=self._stopped_by,
            rank=self.rank,
        )
