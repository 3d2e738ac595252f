"""The numbers of a training are the same in every layout: gradients after a step, losses, norms, weights, evaluation.

Each layout trains with all weights and with adapters, tied and untied embeddings, packed rows, dropout, a clip that
bites and uneven masks; the second of the three steps ends an epoch whose rows do not fill it.
"""

import dataclasses
import time

import pytest
import torch
from layouts import assert_same_numbers, layout_config, train_alone, train_layout
from pool import run
from runs import write_inputs

from gapless.config import MemoryConfig
from gapless.models.decoder import DecoderLayer
from gapless.models.weights import StoredWeights
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE

STEP_ROWS = 8
KINDS = ("full", "lora")
TIED = (False, True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder for each kind of embedding, with 13 rows of training data once packed."""
    folders = {}
    for tied in TIED:
        folders[tied] = write_inputs(tmp_path_factory.mktemp(f"tied-{tied}"), rows=27)
        write_tiny_model(folders[tied] / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=4, tie_word_embeddings=tied)
    return folders


def config_of(inputs, kind, tied, data_ranks, accumulation=2, **layout):
    rows = STEP_ROWS // accumulation // data_ranks
    return layout_config(
        inputs[tied],
        kind,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        eval=(str(inputs[tied] / "eval.jsonl"),),
        per_device_eval_batch_size=2,
        **layout,
    )


@pytest.fixture(scope="module")
def alone(inputs):
    """What one process computes with all rows of a step in one batch, by (kind, tied)."""
    results = {(kind, tied): train_alone(config_of(inputs, kind, tied, 1, 1)) for kind in KINDS for tied in TIED}
    assert all(result["rows"] == [13, 13] for result in results.values()), "the second step shall be ragged"
    return results


def train_all(rank, world, configs):
    return [train_layout(rank, world, config) for config in configs]


LAYOUTS = {
    "ddp 2": (2, {}),
    "ddp 4": (4, {}),
    "zero-1 2": (2, {"dp_shard_size": 2, "zero_stage": 1}),
    "zero-2 2": (2, {"dp_shard_size": 2, "zero_stage": 2}),
    "zero-3 2": (2, {"dp_shard_size": 2}),
    "zero-1 4": (4, {"dp_shard_size": 4, "zero_stage": 1}),
    "zero-2 4": (4, {"dp_shard_size": 4, "zero_stage": 2}),
    "zero-3 4": (4, {"dp_shard_size": 4}),
    "hsdp 2 x 2": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tensor 2": (2, {"tp_size": 2, "sequence_parallel": False}),
    "tensor 2, sequence": (2, {"tp_size": 2}),
    "gpipe 2": (2, {"pp_size": 2, "pp_schedule": "gpipe"}),
    "1f1b 2": (2, {"pp_size": 2}),
    "interleaved 2": (2, {"pp_size": 2, "pp_schedule": "interleaved"}),
    "zero bubble 2": (2, {"pp_size": 2, "pp_schedule": "zero_bubble"}),
    "fsdp 2 x tensor 2": (4, {"dp_shard_size": 2, "tp_size": 2}),
    "tensor 2 x pipeline 2": (4, {"tp_size": 2, "pp_size": 2}),
    "fsdp 2 x pipeline 2": (4, {"dp_shard_size": 2, "pp_size": 2}),
    "fsdp 2 x tensor 2 x pipeline 2": (8, {"dp_shard_size": 2, "tp_size": 2, "pp_size": 2}),
}


FIRST, OTHERS = [("full", True), ("lora", False)], [("full", False), ("lora", True)]
"""(kind, tied): what trains in every layout at once, and what is the long tail of some."""


ALL_AT_ONCE = ("ddp 2", "zero-3 2", "tensor 2", "tensor 2, sequence", "1f1b 2", "zero bubble 2")
MORE = {
    "ddp 2 x tensor 2": (4, {"dp_replicate_size": 2, "tp_size": 2}),
    "ddp 2 x pipeline 2": (4, {"dp_replicate_size": 2, "pp_size": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_those_of_one_process(inputs, alone, layout):
    compare(inputs, alone, layout, FIRST + OTHERS if layout in ALL_AT_ONCE else FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in (*LAYOUTS, *MORE) if name not in ALL_AT_ONCE])
def test_numbers_are_those_of_one_process_too(inputs, alone, layout):
    compare(inputs, alone, layout, OTHERS if layout in LAYOUTS else FIRST + OTHERS)


def compare(inputs, alone, layout, cases):
    world, settings = (LAYOUTS | MORE)[layout]
    data_ranks = world // settings.get("tp_size", 1) // settings.get("pp_size", 1)
    configs = [config_of(inputs, kind, tied, data_ranks, **settings) for kind, tied in cases]
    results = run(world, train_all, configs, timeout=120.0)
    for index, case in enumerate(cases):
        assert_same_numbers([result[index] for result in results], alone[case])


@pytest.mark.parametrize("settings", [{}, {"dp_shard_size": 4}], ids=["ddp", "fsdp"])
def test_a_rank_without_any_row_in_a_step(inputs, alone, settings):
    """Of the second step's 5 rows the fourth of the four ranks, with 2 rows each, gets none."""
    cases = [("full", False), ("lora", True)]
    results = run(4, train_all, [config_of(inputs, *case, 4, 1, **settings) for case in cases])
    for index, case in enumerate(cases):
        assert_same_numbers([result[index] for result in results], alone[case])


def test_shards_that_leave_a_rank_nothing(inputs):
    """With one row of A for two shard ranks, the second has none of a gradient that tensor ranks add up."""
    targets = {"r": 1, "target_modules": ("q_proj", "down_proj")}
    alone = train_alone(config_of(inputs, "lora", True, 1, 1, **targets))
    config = config_of(inputs, "lora", True, 2, dp_shard_size=2, tp_size=2, **targets)
    assert_same_numbers(run(4, train_layout, config), alone)


def read_slowly(rank, world, configs):
    """The second rank reads its weights for longer than a collective may wait."""
    fill = StoredWeights.fill

    def slow(stored, views):
        time.sleep(1.0 if rank == 1 else 0.0)
        fill(stored, views)

    StoredWeights.fill = slow
    try:
        return [train_layout(rank, world, config, steps=1)["losses"] for config in configs]
    finally:
        StoredWeights.fill = fill


def test_weights_are_read_outside_of_collectives(inputs):
    layouts = [{}, {"pp_size": 2}]
    configs = [config_of(inputs, "lora", True, 2 if not layout else 1, **layout) for layout in layouts]
    first, second = run(2, read_slowly, configs, collective=0.5)
    assert first == second


def train_counting(rank, world, configs):
    """`train_all`, and how often layers ran."""
    plain, runs, results = DecoderLayer.compute, [], []

    def compute(self, *args, **settings):
        runs.append(self)
        return plain(self, *args, **settings)

    DecoderLayer.compute = compute
    try:
        for config in configs:
            results.append(train_layout(rank, world, config))
            results[-1]["runs"] = len(runs)
            runs.clear()
    finally:
        DecoderLayer.compute = plain
    return results


CHECKPOINTED = ("ddp 2", "zero-1 2", "zero-2 2", "zero-3 2", "tensor 2", "tensor 2, sequence", "1f1b 2")


@pytest.mark.parametrize("layout", CHECKPOINTED)
def test_layers_that_run_again_give_the_same_bits(inputs, layout):
    """Collectives, gathered weights and the halves of a backward are those of layers that keep everything."""
    world, settings = LAYOUTS[layout]
    data_ranks = world // settings.get("tp_size", 1) // settings.get("pp_size", 1)
    configs = [config_of(inputs, kind, tied, data_ranks, **settings) for kind, tied in FIRST]
    full = [dataclasses.replace(config, memory=MemoryConfig(checkpointing="full")) for config in configs]
    for result in run(world, train_counting, configs + full, timeout=120.0):
        runs = [each["runs"] for each in result]
        assert all(more > less for less, more in zip(runs[: len(configs)], runs[len(configs) :], strict=True))
        for expected, found in zip(result[: len(configs)], result[len(configs) :], strict=True):
            for name in ("losses", "norms", "eval"):
                assert found[name] == expected[name], name
            for name in ("gradients", "weights"):
                for (*place, value), (*other, tensor) in zip(found[name], expected[name], strict=True):
                    assert place == other
                    assert torch.equal(value, tensor), (name, place)
