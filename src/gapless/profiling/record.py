"""Runs the first steps of a run under torch's profiler, in a folder of its own.

    before      steps that warm up: kernels compile, the allocator gets its memory
    plain       steps without a profiler, timed
    measured    steps whose kernels, CUDA calls and operations are recorded: busy time, gaps, synchronisations
    traced      steps with Python frames, shapes and memory besides, which slow the host down: lines, limits, memory
    launched    where steps are CUDA graphs, as many launched kernel by kernel, traced as well: a replay has no shapes
                and allocates nothing, so limits and memory come from these

Each recording begins two steps early: in the first the profiler starts up, in the second the host gets ahead of the GPU
again. The loop is the trainer's own, with its loader, batches and lengths; nothing is saved.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gapless.batch import PackedBatch
from gapless.config import LoggingConfig, OptimConfig, RunConfig
from gapless.data.loader import TrainStep
from gapless.inference.load import DTYPES
from gapless.models.decoder import Decoder, DecoderLayer
from gapless.profiling.events import CallLines, Recording, Step, call_lines, read_trace
from gapless.profiling.limits import AttentionWork, Rates, attention_work, measure_rates
from gapless.training import files
from gapless.training.callbacks import Callback, Run, TrainResult
from gapless.training.metrics import Metrics
from gapless.training.step import StepMetrics
from gapless.training.trainer import Trainer

_LEARNING_RATE = 1e-9
"""What a step takes does not depend on it, and with so small a one no step goes wrong."""
_RUN, _MARK = "profiled-run", "made-by-gapless-profile"
"""The run folder in a profile's, which goes again, and the file in it without which none does."""
_LEAD = 2
"""Steps of a recording that are not of it: the profiler's own start, and the first one after."""


@dataclass
class Recorded:
    """What was recorded of a run."""

    rank: int
    device: str
    """As in "NVIDIA H200" or "cpu"."""
    first_step: int
    """Of the run: the first one of `measured`."""
    plain: list[float]
    """Seconds of steps without a profiler."""
    measured: Recording
    traced: Recording
    rates: Rates | None
    """None on a CPU."""
    attention: AttentionWork | None
    """Of the steps of `by_kernel`; None for a rank without layers."""
    update_bytes: int
    """Of an update of the optimizer."""
    micro_batches: tuple[int, ...]
    """How many run in each of the `measured` steps."""
    tokens: int
    """T of a micro-batch."""
    launched: Recording | None = None
    """None where no step is CUDA graphs."""
    graphs: int = 0
    """CUDA graphs that were recorded during the measured steps, which takes time."""
    traces: dict[str, Path] = field(default_factory=dict)
    """The exported traces by the name of their recording."""

    @property
    def by_kernel(self) -> Recording:
        """The traced steps whose kernels were launched one by one, by operations whose shapes are known."""
        return self.launched or self.traced


def record(config: RunConfig, folder: Path, *, steps: int, before: int) -> Recorded:
    """Record some steps of a run.

    Args:
        config: the run.
        folder: for traces and tokenised rows; what the trainer writes besides is removed again.
        steps: to record, and to time without a profiler.
        before: steps to warm up.

    Raises:
        ValueError: steps or before is less than 1, or the run is refused (see `Trainer`).
        SystemExit: a signal stopped the run.
    """
    for name, value in (("steps", steps), ("before", before)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, steps=steps, before=before)
    run = _Steps(profiled(config, folder, recorder.most + 1), callbacks=[recorder])
    run.launching = recorder.see
    try:
        result = run.train()
    finally:
        recorder.close()
        if run.opened and run.rank == 0:
            shutil.rmtree(folder / _RUN, ignore_errors=True)
    if recorder.recorded is None and result.stopped_by is None:
        raise ValueError(
            f"{recorder.called} steps of {result.step} had something to train, and {recorder.most} are needed; take "
            "rows with more trained tokens, or larger batches"
        )
    if recorder.recorded is None:
        print("stopped before its steps were recorded", file=sys.stderr)
        raise SystemExit(result.exit_code)
    if recorder.recorded.rates is not None and not recorder.recorded.measured.activities:
        raise ValueError(
            "the profiler recorded nothing of the GPU: torch could not use CUPTI (its messages are above); end another "
            "profiler on this GPU, or give the container the permission"
        )
    return recorder.recorded


def profiled(config: RunConfig, folder: Path, steps: int) -> RunConfig:
    """The run as it is profiled: in another folder, without evaluation, checkpoints, wandb and a schedule."""
    loggers = tuple(name for name in config.logging.report_to if name != "wandb")
    rates, lengths = OptimConfig(), LoggingConfig()
    return replace(
        config,
        data=replace(config.data, eval=(), cache_dir=config.data.cache_dir or str(folder / "tokens")),
        optim=replace(
            config.optim,
            learning_rate=_LEARNING_RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            warmup_ratio=0.0,
            min_lr_ratio=rates.min_lr_ratio,
            decay_ratio=rates.decay_ratio,
        ),
        training=replace(
            config.training,
            output_dir=str(folder / _RUN),
            max_steps=steps,
            save_steps=None,
            eval_steps=None,
            per_device_eval_batch_size=None,
        ),
        logging=replace(config.logging, report_to=loggers, sample_prompts=(), sample_tokens=lengths.sample_tokens),
    )


class _Steps(Trainer):
    """A run of which nothing is kept."""

    launching: Callable[[Sequence[PackedBatch]], None]
    """Called with the micro-batches of each step that run."""
    opened = False
    """Whether the run folder is this run's."""

    def _open_folder(self) -> None:
        """Open the run folder, and let go of an earlier profile's files beside it, which may be of more ranks."""
        folder = Path(self.config.training.output_dir)
        self._world.first("profile", lambda: _take(folder))
        super()._open_folder()
        self.opened = True
        if self.rank == 0:
            for pattern in ("report-rank*.json", "timeline-rank*.html", "trace-*-rank*.json.gz"):
                for path in folder.parent.glob(pattern):
                    path.unlink()

    @property
    def graphs(self) -> int | None:
        """CUDA graphs recorded so far; None where steps are launched kernel by kernel."""
        return None if self._graphs is None else self._graphs.recorded

    def launch_kernels(self) -> None:
        """Replay no step any more."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None

    def _launch(self, data: TrainStep, *, stop: bool) -> StepMetrics | None:
        together = self._parallel.together
        self.launching([batch for batch in data.micro_batches if data.num_trained and (batch.num_trained or together)])
        return super()._launch(data, stop=stop)

    def _save(self) -> None:
        """No checkpoint."""

    def _finish(self) -> TrainResult:
        """No result."""
        return self._train_result(None)


def _take(folder: Path) -> None:
    """Make a run folder that is a profile's."""
    if folder.exists() and not (folder / _MARK).exists():
        raise ValueError(f"{folder} is not of a profile, and would be removed; choose another --output")
    with files.writing(folder):
        folder.mkdir(exist_ok=True)
        (folder / _MARK).touch()


class Recorder(Callback):
    """Switches the profiler on and off between steps.

    `on_step_end` is called once a step, always at the same place of the loop: steps are from one call to the next.
    """

    def __init__(self, folder: Path, *, steps: int, before: int) -> None:
        """See `record`."""
        self._folder, self._steps, self._before = folder, steps, before
        self.called = self._first_step = 0
        self._names = ["measured", "traced", "launched"]
        self._graphs: list[int] = []
        self._ends: list[float] = []
        self._profiler: profile | None = None
        self._recordings: dict[str, Recording] = {}
        self._traces: dict[str, Path] = {}
        self._batches: list[tuple[int, int, tuple[int, ...]]] = []
        self._rates: Rates | None = None
        self.recorded: Recorded | None = None

    @property
    def most(self) -> int:
        """Steps of which the metrics must be read; without CUDA graphs there is a recording less."""
        return self._before + self._steps + len(self._names) * (self._steps + _LEAD)

    def on_train_begin(self, trainer: Run) -> None:
        """Measure the machine."""
        assert isinstance(trainer, _Steps)
        if trainer.graphs is None:
            self._names.remove("launched")
        if trainer.device.type == "cuda":
            self._rates = measure_rates(trainer.device, DTYPES[trainer.config.model.dtype])

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        """A step is launched, the one before it is done."""
        if self.recorded is not None:
            return  # many ranks stop some steps after one of them asks for it
        self.called += 1
        self._ends.append(time.perf_counter())
        if self._profiler is not None:
            self._profiler.step()
        assert isinstance(trainer, _Steps)
        since = self.called - self._before - self._steps
        if since == 0:
            self._first_step = int(metrics["step"]) + _LEAD + 2  # two more are launched by then
        if since in (_LEAD, _LEAD + self._steps):
            self._graphs.append(trainer.graphs or 0)
        if self.called == self.most:
            self._stop()
            self.recorded = self._collect(trainer)
            trainer.stop()
        elif since >= 0 and since % (self._steps + _LEAD) == 0:
            self._start(trainer, self._names[since // (self._steps + _LEAD)])

    def _start(self, trainer: _Steps, name: str) -> None:
        """Begin a recording, after the end of another if there is one."""
        self._stop()
        if name == "launched":
            trainer.launch_kernels()
        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        traced = name != "measured"
        path = self._folder / f"trace-{name}-rank{trainer.rank}.json.gz"
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self._steps + 1, repeat=1),
            on_trace_ready=lambda finished: self._keep(name, path, finished),
            record_shapes=traced,
            with_stack=traced,
            profile_memory=traced,
        )
        self._profiler.start()

    def close(self) -> None:
        """Give up a recording that is under way."""
        if self._profiler is not None:
            self._profiler.on_trace_ready = None
            self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _keep(self, name: str, path: Path, finished: profile) -> None:
        """Export the trace and read what is in it."""
        finished.export_chrome_trace(str(path))
        lines: CallLines = {}
        if name != "measured":
            assert finished.profiler is not None
            assert finished.profiler.kineto_results is not None
            lines = call_lines(finished.profiler.kineto_results.experimental_event_tree())
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            recording = read_trace(json.load(file), lines)
        self._traces[name] = path
        self._recordings[name] = without_lead(recording)

    def see(self, batches: Sequence[PackedBatch]) -> None:
        """Note the documents of a step's micro-batches, and when they came, on the clock of the steps."""
        self._batches += [(self.called, batch.segments.tokens, batch.segments.lengths) for batch in batches]

    def _collect(self, trainer: _Steps) -> Recorded:
        first = self.most - self._steps
        measured = self._before + self._steps + _LEAD
        called = [number for number, _, _ in self._batches]
        batches = [lengths for called, _, lengths in self._batches if first <= called < self.most]
        cuda = trainer.device.type == "cuda"
        ends = self._ends[self._before - 1 : self._before + self._steps]
        return Recorded(
            rank=trainer.rank,
            device=torch.cuda.get_device_name(trainer.device) if cuda else trainer.device.type,
            first_step=self._first_step,
            plain=[later - earlier for earlier, later in zip(ends, ends[1:], strict=False)],
            measured=self._recordings["measured"],
            traced=self._recordings["traced"],
            launched=self._recordings.get("launched"),
            graphs=self._graphs[1] - self._graphs[0],
            rates=self._rates,
            attention=_attention(trainer.model, batches),
            update_bytes=trainer.optimizer.update_bytes(),
            micro_batches=tuple(called.count(number) for number in range(measured, measured + self._steps)),
            tokens=self._batches[-1][1] if self._batches else 0,
            traces=self._traces,
        )


def _attention(model: Decoder, batches: Sequence[Sequence[int]]) -> AttentionWork | None:
    """The work of the layers and heads that this rank has."""
    layers = [layer.attention for layer in model.layers.values() if isinstance(layer, DecoderLayer)]
    if not layers or not batches:
        return None
    heads = layers[0].qkv.leading[0] * layers[0].groups
    windows = [layer.window for layer in layers]
    return attention_work(batches, windows, heads, model.config.head_dim, model.config.head_dim)


def without_lead(recording: Recording) -> Recording:
    """The recording without its first step; steps are counted from 1."""
    kept: Sequence[Step] = recording.steps[1:]
    if not kept:
        raise ValueError("the profiler recorded no whole step; record more of them")
    return replace(
        recording,
        steps=tuple(Step(step.name, step.start, step.end, number) for number, step in enumerate(kept, start=1)),
    )
