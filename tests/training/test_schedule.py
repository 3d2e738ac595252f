import pytest
import torch
import transformers

from gapless.config import OptimConfig
from gapless.training.schedule import make_schedule

PEAK, STEPS = 3e-4, 37


def reference(get_schedule, **settings) -> list[float]:
    """The rates a Hugging Face scheduler gives, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_schedule(optimizer, **settings)
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def ours(**settings) -> list[float]:
    schedule = make_schedule(OptimConfig(learning_rate=PEAK, **settings), STEPS)
    return [schedule(step) for step in range(STEPS)]


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_constant_linear_cosine_equal_transformers(warmup):
    steps = {"num_warmup_steps": warmup, "num_training_steps": STEPS}
    expected = reference(transformers.get_constant_schedule_with_warmup, num_warmup_steps=warmup)
    assert ours(lr_scheduler_type="constant", warmup_steps=warmup) == pytest.approx(expected, rel=1e-12)
    expected = reference(transformers.get_linear_schedule_with_warmup, **steps)
    assert ours(lr_scheduler_type="linear", warmup_steps=warmup) == pytest.approx(expected, rel=1e-12)
    expected = reference(transformers.get_cosine_schedule_with_warmup, **steps)
    assert ours(lr_scheduler_type="cosine", warmup_steps=warmup) == pytest.approx(expected, rel=1e-12)


def test_cosine_with_a_floor_equals_transformers():
    expected = reference(
        transformers.optimization.get_cosine_with_min_lr_schedule_with_warmup,
        num_warmup_steps=4,
        num_training_steps=STEPS,
        min_lr_rate=0.1,
    )
    assert ours(lr_scheduler_type="cosine", warmup_steps=4, min_lr_ratio=0.1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_wsd_equals_transformers_after_the_warmup(floor):
    # Theirs rises from the floor, ours from 0: with a floor the warm-up steps differ by design.
    warmup, decay = 5, 10
    expected = reference(
        transformers.get_wsd_schedule,
        num_warmup_steps=warmup,
        num_decay_steps=decay,
        num_training_steps=STEPS,
        min_lr_ratio=floor,
        decay_type="linear",
    )
    rates = ours(lr_scheduler_type="wsd", warmup_steps=warmup, decay_ratio=decay / STEPS, min_lr_ratio=floor)
    start = 0 if floor == 0 else warmup
    assert rates[start:] == pytest.approx(expected[start:], rel=1e-12)
    assert rates[0] == 0


def test_linear_floor_is_reached_after_the_last_step():
    schedule = make_schedule(OptimConfig(learning_rate=1.0, lr_scheduler_type="linear", min_lr_ratio=0.25), 8)
    assert [schedule(step) for step in range(9)] == [1 - 0.75 * step / 8 for step in range(9)]


def test_warmup_ratio_counts_from_all_steps_rounded_up():
    assert make_schedule(OptimConfig(warmup_ratio=0.1), 11).warmup_steps == 2
    assert make_schedule(OptimConfig(warmup_ratio=0.1, warmup_steps=7), 11).warmup_steps == 7


@pytest.mark.parametrize(("steps", "warmup", "decay"), [(1, 1, 0), (2, 1, 1), (5, 3, 2), (10, 5, 5)])
def test_shares_that_fit_are_taken_though_both_round_up(steps, warmup, decay):
    schedule = make_schedule(OptimConfig(lr_scheduler_type="wsd", warmup_ratio=0.5, decay_ratio=0.5), steps)
    assert (schedule.warmup_steps, schedule.decay_steps) == (warmup, decay)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_runs_of_one_step_and_of_warm_up_alone(shape):
    settings = {"learning_rate": 1.0, "lr_scheduler_type": shape, "decay_ratio": 0.0}
    assert make_schedule(OptimConfig(**settings), 1)(0) == 1.0
    schedule = make_schedule(OptimConfig(**settings, warmup_steps=4), 4)
    assert [schedule(step) for step in range(4)] == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup_steps": 12}, "12 steps of warm-up .* 10 steps"),
        ({"lr_scheduler_type": "wsd", "warmup_ratio": 0.7, "decay_ratio": 0.5}, "7 steps of warm-up and 5 of decay"),
        ({"lr_scheduler_type": "constant", "min_lr_ratio": 0.1}, "constant"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        make_schedule(OptimConfig(**settings), 10)
