"""Sampling against brute force and against transformers' own filters."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gapless.inference import sampling
from gapless.inference.sampling import Sampler, Sampling, draw


def transformers_distribution(logits, temperature, top_k, top_p):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(None, logits).double().softmax(-1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (2.0, 7, 0.8), (1.0, 0, 1e-9)]
)
def test_draws_follow_the_distribution_of_transformers(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = 2 * torch.randn(3, 17)
    expected = transformers_distribution(logits.clone(), temperature, top_k, top_p)
    # Evenly spaced quantiles give each token as often as its probability says, to one draw.
    draws = 4000
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for row in range(3):
        tokens = draw(logits[row].expand(draws, -1), uniform, settings)
        counts = torch.bincount(tokens, minlength=17)
        assert ((counts - draws * expected[row]).abs() <= 1.01).all()


def test_extreme_quantiles_stay_inside_the_filter():
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]]).repeat(2, 1)
    uniform = torch.tensor([0.0, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert draw(logits, uniform, Sampling(temperature=1.0)).tolist() == [0, 1]
    assert draw(logits, uniform, Sampling(temperature=1.0, top_k=2)).tolist() == [0, 2]
    assert draw(logits, uniform, Sampling(temperature=1e-300)).tolist() == [0, 0]
    assert draw(logits, uniform, Sampling(temperature=1.0, top_k=99)).tolist() == [0, 1]


def test_a_sequence_draws_the_same_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(4, 6, 50)
    settings = Sampling(temperature=1.5, seed=7)
    together = Sampler(settings)
    batched = [together(step, range(6)) for step in logits]
    for sequence in (5, 2):
        alone = Sampler(settings)
        assert [alone(step[sequence : sequence + 1], [sequence])[0] for step in logits] == [
            tokens[sequence] for tokens in batched
        ]
    other = Sampler(Sampling(temperature=1.5, seed=8))
    assert [other(step, range(6)) for step in logits] != batched


def test_greedy_takes_the_largest_logit():
    logits = torch.tensor([[0.0, 5.0, 1.0], [9.0, 5.0, 1.0]])
    assert Sampler(Sampling())(logits, [0, 1]) == [1, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature.*-0.1"),
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"top_k": -1}, "top_k.*-1"),
        ({"top_p": 0.0}, "top_p.*0.0"),
        ({"top_p": 1.5}, "top_p.*1.5"),
        ({"seed": -1}, "seed.*-1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_random_numbers_reach_the_draw_unrounded(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sampling, "draw", lambda logits, uniform, settings: seen.append(uniform) or torch.zeros(len(logits))
    )
    Sampler(Sampling(temperature=1.0, seed=3))(torch.zeros(2, 5), [0, 4])
    key = np.array([3, 4], dtype=np.uint64)
    assert seen[0][1].item() == np.random.Generator(np.random.Philox(key=key)).random()
