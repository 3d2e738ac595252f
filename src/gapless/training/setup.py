"""What a run is made of, built from its configuration."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gapless import parallel
from gapless.adapters.lora import adapter_views, apply_lora, reset_adapters
from gapless.batch import BatchLayout, PackedBatch
from gapless.config import RunConfig
from gapless.data.loader import Loader, eval_batches
from gapless.data.sources import Rows, open_rows
from gapless.data.store import TokenStore, tokenize
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import DTYPES, find_model
from gapless.models.decoder import Decoder
from gapless.models.views import TensorView, hf_views
from gapless.models.weights import StoredWeights, meta_decoder
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.parallel.world import World

RowSequence = Sequence[Mapping[str, Any]]
"""Rows in memory: a list of dicts, or what is used like one."""


def describe_model(config: RunConfig, tokenizer: Tokenizer) -> Decoder:
    """The decoder with its adapters, without memory; of the weights' files only the headers are read, and checked.

    Raises:
        ValueError: the folder's model and tokenizer do not belong together, or what `load_weights` refuses.
    """
    path, dtype = config.model.path, DTYPES[config.model.dtype]
    model = meta_decoder(path, dtype=dtype, max_length=config.data.max_length)
    StoredWeights(path).check(model)
    if tokenizer.vocab_size > model.config.vocab:
        raise ValueError(
            f"{config.model.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model embeds "
            f"{model.config.vocab}; take the tokenizer that came with the weights, or resize the embedding first"
        )
    model.train()
    if config.adapter.type == "lora":
        apply_lora(model, config.adapter, seed=config.training.seed)
    return model


def build_model(config: RunConfig, described: Decoder, mesh: Mesh, device: torch.device, world: World) -> ParallelModel:
    """This rank's part of a model that `describe_model` gave, its weights read and new adapters drawn."""
    stored = StoredWeights(config.model.path)

    def fill(stage: Decoder, parameters: Iterable[torch.nn.Parameter]) -> None:
        wanted = {id(parameter) for parameter in parameters}
        stored.fill(view for view in hf_views(stage) if id(view.parameter) in wanted)
        reset_adapters(stage, config.training.seed)

    return parallel.apply(described, config, mesh, fill, device=device, meet=lambda: world.meet("weights are read"))


def trained_views(config: RunConfig, *stages: Decoder) -> list[TensorView]:
    """What is here of every tensor that is trained, under its on-disk name."""
    views = hf_views if config.adapter.type == "none" else adapter_views
    return [view for stage in stages for view in views(stage)]


def length_note(config: RunConfig) -> str | None:
    """What to say where rows are longer than the model is made for."""
    made_for = find_model(config.model.path).made_for()
    if made_for is None or config.data.max_length <= made_for:
        return None
    return (
        f"note: max_length {config.data.max_length} exceeds the {made_for} tokens the model is made for "
        "(max_position_embeddings); documents beyond that may train it badly"
    )


def check_sequence(name: str, rows: RowSequence | None) -> RowSequence | None:
    """The rows of a script.

    Raises:
        ValueError: they are no sequence of dicts; `name` says which.
    """
    if rows is None:
        return None
    try:
        if not len(rows):
            raise ValueError(f"{name} has no rows")
        first = rows[0]
    except (TypeError, KeyError):
        first = None
    if not isinstance(first, Mapping):
        raise ValueError(f"{name} must be a sequence of dicts, such as a list of them, not {type(rows).__name__}")
    return rows


def open_data(
    config: RunConfig, train_rows: RowSequence | None, eval_rows: RowSequence | None
) -> tuple[Rows, Rows | None]:
    """The rows to train on and those to evaluate on, from the files of the configuration or from a script.

    Raises:
        ValueError: a file is missing, empty or of an unknown kind.
    """
    evaluation = eval_rows if eval_rows is not None else config.data.eval
    train = open_rows(train_rows if train_rows is not None else config.data.train)
    return train, open_rows(evaluation) if len(evaluation) else None


def build_stores(
    config: RunConfig,
    tokenizer: Tokenizer,
    rows: tuple[Rows, Rows | None],
    show: Callable[[str], None],
    world: World,
) -> tuple[TokenStore, TokenStore | None]:
    """The tokenised rows to train on and to evaluate on; `show` hears of the progress.

    One rank tokenises into the spool; the others wait for it outside of any collective, and open what it has written.
    """
    cache = Path(config.data.cache_dir or Path(config.training.output_dir, "tokens"))

    def build(source: Rows) -> TokenStore:
        made: list[TokenStore] = []

        def make() -> None:
            if not made:
                made.append(tokenize(source, tokenizer, config.data, cache_dir=cache, progress=row_progress(show)))

        world.first("tokenise", make)
        # Where nodes do not share the cache, one rank of each other node does it again.
        world.first("tokenise on this node", make, per_node=True)
        make()
        return made[0]

    train, evaluation = rows
    return build(train), None if evaluation is None else build(evaluation)


def row_progress(show: Callable[[str], None], seconds: float = 10.0) -> Callable[[int, int], None]:
    """For `tokenize`: tells `show` every so many seconds how far it is."""
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= seconds:
            told = time.monotonic()
            show(f"tokenised {done:,} of {total:,} rows")

    return progress


def build_layout(config: RunConfig, model: Decoder, rows: int) -> BatchLayout:
    """The sizes of micro-batches of `rows` packed rows."""
    documents = config.data.max_documents or max(8, config.data.max_length // 16)
    return model.batch_layout(
        rows=rows, row_tokens=config.data.max_length, row_documents=documents if config.data.packing else 1
    )


def evaluation_batches(
    config: RunConfig, store: TokenStore, layout: BatchLayout, mesh: Mesh, device: torch.device
) -> Iterator[PackedBatch]:
    """All evaluation rows in a fixed order, this rank's."""
    return eval_batches(
        store,
        layout,
        packing=config.data.packing,
        packing_window=config.data.packing_window,
        rank=mesh.data_rank,
        world_size=mesh.data_size,
        device=device,
    )


def build_loader(
    config: RunConfig,
    store: TokenStore,
    layout: BatchLayout,
    learning_rate: Callable[[int], float],
    mesh: Mesh,
    device: torch.device,
) -> Loader:
    """The loader of this rank's training steps."""
    return Loader(
        store,
        layout,
        seed=config.training.seed,
        gradient_accumulation_steps=config.training.gradient_accumulation_steps,
        shuffle=config.data.shuffle,
        packing=config.data.packing,
        packing_window=config.data.packing_window,
        learning_rate=learning_rate,
        rank=mesh.data_rank,
        world_size=mesh.data_size,
        device=device,
    )


def count_steps(config: RunConfig, loader: Loader) -> int:
    """Optimizer steps of the run; a part of an epoch counts its steps rounded up."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    share, whole = math.modf(config.training.num_train_epochs)
    steps = sum(loader.steps_per_epoch(epoch) for epoch in range(int(whole)))
    return steps + (math.ceil(share * loader.steps_per_epoch(int(whole))) if share else 0)


def check_rows(loader: Loader, mesh: Mesh) -> None:
    """Refuse more data-parallel ranks than there are rows for.

    Raises:
        ValueError: with both numbers.
    """
    rows = loader.rows_per_epoch(0)
    if rows < mesh.data_size:
        raise ValueError(
            f"the training rows fill {rows} packed row{'s' if rows > 1 else ''}, fewer than the {mesh.data_size} "
            "data-parallel ranks (dp_replicate_size x dp_shard_size); start fewer processes, or lower data.max_length"
        )


@contextmanager
def determinism(enabled: bool) -> Generator[None]:
    """Have torch use deterministic algorithms while entered, or complain where an operation has none."""
    # Not use_deterministic_algorithms, which does the same and imports torch's compiler for two seconds.
    before = torch.get_deterministic_debug_mode()
    memory = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory  # pyrefly: ignore
    if enabled:
        # What cuBLAS needs for the same bits every time; it reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")
        memory.fill_uninitialized_memory = False  # pyrefly: ignore
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        memory.fill_uninitialized_memory = fill  # pyrefly: ignore


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the GPU's allocator, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
