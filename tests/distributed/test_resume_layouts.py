"""A run that was saved in one layout goes on in another: the same rows, and the same numbers to rounding."""

import dataclasses
import shutil

import pytest
from layouts import layout_config
from pool import run
from runs import write_inputs

from gapless.data.loader import Loader
from gapless.training.callbacks import Callback
from gapless.training.metrics import read_metrics
from gapless.training.trainer import Trainer
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE

STEPS, SAVED, STEP_ROWS = 6, 3, 8


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"), rows=27)
    write_tiny_model(folder / "model", vocab_size=VOCAB_SIZE, num_hidden_layers=4, tie_word_embeddings=True)
    return folder


def config_of(inputs, output, kind, world, **layout):
    """6 steps of 8 rows, saved after the third; 13 rows are an epoch, so it ends in the middle of the second."""
    data_ranks = world // layout.get("tp_size", 1) // layout.get("pp_size", 1)
    return layout_config(
        inputs,
        kind,
        output_dir=str(output),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=STEP_ROWS // data_ranks,
        max_steps=STEPS,
        save_steps=SAVED,
        save_total_limit=None,
        **layout,
    )


class StopAfter(Callback):
    """Asks for the end of the run once the metrics of a step are there."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, metrics):
        if metrics["step"] == self.step:
            trainer.stop()


def stop_early(rank, world, config, step):
    """Train until all ranks know that one has asked to stop; returns the last step."""
    return Trainer(config, callbacks=[StopAfter(step)] if rank == world - 1 else []).train().step


def train(rank, world, config):
    """Train on; returns the rows that this rank had in every step."""
    rows = {}
    plain = Loader.next_step

    def next_step(self):
        data = plain(self)
        rows[data.step] = [row for batch in data.micro_batches for row in batch.row_ids], data.where()
        return data

    Loader.next_step = next_step
    try:
        result = Trainer(config).train()
    finally:
        Loader.next_step = plain
    assert result.finished
    return rows


def losses(output):
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_metrics(output / "metrics.jsonl")}


@pytest.fixture(scope="module")
def uninterrupted(inputs, tmp_path_factory):
    """Runs of one process, by kind: their metrics and the rows of each step."""
    found = {}
    for kind in ("full", "lora"):
        output = tmp_path_factory.mktemp("alone")
        rows = train(0, 1, config_of(inputs, output, kind, 1))
        found[kind] = losses(output), rows
    return found


LAYOUTS = {
    "ddp 4": {},
    "fsdp 4": {"dp_shard_size": 4},
    "hsdp 2 x 2": {"dp_replicate_size": 2, "dp_shard_size": 2, "zero_stage": 1},
    "fsdp 2 x tensor 2": {"dp_shard_size": 2, "tp_size": 2},
    "tensor 2 x pipeline 2": {"tp_size": 2, "pp_size": 2},
    "fsdp 2 x pipeline 2": {"dp_shard_size": 2, "pp_size": 2, "pp_schedule": "interleaved"},
}
ON_TWO = [{}, {"dp_shard_size": 2}, {"tp_size": 2}, {"pp_size": 2}]


CASES = [(layout, kind) for layout in LAYOUTS for kind in ("full", "lora")]
AT_ONCE = {
    (layout, "lora" if layout == "tensor 2 x pipeline 2" else "full") for layout in LAYOUTS if layout != "hsdp 2 x 2"
}
"""One kind of each layout; the others are the long tail."""


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*case, marks=() if case in AT_ONCE else pytest.mark.slow) for case in CASES]
)
def test_saved_on_four_goes_on_anywhere(inputs, uninterrupted, tmp_path, layout, kind):
    """4 -> 4 in the same layout, 4 -> 2 in another one, 4 -> 1."""
    expected, expected_rows = uninterrupted[kind]
    settings = LAYOUTS[layout]
    four = config_of(inputs, tmp_path / "four", kind, 4, **settings)
    run(4, train, four)
    other = ON_TWO[(list(LAYOUTS).index(layout) + (kind == "lora")) % len(ON_TWO)]
    for world, following in ((4, settings), (2, other), (1, {})):
        output = tmp_path / f"on {world}"
        shutil.copytree(tmp_path / "four", output)
        for path in (output / "checkpoints" / f"step-{STEPS:06d}", output / ("adapter" if kind == "lora" else "model")):
            shutil.rmtree(path)
        config = config_of(inputs, output, kind, world, **following)
        ranks = run(world, train, config) if world > 1 else [train(0, 1, config)]
        assert_same_run(losses(output), expected)
        for step in range(SAVED, STEPS):
            assert all(rank[step][1] == expected_rows[step][1] for rank in ranks)
            assert_each_row_once([rank[step][0] for rank in ranks], expected_rows[step][0], following)
    assert_same_run(losses(tmp_path / "four"), expected)


def test_from_four_ranks_to_two_to_one(inputs, uninterrupted, tmp_path):
    """FSDP and replicas on four, then a pipeline of two, then one process; stopped, not at a planned checkpoint."""
    layouts = [(4, {"dp_replicate_size": 2, "dp_shard_size": 2}, 1), (2, {"pp_size": 2}, 3)]
    for world, layout, step in layouts:
        config = config_of(inputs, tmp_path, "lora", world, **layout)
        last = run(
            world,
            stop_early,
            dataclasses.replace(config, training=dataclasses.replace(config.training, save_steps=None)),
            step,
        )
        assert len(set(last)) == 1
        assert step < last[0] <= step + 3
        shutil.rmtree(tmp_path / "adapter")
    train(0, 1, config_of(inputs, tmp_path, "lora", 1))
    assert_same_run(losses(tmp_path), uninterrupted["lora"][0])


def assert_same_run(found, expected):
    assert found.keys() == expected.keys()
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-5), step


def assert_each_row_once(rows, expected, layout):
    """Ranks that are not data-parallel have the same rows."""
    copies = layout.get("tp_size", 1) * layout.get("pp_size", 1)
    assert sorted(row for rank in rows for row in rank) == sorted(expected * copies)
