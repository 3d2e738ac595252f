"""Steps of ours in this process: a model of random weights, its optimizer, and rows through our loader."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cases.finetune_plan import R, write_tokenizer
from gapless.adapters.lora import LoraLinear, adapter_views, apply_lora, lora_layers, unchanged
from gapless.batch import BatchLayout
from gapless.config import AdapterConfig, DataConfig, OptimConfig, ParallelConfig
from gapless.data.loader import Loader, TrainStep
from gapless.data.store import TokenStore, tokenize
from gapless.data.tokenizer import Tokenizer
from gapless.models.decoder import Decoder
from gapless.models.families import decoder_config
from gapless.parallel.mesh import Mesh
from gapless.parallel.model import ParallelModel
from gapless.training.optim import AdamW
from gapless.training.step import train_step

LEARNING_RATE = 1e-4


@dataclass
class Training:
    """LoRA on all linear layers of a model."""

    decoder: Decoder
    model: ParallelModel
    optimizer: AdamW
    adapted: list[LoraLinear]
    device: torch.device

    @classmethod
    def of(cls, shape: Mapping[str, Any], device: str, dtype: torch.dtype = torch.bfloat16) -> Training:
        """A model of random weights; adapters that add something, so that they have gradients both."""
        torch.manual_seed(0)
        decoder = Decoder(decoder_config(dict(shape), None), dtype=dtype, device=device).train()
        apply_lora(decoder, AdapterConfig(r=R, lora_alpha=float(R)), seed=0)
        views = list(adapter_views(decoder))
        with torch.no_grad():
            for view in views:
                if "lora_B" in view.name:
                    view.write(view.parameter, 0.01 * torch.randn(view.shape, device=device))
        optimizer = AdamW(views, OptimConfig(max_grad_norm=0.0), device)
        model = ParallelModel([decoder], Mesh.single(), ParallelConfig())
        return cls(decoder, model, optimizer, list(lora_layers(decoder)), torch.device(device))

    def step(self, data: TrainStep) -> torch.Tensor:
        """A step as the trainer makes it; its loss, 0-d, on the device."""
        with unchanged(*self.adapted):
            metrics = train_step(self.model, self.optimizer, data)
        assert metrics is not None
        return metrics.loss

    def loader(self, store: TokenStore, layout: BatchLayout, **settings: Any) -> closing[Loader]:
        """Steps of packed rows, in the order of the documents."""
        return closing(
            Loader(
                store,
                layout,
                seed=0,
                shuffle=False,
                learning_rate=lambda _: LEARNING_RATE,
                device=self.device,
                **settings,
            )
        )


def random_store(lengths: Sequence[int] | np.ndarray, vocabulary: int) -> TokenStore:
    """Documents of random tokens, through our tokeniser; all of them are trained."""
    random = np.random.default_rng(1)
    rows = [{"text": " ".join(map(str, random.integers(1, vocabulary, int(n) - 1).tolist()))} for n in lengths]
    folder = Path(tempfile.mkdtemp())
    try:
        write_tokenizer(folder, vocabulary)
        config = DataConfig(train=(), train_on="all", max_length=int(max(lengths)))
        return tokenize(rows, Tokenizer.from_folder(folder), config)
    finally:
        shutil.rmtree(folder)
