"""Jobs of two processes, one of which is killed, signalled or fails: all end soon, and the same command goes on."""

import random
import re
import signal
from functools import partial
from pathlib import Path

import jobs
import pool
import pytest
from jobs import Job, KillAt, job_config, newest
from runs import assert_same_outcome, outcome, write_inputs

from gapless.training.checkpoint import open_newest
from gapless.training.metrics import read_metrics
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

LAYOUTS = {
    "lora, ddp": ("lora", {}),
    "full, fsdp": ("full", {"dp_shard_size": 2}),
    "lora, fsdp, async": ("lora", {"dp_shard_size": 2, "async_save": True}),
    "full, tensor": ("full", {"tp_size": 2}),
    "full, pipeline, async": ("full", {"pp_size": 2, "async_save": True}),
}
POINTS = {
    1: ["rank1-00001.safetensors written", "rank index written", "rank done"],
    0: [
        "rank0-00001.safetensors written",
        "all ranks done",
        "index merged",
        "state written",
        "index written",
        "folder synced",
        "renamed",
        "pruned one",
    ],
}
"""Of a save of two ranks, by rank, in their order."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The inputs; the process that all others are forked from has torch."""
    pool.run(2, _nothing)
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def _nothing(rank, world):
    pass


class Reference:
    """An uninterrupted job."""

    def __init__(self, inputs: Path, folder: Path, layout: str) -> None:
        self.inputs, self.layout = inputs, layout
        job = Job(folder, self.config(folder / "run"), partial(jobs.recording, folder=folder))
        assert job.finish().codes == [0, 0], job.errors()
        self.outcome = outcome(folder / "run")
        self.points = [(folder / f"points-{rank}").read_text().splitlines() for rank in (0, 1)]

    def config(self, output: Path, **settings):
        kind, layout = LAYOUTS[self.layout]
        return job_config(self.inputs, output, kind, **{**layout, **settings})

    def finish(self, folder: Path) -> Job:
        """Go on to the end, which must be as if there had been no interruption."""
        job = Job(folder, self.config(folder / "run")).finish()
        assert job.codes == [0, 0], job.errors()
        assert_same_outcome(outcome(folder / "run"), self.outcome)
        return job


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if number else []) for number, name in enumerate(LAYOUTS)],
)
def reference(request, inputs, tmp_path_factory):
    return Reference(inputs, tmp_path_factory.mktemp("reference"), request.param)


@pytest.fixture(scope="module")
def straight(inputs, tmp_path_factory):
    """An uninterrupted job of the first layout."""
    return Reference(inputs, tmp_path_factory.mktemp("straight"), next(iter(LAYOUTS)))


def assert_killed(job: Job, rank: int, output: Path) -> None:
    """The other process has said so in a line and left; the checkpoints are as they were published."""
    assert job.codes[rank] == -signal.SIGKILL
    assert job.codes[1 - rank] == 1
    (line,) = job.errors()
    assert line.startswith(f"rank {1 - rank}: stopped because rank {rank} failed: ")
    assert "Traceback" not in job.said(0) + job.said(1)
    if newest(output):
        open_newest(output / "checkpoints")  # reads all of it


def test_kill_at_every_point_of_a_save(reference, tmp_path):
    """Each job goes on from what the one before, killed at the point before, has left."""
    output, before = tmp_path / "run", 0
    for rank, names in POINTS.items():
        passed = list(dict.fromkeys(reference.points[rank]))
        assert [*passed] == names
        for point in names:
            # The first job has a save behind it. The save after the last kill removes what that one should have.
            first = before == 0
            job = Job(tmp_path, reference.config(output), KillAt(rank, point, after=first)).finish()
            assert_killed(job, rank, output)
            saving = 4 if first else before + 2
            if point in ("renamed", "pruned one"):
                before = saving
            elif point == "rank done":  # the other may have published it before it learned of the kill
                assert newest(output) in (saving - 2, saving)
                before = newest(output)
            else:
                before = saving - 2
            assert newest(output) == before
    reference.finish(tmp_path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_kill_at_random_moments(reference, tmp_path, seed):
    """While it starts, then some steps after the newest checkpoint."""
    draw = random.Random(seed)
    output = tmp_path / "run"
    for kill in range(4):
        step, rank = min(newest(output) + draw.randint(1, 2), 8), draw.randrange(2)
        job = Job(tmp_path, reference.config(output))
        # One that is killed before all have met is waited for until parallel.timeout.
        while not (f"\nstep {step}/" in job.said(0, "stdout") if kill else (output / "logs").exists()):
            assert not job.wait(0.01), job.errors()
        job.wait(draw.uniform(0.0, 0.05 if kill else 0.3))
        job.kill(rank)
        job.finish()
        if newest(output) == 10:
            break  # where this process is held up, the job may come to its end
        assert_killed(job, rank, output)
    assert kill >= 2
    reference.finish(tmp_path)


@pytest.mark.slow
def test_a_kill_of_a_rank_that_is_done_is_no_matter(straight, tmp_path):
    job = Job(tmp_path, straight.config(tmp_path / "run"), jobs.killed_when_done).finish()
    assert job.codes == [0, -signal.SIGKILL]
    assert_same_outcome(outcome(tmp_path / "run"), straight.outcome)


@pytest.mark.parametrize("on", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(straight, tmp_path, on):
    output = tmp_path / "run"
    config = straight.config(output, save_steps=None)
    job = Job(tmp_path, config, partial(jobs.signalled, on=on, number=signal.SIGTERM)).finish()
    assert job.codes == [143, 143]
    assert ("SIGTERM: finishing this step" in job.said(0)) == (on == 0)
    assert job.said(1) == ""
    assert job.said(0, "stdout").splitlines()[-1].startswith("stopped by SIGTERM after step 5 of 10, saved in ")
    assert job.said(1, "stdout") == ""
    logs = [(output / "logs" / f"rank-0000{rank}.log").read_text() for rank in (0, 1)]
    assert all("stopped by SIGTERM after step 5 of 10" in log for log in logs)
    assert newest(output) == 5
    assert not (output / "adapter").exists()
    assert f"going on from {output}/checkpoints/step-000005" in straight.finish(tmp_path).said(0, "stdout")


def test_one_rank_may_ask_for_the_end(straight, tmp_path):
    config = straight.config(tmp_path / "run", save_steps=None)
    job = Job(tmp_path, config, partial(jobs.stopping, on=1)).finish()
    assert job.codes == [0, 0]
    assert newest(tmp_path / "run") == 5
    assert (tmp_path / "run" / "adapter").is_dir()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 5


@pytest.mark.parametrize(
    ("make", "on"),
    [
        (partial(jobs.callback_raising, on=1), 1),
        (partial(jobs.loss_failing, on=0, raises=True), 0),
        pytest.param(partial(jobs.callback_raising, on=0), 0, marks=pytest.mark.slow),
        pytest.param(partial(jobs.loss_failing, on=1, raises=True), 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_is_told_and_ends_the_job(straight, tmp_path, make, on):
    job = Job(tmp_path, straight.config(tmp_path / "run"), make).finish()
    assert job.codes == [1, 1]
    lines = job.said(on).splitlines()
    told = [line for line in lines if line.startswith("rank ")]
    assert told[0] == f"rank {on}: Traceback (most recent call last):"
    assert told[-1] == f"rank {on}: KeyError: 'a mistake of the script'"
    assert [line for line in told if "in raise_key_error" in line]
    others = [line for line in job.said(1 - on).splitlines() if line.startswith("rank ")]
    assert others == [f"rank {1 - on}: stopped because rank {on} failed: KeyError: 'a mistake of the script'"]
    assert "Traceback" not in job.said(1 - on)
    assert newest(tmp_path / "run") == 2


@pytest.mark.parametrize("on", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_non_finite_loss_on_one_rank_stops_all(straight, tmp_path, on):
    config = straight.config(tmp_path / "run", save_steps=1)
    job = Job(tmp_path, config, partial(jobs.loss_failing, on=on, raises=False)).finish()
    assert job.codes == [2, 2]
    (line,) = job.errors()
    assert " error: step 3: the loss is inf" in line
    assert "the weights are those before the step, the last good checkpoint is " in line
    assert line.count("step-000002") == 1
    assert newest(tmp_path / "run") == 2
    open_newest(tmp_path / "run" / "checkpoints")
    steps = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two machines, on which the model folder of the same name has other weights."""
    folder = tmp_path_factory.mktemp("nodes")
    for rank in (0, 1):
        model = write_tiny_model(folder / f"node-{rank}" / "model", seed=rank, vocab_size=VOCAB_SIZE)
        write_tiny_tokenizer(model)
    (folder / "same" / "node-0").mkdir(parents=True)
    (folder / "same" / "node-1").mkdir()
    for rank in (0, 1):
        (folder / "same" / f"node-{rank}" / "model").symlink_to(folder / "node-0" / "model")
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("version", r'gapless: rank 0 has "\S+", rank 1 has "0.0.0"; start all'),
        ("seed", r"training.seed: rank 0 has 42, rank 1 has 43; start all"),
        ("setting", r"optim.weight_decay: rank 0 has 0.01, rank 1 has 0.5; start all"),
        ("model", r'the model\'s digest: rank 0 has "[0-9a-f]{64}", rank 1 has "[0-9a-f]{64}"; start all'),
    ],
)
def test_ranks_that_differ_are_refused_at_the_start(straight, nodes, tmp_path, what, message):
    folder = nodes if what == "model" else nodes / "same"
    config = straight.config(tmp_path / "run")
    job = Job(tmp_path, config, partial(jobs.differing, what=what, folder=folder)).finish()
    assert job.codes == [2, 2]
    (line,) = job.errors()
    assert re.search(f"error: the ranks do not agree on the start: {message}", line)
    assert not (tmp_path / "run").exists()


def test_tokenising_may_take_longer_than_the_timeout(inputs, tmp_path):
    config = job_config(inputs, tmp_path / "run", timeout=3.0, max_steps=2, eval=(), eval_steps=None)
    job = Job(tmp_path, config, partial(jobs.slow_to_tokenise, seconds=4.0)).finish()
    assert job.codes == [0, 0], job.errors()
    assert newest(tmp_path / "run") == 2
