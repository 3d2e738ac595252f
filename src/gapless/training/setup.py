"""What a run is made of, built from its configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gapless.adapters.lora import adapter_views, apply_lora
from gapless.batch import BatchLayout, PackedBatch
from gapless.config import RunConfig
from gapless.data.loader import Loader, eval_batches
from gapless.data.sources import open_rows
from gapless.data.store import TokenStore, tokenize
from gapless.data.tokenizer import Tokenizer
from gapless.inference.load import DTYPES, find_model
from gapless.models.decoder import Decoder
from gapless.models.weights import TensorView, hf_views, load_weights


def build_model(config: RunConfig, tokenizer: Tokenizer, device: torch.device) -> tuple[Decoder, list[TensorView]]:
    """The decoder with its adapters, and every tensor that is trained under its on-disk name.

    Raises:
        ValueError: the folder's model and tokenizer do not belong together, or what `load_weights` refuses.
    """
    model = load_weights(
        config.model.path, dtype=DTYPES[config.model.dtype], device=device, max_length=config.data.max_length
    )
    if tokenizer.vocab_size > model.config.vocab:
        raise ValueError(
            f"{config.model.path}: the tokenizer has {tokenizer.vocab_size} tokens, the model embeds "
            f"{model.config.vocab}; take the tokenizer that came with the weights, or resize the embedding first"
        )
    model.train()
    if config.adapter.type == "none":
        return model, list(hf_views(model))
    apply_lora(model, config.adapter, seed=config.training.seed)
    return model, list(adapter_views(model))


def length_note(config: RunConfig) -> str | None:
    """What to say where rows are longer than the model is made for."""
    made_for = find_model(config.model.path).made_for()
    if made_for is None or config.data.max_length <= made_for:
        return None
    return (
        f"note: max_length {config.data.max_length} exceeds the {made_for} tokens the model is made for "
        "(max_position_embeddings); documents beyond that may train it badly"
    )


def build_stores(config: RunConfig, tokenizer: Tokenizer) -> tuple[TokenStore, TokenStore | None]:
    """The tokenised rows to train on and to evaluate on."""
    cache = Path(config.data.cache_dir or Path(config.training.output_dir, "tokens"))
    train = tokenize(open_rows(config.data.train), tokenizer, config.data, cache_dir=cache)
    if not config.data.eval:
        return train, None
    return train, tokenize(open_rows(config.data.eval), tokenizer, config.data, cache_dir=cache)


def build_layout(config: RunConfig, model: Decoder, rows: int) -> BatchLayout:
    """The sizes of micro-batches of `rows` packed rows."""
    documents = config.data.max_documents or max(8, config.data.max_length // 16)
    return model.batch_layout(
        rows=rows, row_tokens=config.data.max_length, row_documents=documents if config.data.packing else 1
    )


def evaluation_batches(
    config: RunConfig, store: TokenStore, layout: BatchLayout, device: torch.device
) -> Iterator[PackedBatch]:
    """All evaluation rows in a fixed order."""
    data = config.data
    return eval_batches(store, layout, packing=data.packing, packing_window=data.packing_window, device=device)


def build_loader(
    config: RunConfig,
    store: TokenStore,
    layout: BatchLayout,
    learning_rate: Callable[[int], float],
    device: torch.device,
) -> Loader:
    """The loader of training steps."""
    return Loader(
        store,
        layout,
        seed=config.training.seed,
        gradient_accumulation_steps=config.training.gradient_accumulation_steps,
        shuffle=config.data.shuffle,
        packing=config.data.packing,
        packing_window=config.data.packing_window,
        learning_rate=learning_rate,
        device=device,
    )


def count_steps(config: RunConfig, loader: Loader) -> int:
    """Optimizer steps of the run; a part of an epoch counts its steps rounded up."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    share, whole = math.modf(config.training.num_train_epochs)
    steps = sum(loader.steps_per_epoch(epoch) for epoch in range(int(whole)))
    return steps + (math.ceil(share * loader.steps_per_epoch(int(whole))) if share else 0)


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
