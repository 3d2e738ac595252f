"""Layers that run again on a GPU: the bits of layers that keep everything, with and without graphs; what they keep."""

import gc

import pytest
import torch

from gapless.memory.checkpointing import apply_checkpointing
from gapless.training import setup
from gapless.training.graph import CudaRecorder, GraphStep
from gapless.training.step import PendingMetrics, train_step
from training.steps import assert_same_state, make_training, varied_steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]

SIZES = {"rows": 2, "row_tokens": 192, "row_documents": 24}
LARGE = {"rows": 2, "row_tokens": 2048, "row_documents": 64}
SETTINGS = {
    "lora": ("lora", {"dtype": "bf16"}),
    "lora-fp32": ("lora", {}),
    "lora-qwen3": ("lora", {"dtype": "bf16", "family": "qwen3"}),
    "full": ("full", {"dtype": "bf16"}),
    "full-tied": ("full", {"dtype": "bf16", "tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def _deterministic():
    with setup.determinism(True):
        yield


@pytest.mark.parametrize("sizes", [SIZES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_have_the_same_bits_and_wait_for_nothing(name, sizes):
    kind, settings = SETTINGS[name]
    made = [make_training(kind, device="cuda", **settings) for _ in range(3)]
    for model, _ in made[1:]:
        apply_checkpointing(model.stages[0], "full")
    (plain, plain_optimizer), (full, full_optimizer), (recorded, recorded_optimizer) = made
    layout = plain.stages[0].batch_layout(**sizes)
    graphs = GraphStep(recorded, recorded_optimizer, layout, CudaRecorder(recorded_optimizer.step_count.device))
    for index, step in enumerate(varied_steps(layout, 8, accumulation=2, device="cuda")):
        metrics = [train_step(plain, plain_optimizer, step)]
        torch.cuda.set_sync_debug_mode("error" if index else "default")  # kernels are loaded in the first
        try:
            metrics.append(train_step(full, full_optimizer, step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        metrics.append(graphs(step))
        numbers = [None if each is None else PendingMetrics(each).read() for each in metrics]
        assert numbers[1] == numbers[0], f"step {index}"
        assert numbers[2] == numbers[0], f"step {index} by graphs"
    assert_same_state(full_optimizer, plain_optimizer)
    assert_same_state(recorded_optimizer, plain_optimizer)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_layer_costs_its_input(kind):
    """Peaks of steps over what is there between them, of few layers and of many."""
    settings = {"dtype": "bf16", "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    peaks = []
    for layers in (2, 10):
        model, optimizer = make_training(kind, device="cuda", num_hidden_layers=layers, **settings)
        apply_checkpointing(model.stages[0], "full")
        layout = model.stages[0].batch_layout(**LARGE)
        first, *steps = varied_steps(layout, 4, accumulation=2, device="cuda")
        train_step(model, optimizer, first)  # weights find their room
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in steps:
            train_step(model, optimizer, step)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model, optimizer
    stream = layout.tokens * 512 * 2
    print([round(peak / 2**20) for peak in peaks], "MiB; inputs of the layers between:", 8 * stream // 2**20)
    assert peaks[1] - peaks[0] < 1.5 * 8 * stream + 2**24
