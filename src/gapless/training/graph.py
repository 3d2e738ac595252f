"""A training step as CUDA graphs: what the host launches for a step are a few replays.

One graph opens a step (low-precision copies of the adapters, the share of the loss cleared), one ends it (norm, clip,
update, metrics), and one for each bucket of trained tokens and of documents is a micro-batch's forward and backward
(two, where attention may cut such batches in two ways). All are of one pool of memory. They read batches from one
buffer, into which each micro-batch is copied on the device before its graph is replayed; whatever changes from step to
step is in it, on the device: N, learning rate, step, seed.

A part of a step is run as it is when it is first needed, launched for any batch (`as_captured`), and recorded right
after: this run is the step's own, so there is no warm-up whose traces were to be removed. It takes the graphs' memory,
so that a step needs no more than a plain one. A graph adds gradients in place into the optimizer's buffers, as autograd
does in every step. The numbers are those of `train_step`, bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from gapless.adapters.lora import copied, lora_layers
from gapless.batch import BatchLayout, PackedBatch, StepScalars
from gapless.data.loader import TrainStep
from gapless.kernels.attention import attention_tiles
from gapless.kernels.runtime import as_captured, runs_kernels
from gapless.models.config import DecoderConfig
from gapless.parallel.model import ParallelModel, add_micro_batch
from gapless.training.optim import AdamW
from gapless.training.step import StepMetrics, end_step, own_tokens

Work = Callable[..., None]


class GraphRecorder(Protocol):
    """Records work on the device."""

    def run(self, work: Work, *args: Any) -> None:
        """Call work(*args), in the memory of what is recorded; what it leaves behind is in that memory, too."""
        ...

    def record(self, work: Work, *args: Any) -> Work:
        """Record what work(*args) does on the device, and do nothing there.

        Returns:
            What does it, called with arguments like these. It reads and writes the memory that was there when it was
            recorded.
        """
        ...

    def forget(self) -> None:
        """What was recorded is not called any more."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory; they are replayed on one stream, one at a time."""

    def __init__(self, device: torch.device) -> None:
        """For a GPU."""
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: torch.cuda.MemPool | None = None
        # Ordinary streams are handed out in turn, the same one to many. This one nobody else may get: what another
        # thread put on it (a batch's copy) would be captured.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def forget(self) -> None:
        """See `GraphRecorder`. The memory goes too."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None

    def run(self, work: Work, *args: Any) -> None:
        """See `GraphRecorder`. On the stream of captures: memory that was another stream's is not theirs."""
        torch.cuda.empty_cache()  # the pool cannot have it where memory becomes short
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with (
            torch.cuda.stream(self._stream),
            torch.cuda.use_mem_pool(self._memory(), self._device),
            # A pool takes what one thread allocates: this one shall go backward, too.
            torch.autograd.set_multithreading_enabled(False),
        ):
            work(*args)
        current.wait_stream(self._stream)

    def record(self, work: Work, *args: Any) -> Work:
        """See `GraphRecorder`."""
        # What is dead but not yet collected must not be freed, nor a node of autograd be found again, in the capture.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._memory().id
        try:
            with (
                torch.cuda.device(self._device),
                # A capture that has failed leaves its own stream the current one; this goes back to what was.
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                # Of this thread: others go on to pin memory and to copy batches.
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
                torch.autograd.set_multithreading_enabled(False),
            ):
                work(*args)
        except RuntimeError as error:
            error.add_note("while a training step was captured; with training.cuda_graphs = false none is")
            raise
        self._graphs.append(graph)

        def replay(*_: Any) -> None:
            graph.replay()

        return replay

    def _memory(self) -> torch.cuda.MemPool:
        if self._pool is None:
            with torch.cuda.device(self._device):
                self._pool = torch.cuda.MemPool()
        return self._pool


class GraphStep:
    """`train_step` for a model on one device, recorded piece by piece as steps need them.

    When parameters or buffers have other memory than when they were recorded, or need a gradient or not, or a module
    trains or does not, drops out more or is another one, all is recorded anew. While a module or parameter has hooks
    nothing is recorded or replayed: hooks run on the host.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: AdamW,
        layout: BatchLayout,
        recorder: GraphRecorder,
        *,
        counts: Callable[[nn.Parameter], bool] = lambda _: True,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take over a model of which `obstacle` says nothing; nothing is recorded yet.

        Args:
            model: its trained parameters are the optimizer's.
            optimizer: holds the gradients.
            layout: of all micro-batches.
            recorder: of the device.
            counts: see `train_step`.
            show: hears of hooks.
        """
        (self._decoder,) = model.stages
        self._model, self._optimizer, self._recorder, self._counts = model, optimizer, recorder, counts
        self._list_modules()
        device = optimizer.step_count.device
        self._buffer = torch.zeros(layout.buffer_size, dtype=torch.int32, device=device)
        self._scalars: StepScalars | None = None
        self._share, self._tokens, self._stops = (torch.zeros((), device=device) for _ in range(3))
        self._values = torch.zeros(5, device=device)
        self._replays: dict[str | tuple[int, ...], Work] = {}
        self._recorded_for: tuple[Any, ...] | None = None
        self._show, self._shown = show, False
        self.recorded = 0
        """Pieces so far, those of before `close` too."""

    def __call__(self, data: TrainStep, *, stop: bool = False) -> StepMetrics | None:
        """See `train_step`."""
        if data.num_trained == 0:
            return None
        self._optimizer.bind_gradients()  # a callback or a script may have called zero_grad
        if self._recorded_for != self._facts():
            self.close()
            self._list_modules()
        if self._run("begin", self._begin):
            for layer in self._adapted:
                layer.replayed()
        else:
            # Not before: the first copies of the adapters move the weights.
            self._recorded_for = self._facts()
        for batch in data.micro_batches:
            if batch.num_trained:
                self._buffer[: len(batch.buffer)].copy_(batch.buffer)
                choices = self._decoder.shared_tiles(batch.segments)
                self._run((len(batch.trained), batch.room, *choices), self._micro_batch, batch)
        # Numbers of the host, by a fill, which does not wait.
        self._tokens.fill_(own_tokens(self._model, data))
        self._stops.fill_(stop)
        if self._run("end", self._end):
            self._optimizer.replayed()
        return StepMetrics(self._values.clone())

    def close(self) -> None:
        """Let go of all that was recorded, and its memory."""
        if self._replays:
            self._recorder.forget()
            self._replays.clear()

    def _run(self, name: str | tuple[int, ...], work: Work, *args: Any) -> bool:
        """Do a part of a step; whether it was a replay, of which the host knows nothing."""
        replay = self._replays.get(name)
        if replay is not None:
            replay(*args)
            return True
        if self._hooked(self._tensors()):
            self._plainly(work, *args)
            return False
        with as_captured():
            # What the others leave behind is for good: weights with room for adapters, tables of the optimizer.
            if work == self._micro_batch:
                self._recorder.run(work, *args)
            else:
                work(*args)
            self._replays[name] = self._recorder.record(work, *args)
            self.recorded += 1
        return False

    def _plainly(self, work: Work, *args: Any) -> None:
        work(*args)
        if not self._shown:
            self._shown = True
            self._show("note: modules have hooks, which run on the host, so training steps are not CUDA graphs")

    # ---- the parts ----

    def _begin(self) -> None:
        self._share.zero_()
        for layer in self._adapted:
            layer.copy_adapters()

    def _micro_batch(self, batch: PackedBatch) -> None:
        """Of `batch` only what the host knows is read: its tensors are those in the buffer."""
        here = batch.in_buffer(self._buffer)
        self._scalars = here.scalars
        with copied(self._adapted):
            add_micro_batch(self._decoder, here, self._share)

    def _end(self) -> None:
        assert self._scalars is not None, "a step with trained tokens has a micro-batch with some"
        rate = self._scalars.learning_rate
        numbers = (self._share, self._tokens, self._stops)
        metrics = end_step(self._model, self._optimizer, *numbers, rate, self._counts)
        self._values.copy_(metrics.values)

    # ---- what must be as it was ----

    def _list_modules(self) -> None:
        self._modules = list(self._decoder.modules())
        self._adapted = list(lora_layers(self._decoder))

    def _facts(self) -> tuple[Any, ...]:
        # All modules there were are held, so that another one is known by its place in memory.
        tensors = self._tensors()
        return (
            [id(child) for module in self._modules for child in module._modules.values()],
            [tensor.data_ptr() for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
            [module.training for module in self._modules],
            [(layer.scale, layer.dropout) for layer in self._adapted],
            self._hooked(tensors),
        )

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, as they are now."""
        tables = (table for module in self._modules for table in (module._parameters, module._buffers))
        return [tensor for table in tables for tensor in table.values() if tensor is not None]

    def _hooked(self, tensors: Iterable[torch.Tensor]) -> bool:
        return (
            bool(_has_any_global_hook())
            or any(map(_has_hooks, self._modules))
            or any(tensor._backward_hooks for tensor in tensors)
            or self._optimizer.hooked()
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether a forward or a backward of a module calls hooks, which are the host's."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def obstacle(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    sizes: dict[str, int],
    *,
    own_loss: bool,
) -> str | None:
    """Why a training step cannot be CUDA graphs, or None.

    Args:
        config: of the model.
        dtype: of its weights and activations.
        device: of the run.
        sizes: the ranks along each axis of the mesh.
        own_loss: whether the loss is a function of the user's.
    """
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, and the device is {device.type}"
    for axis, reason in _CUT.items():
        if sizes[axis] > 1:
            return f"{reason.format(sizes[axis])}; one GPU alone has them so far"
    if own_loss:
        return "loss_fn is given the trained tokens alone, whose number changes from batch to batch"
    if not runs_kernels(device):
        return "the kernels do not run on this GPU, and plain PyTorch attention goes by the documents of each batch"
    if torch.cuda.is_available() and (allocator := torch.cuda.get_allocator_backend()) != "native":
        return f"their memory is a pool of PyTorch's own allocator, and PYTORCH_CUDA_ALLOC_CONF chooses {allocator}"
    dims = (config.head_dim, config.head_dim)
    if not attention_tiles(*dims, config.windows, dtype, device):
        return f"attention with {config.head_dim} features in {dtype} is plain PyTorch, which goes by each batch"
    return None


_CUT = {
    "pipeline": "{} pipeline stages hand over micro-batches as the host schedules them",
    "tensor": "{} tensor-parallel ranks communicate inside of layers",
    "shard": "{} ranks gather shards by hooks that run on the host",
    "replicate": "{} replicas reduce their gradients while the backward runs",
}
"""Axes of the mesh, and what ranks along them do."""
