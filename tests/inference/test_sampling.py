"""What is drawn, and the log-prob that comes with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from slow import soak

from agentevo.inference.embedded.sampling import draw, filter_logits
from agentevo.types import SamplingParams

LOGITS = [2.0, -1.0, 0.5, 0.4, -3.0, 1.2]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.25),
    SamplingParams(temperature=1.7, top_k=5, top_p=0.9, min_p=0.1),
]


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [6, *soak(700)])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_frequencies_are_those_of_the_distribution(params, vocabulary, distribution):
    """Chi-square over 6000 draws; 700 tokens span three blocks of the cumulative sum."""
    logits = torch.full((vocabulary,), -20.0)
    places = [0, 1, 2, 3, 4, 5] if vocabulary == 6 else [0, 255, 256, 511, 600, 699]
    logits[places] = torch.tensor(LOGITS)
    expected = distribution(logits.double().numpy(), params)
    num_draws = 6000
    rng = np.random.default_rng(0)
    tokens, logprobs = draw(
        logits.repeat(num_draws, 1), [params] * num_draws, rng.random(num_draws).tolist()
    )
    counts = np.bincount(tokens, minlength=vocabulary)
    assert counts[expected == 0].sum() == 0

    likely = num_draws * expected > 3
    chi_square = (
        (counts[likely] - num_draws * expected[likely]) ** 2 / (num_draws * expected[likely])
    ).sum()
    assert chi_square < likely.sum() + 4 * math.sqrt(2 * likely.sum())

    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_greedy_takes_the_first_most_likely_token_with_logprob_0():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    assert draw(logits, [SamplingParams(temperature=0)] * 2, [0.9, 0.9]) == ([1, 0], [0.0, 0.0])


def test_a_row_depends_on_nothing_but_itself():
    rows = torch.randn(len(PARAMS) + 1, 300, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=0), *PARAMS]
    uniforms = [0.1 * (i + 1) for i in range(len(params))]
    tokens, logprobs = draw(rows.clone(), params, uniforms)
    for row, param, uniform, token, logprob in zip(
        rows, params, uniforms, tokens, logprobs, strict=True
    ):
        alone = draw(row[None].clone(), [param], [uniform])
        assert alone[0] == [token]
        assert alone[1][0] == pytest.approx(logprob, abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(uniform):
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [7, 255, 300]] = torch.tensor([0.0, 1.0, -1.0])
    (token,), (logprob,) = draw(logits.clone(), [SamplingParams()], [uniform])
    assert token in (7, 255, 300)
    assert logprob == pytest.approx(float(torch.log_softmax(logits, -1)[0, token]), abs=1e-6)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
)
def test_filters_always_keep_the_most_likely_token(values, top_k, top_p, min_p):
    logits = torch.tensor(values)
    kept = filter_logits(logits, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.isfinite(kept[logits.argmax()])
    assert torch.equal(kept[torch.isfinite(kept)], logits[torch.isfinite(kept)])
    assert (
        kept[torch.isfinite(kept)].min() >= logits[~torch.isfinite(kept)].max()
        if not torch.isfinite(kept).all()
        else True
    )


def test_filters_that_are_off_change_nothing():
    logits = torch.tensor(LOGITS)
    assert torch.equal(filter_logits(logits, SamplingParams()), logits)
    assert torch.equal(filter_logits(logits, SamplingParams(top_k=6)), logits)


def test_tokens_that_tie_at_the_edge_of_top_k_stay_together():
    kept = filter_logits(torch.tensor([2.0, 1.0, 1.0, 0.0]), SamplingParams(top_k=2))
    assert torch.isfinite(kept).tolist() == [True, True, True, False]
