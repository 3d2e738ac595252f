"""The trainer: a run from its configuration to its result.

    device, model, adapter and files checked; then folder, rows tokenised, model and optimizer, newest checkpoint
    evaluate
    for every step:  micro-batches -> train_step -> read the metrics of the step before -> evaluate, save when due
    evaluate, save, write the adapter or the model

Metrics are read one step late, so that the device never waits for the host. Before a checkpoint is published its own
step's metrics are read: a step that went wrong is never saved.
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

from gapless.config import RunConfig
from gapless.config_file import check_config
from gapless.data.loader import TrainStep
from gapless.data.store import TokenStore
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import pick_device
from gapless.parallel.world import World
from gapless.training import run_folder, setup
from gapless.training.callbacks import Callback, TrainResult, check_callbacks
from gapless.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Fault,
    Piece,
    check_names,
    folder_name,
    list_checkpoints,
    no_fault,
    open_checkpoint,
)
from gapless.training.display import Clock, make_display
from gapless.training.logs import RunLog, check_loggers
from gapless.training.metrics import Metrics
from gapless.training.optim import AdamW
from gapless.training.result import existing_result, write_result
from gapless.training.samples import write_samples
from gapless.training.schedule import make_schedule
from gapless.training.signals import StopSignals
from gapless.training.step import LossFunction, PendingMetrics, mean_loss, train_step


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
        model: the decoder, adapters applied.
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
        self.step = 0
        self._loss_fn = loss_fn
        self._settings = run_folder.settings(config, own_loss=loss_fn is not None)
        self._train_rows = setup.check_rows("train_rows", train_rows)
        self._eval_rows = setup.check_rows("eval_rows", eval_rows)
        self._callbacks = check_callbacks(callbacks)
        if loss_fn is not None and not callable(loss_fn):
            raise ValueError(f"loss_fn must be a function, not {type(loss_fn).__name__}")

    def stop(self) -> None:
        """End the run after the current step, as if it were the last: save, evaluate, write the result."""
        self._stop = True

    def train(self) -> TrainResult:
        """Train, from the newest checkpoint in the run folder if there is one.

        Raises:
            ValueError: bad settings, data, model or checkpoint; a non-finite loss; a disk that is full.
            FileNotFoundError: a file of the run is missing.
        """
        self.step = 0
        self._stop = False
        self._signals = StopSignals()
        self._totals = Totals()
        self._pending: Pending | None = None
        self._evaluated: int | None = None
        self._saved: int | None = None
        self._result: Path | None = None
        with ExitStack() as self._opened:
            self._opened.enter_context(setup.determinism(self.config.training.deterministic))
            self._check()
            self._folder = self._opened.enter_context(run_folder.open_run_folder(self.config))
            self._display = self._opened.enter_context(closing(make_display()))
            checkpoint = self._prepare()
            if self._result is not None and self.step == self.total_steps:
                self._display.message(f"already finished at step {self.step}; the result is {self._result}")
                return self._train_result(self._result)
            self._begin(checkpoint)
            with self._signals:
                self._loop()
            return self._finish()

    # ---- before the first step ----

    def _check(self) -> None:
        """Refuse what can be refused before the run folder is made and rows are read."""
        self.device = pick_device(self.config.model.device)
        check_loggers(self.config)
        self.tokenizer = Tokenizer.from_folder(self.config.model.path, self.config.data.chat_template)
        # Without memory for the weights, only the headers of their files are read.
        setup.build_model(self.config, self.tokenizer, torch.device("meta"))
        self._rows = setup.open_data(self.config, self._train_rows, self._eval_rows)

    def _prepare(self) -> Checkpoint | None:
        """Everything as the newest checkpoint, which is returned, left it; nothing in the folder is changed."""
        checkpoint = run_folder.open_checkpoint_to_resume(self.config, self._settings, self._folder)
        self._base = run_folder.base_identity(self.config.model.path)
        if checkpoint:
            run_folder.check_base(checkpoint, self._base)
        train_store, self._eval_store = setup.build_stores(
            self.config, self.tokenizer, *self._rows, self._display.message
        )
        for name, store in (("train", train_store), ("eval", self._eval_store)):
            for line in store.report.lines() if store else ():
                self._display.message(f"{name}: {line}")
        self._build(train_store)
        if checkpoint:
            self._restore(checkpoint)
        return checkpoint

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Open the logs, once nothing can be refused any more."""
        run_folder.write_resolved(self.config, self._folder)
        state = checkpoint.state if checkpoint else {"seconds": 0.0, "wandb_id": None}
        self._clock = Clock(state["seconds"])
        log = RunLog(self.config, after_step=self.step if checkpoint else None, wandb_id=state["wandb_id"])
        self._log = self._opened.enter_context(closing(log))
        self._writer = self._opened.enter_context(
            CheckpointWriter(
                self._folder / "checkpoints",
                World.single(),
                keep=self.config.training.save_total_limit,
                fault=self.fault,
                asynchronous=self.config.training.async_save,
            )
        )
        self._announce(checkpoint)

    def _build(self, store: TokenStore) -> None:
        """Model, optimizer, loader and schedule."""
        training = self.config.training
        self.model, views = setup.build_model(self.config, self.tokenizer, self.device)
        self.optimizer = self._opened.enter_context(closing(AdamW(views, self.config.optim)))
        rows = training.per_device_train_batch_size
        layout = setup.build_layout(self.config, self.model, rows)
        self._eval_layout = setup.build_layout(self.config, self.model, training.per_device_eval_batch_size or rows)
        loader = setup.build_loader(self.config, store, layout, self._learning_rate, self.device)
        self._loader = self._opened.enter_context(closing(loader))
        self.total_steps = setup.count_steps(self.config, self._loader)
        self._schedule = make_schedule(self.config.optim, self.total_steps)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Put everything where the checkpoint left it."""
        run_folder.check_total_steps(checkpoint, self.config, self.total_steps)
        check_names(checkpoint, self.optimizer.shapes())
        self.optimizer.load(checkpoint.tensors(), checkpoint.state["optimizer_steps"])
        self._loader.load_state_dict(checkpoint.state["loader"])
        self._totals = Totals(**checkpoint.state["totals"])
        self.step = self._saved = checkpoint.step
        self._result = existing_result(self.config, checkpoint.path)

    def _announce(self, checkpoint: Checkpoint | None) -> None:
        trained = sum(math.prod(view.shape) for view in self.optimizer.views)
        self._display.message(f"training {trained:,} parameters for {self.total_steps} steps on {self.device}")
        if note := setup.length_note(self.config):
            self._display.message(note)
        if checkpoint:
            self._display.message(f"going on from {checkpoint.path}")
        for callback in self._callbacks:
            callback.on_train_begin(self)

    # ---- steps ----

    def _loop(self) -> None:
        self._evaluate_if_due()
        self._clock.resume()
        while self.step < self.total_steps and not self._ending:
            self._train_step()
            if self._evaluation_due or self._save_due:
                self._pause()
        self._pause()

    def _train_step(self) -> None:
        """Launch a step, then read the metrics of the one before it."""
        self._writer.poll()
        data = self._loader.next_step()
        metrics = train_step(self.model, self.optimizer, data, self._loss_fn)
        self.step += 1
        self._result = None
        launched = None
        if metrics is None:
            self._display.message(f"step {self.step} has no trained token in its rows and was skipped")
        else:
            # A CPU is done now; a GPU when the metrics can be read.
            finished = time.perf_counter() if self.device.type == "cpu" else None
            launched = Pending(self.step, data, PendingMetrics(metrics), finished)
        self._read_metrics()
        self._pending = launched

    def _pause(self) -> None:
        """Catch up with the device, then evaluate and save if due."""
        self._read_metrics()
        self._evaluate_if_due()
        if self._save_due or self._ending:
            self._save()
        self._clock.resume()

    @property
    def _ending(self) -> bool:
        return self._stop or self._signals.received is not None

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
        loss, grad_norm, finite = pending.metrics.read()
        if not finite:
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
            "tokens_per_second": sum(batch.num_tokens for batch in pending.data.micro_batches) / max(seconds, 1e-9),
            "seconds": self._clock.seconds,
            "memory_gib": setup.memory_gib(self.device),
        }
        if pending.step % self.config.logging.logging_steps == 0 or pending.step == self.total_steps:
            self._log.write(line)
            remaining = self._clock.remaining(self.total_steps - pending.step)
            self._display.step(line, self.total_steps, remaining)
        for callback in self._callbacks:
            callback.on_step_end(self, line)

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
        if not self._evaluation_due or self._evaluated == self.step or self._log.evaluated(self.step):
            return
        if self._signals.received:
            return  # the resumed run does it
        if self._eval_store is not None:
            batches = setup.evaluation_batches(self.config, self._eval_store, self._eval_layout, self.device)
            uninterrupted = takewhile(lambda _: not self._signals.received, batches)
            loss = mean_loss(self.model, uninterrupted, self._loss_fn)
            if loss is None or self._signals.received:
                return  # cut short
            self._display.message(f"step {self.step}/{self.total_steps}  eval loss {loss:.4f}")
            if not math.isfinite(loss):
                raise NonFiniteLossError(self._non_finite_evaluation_text(loss))
            self._totals.eval_loss = loss
            line: Metrics = {"step": self.step, "eval_loss": loss}
            self._log.write(line)
            for callback in self._callbacks:
                callback.on_evaluate(self, line)
        if self.config.logging.sample_prompts:
            write_samples(self._folder / "samples.md", self.model, self.tokenizer, self.config.logging, self.step)
        self._log.draw()
        self._evaluated = self.step

    def _save(self) -> None:
        """Publish a checkpoint of this step, whose metrics were read."""
        if self._saved == self.step:
            return
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
        pieces = (Piece.whole(name, tensor) for name, tensor in self.optimizer.tensors())
        path = self._writer.save(self.step, pieces, state)
        self._saved = self.step
        for callback in self._callbacks:
            callback.on_save(self, path)

    # ---- the end ----

    def _finish(self) -> TrainResult:
        self._log.draw()
        self._writer.finish()
        if self._signals.received:
            self._display.message(
                f"stopped by {self._signals.received} after step {self.step} of {self.total_steps}, saved in "
                f"{self._folder}; run the same command again to go on"
            )
            return self._train_result(None)
        result_dir = self._result
        if result_dir is None:
            checkpoint = open_checkpoint(self._folder / "checkpoints" / folder_name(self.step))
            whole, _ = setup.build_model(self.config, self.tokenizer, torch.device("meta"))
            result_dir = write_result(checkpoint, whole, self.tokenizer, self.config, self._folder)
            self._display.message(f"wrote {result_dir}")
        result = self._train_result(result_dir)
        for callback in self._callbacks:
            callback.on_train_end(self, result)
        return result

    def _train_result(self, result_dir: Path | None) -> TrainResult:
        totals = self._totals
        return TrainResult(
            step=self.step,
            finished=self.step == self.total_steps and result_dir is not None,
            train_loss=totals.loss_sum / totals.trained_tokens if totals.trained_tokens else None,
            eval_loss=totals.eval_loss,
            output_dir=self._folder,
            result_dir=result_dir,
            stopped_by=self._signals.received,
        )
