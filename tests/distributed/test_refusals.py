"""Layouts that a run cannot have are refused on all ranks before anything is read or made."""

import pytest
from layouts import layout_config
from pool import run
from runs import write_inputs

from gapless.training.trainer import Trainer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), rows=5)


def refused(rank, world, configs):
    messages = []
    for config in configs:
        try:
            Trainer(config).train()
            messages.append("trained")
        except (ValueError, SystemExit) as error:
            messages.append(str(error))
    return messages


def test_what_does_not_divide(inputs):
    """The tiny model has 2 kv heads and 2 layers, its rows fill 3 packed rows."""
    cases = [
        ({"tp_size": 4}, ("tp_size = 4", "2 key-value heads")),
        ({"tp_size": 2, "max_length": 127}, ("127", "2")),
        ({"pp_size": 4, "gradient_accumulation_steps": 4}, ("4", "2 layers")),
        ({"pp_size": 2, "gradient_accumulation_steps": 1}, ("gradient_accumulation_steps is 1", "pp_size 2")),
        ({"pp_size": 2, "pp_schedule": "interleaved"}, ("2 layers",)),
        ({"dp_shard_size": 3}, ("dp_shard_size 3 takes a multiple of 3 processes, and there are 4",)),
        ({}, ("3 packed rows", "4 data-parallel ranks")),
    ]
    configs = [layout_config(inputs, "lora", output_dir=str(inputs / "refused"), **case) for case, _ in cases]
    results = run(4, refused, configs)
    for index, (_, words) in enumerate(cases):
        for rank in results:
            assert all(word in rank[index] for word in words), rank[index]
    assert not (inputs / "refused").exists()
