"""pass@k against its definition, intervals against what they promise."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.runs.evaluation.estimates import ks_of, mean_of, paired_difference, pass_at_k


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_of_k_that_hold_a_success(data):
    n = data.draw(st.integers(1, 8))
    successes = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    attempts = [True] * successes + [False] * (n - successes)
    draws = [any(draw) for draw in combinations(attempts, k)]
    assert pass_at_k(n, successes, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_needs_k_attempts_and_never_overflows():
    assert pass_at_k(3, 2, 4) is None
    assert 0.0 < pass_at_k(100_000, 3, 1000) < 1.0
    with pytest.raises(ValueError, match="k=1 of 2"):
        pass_at_k(2, 3, 1)


def test_ks_double_and_end_with_all():
    assert [ks_of(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_an_interval_is_always_the_same_and_holds_the_mean():
    values = list(np.random.default_rng(0).random(50))
    first = mean_of(values)
    again = mean_of(values)
    assert first == again
    assert first.low < first.value < first.high


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        found = mean_of(list((generator.random(60) < 0.4).astype(float)))
        held += found.low <= 0.4 <= found.high
    assert held >= 85


def test_agreement_of_few_tasks_is_no_certainty():
    assert mean_of([1.0] * 4).low == pytest.approx(0.025 ** (1 / 4))
    found = mean_of([0.0] * 100)
    assert (found.low, found.high) == (0.0, pytest.approx(0.0362, abs=1e-4))


def test_a_difference_is_paired():
    hard = [0.0, 1.0] * 20
    generator = np.random.default_rng(3)
    better = [value + 0.1 + generator.normal() / 100 for value in hard]
    found = paired_difference(hard, better)
    assert found.value == pytest.approx(0.1, abs=0.01)
    assert found.high - found.low < 0.02, "what tasks have in common cancels out"
    assert paired_difference([], []) is None and mean_of([]) is None


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        ([0.0, 1.0] * 50, [0.0, 1.0] * 50, -0.0362, 0.0362),
        ([0.0] * 100, [1.0] * 100, 1 - 2 * 0.0362, 1.0),
        ([0.25] * 100, [0.75] * 100, 0.5 * (1 - 0.0362) - 0.0362, 0.5 * (1 - 0.0362) + 0.0362),
        ([-2.0, 8.0] * 50, [-2.0, 8.0] * 50, -0.362, 0.362),
        ([1.0], [1.0], -0.975, 0.975),
    ],
    ids=["none differs", "all differ", "by a share", "rewards beyond 0 and 1", "one task"],
)
def test_models_that_agree_at_every_task_may_differ_at_others(first, second, low, high):
    found = paired_difference(first, second)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))


def test_an_interval_of_agreeing_tasks_holds_the_truth_as_often_as_it_says():
    """Of 20 tasks models differ at the share that the interval just leaves out: that all 20 agree
    happens in 2.5% of evaluations."""
    beyond = paired_difference([0.0] * 20, [0.0] * 20).high
    drawn = np.random.default_rng(4).random((20_000, 20)) < beyond
    assert (drawn.sum(axis=1) == 0).mean() == pytest.approx(0.025, abs=0.005)


@pytest.mark.slow
def test_of_many_tasks_it_is_the_normal_interval():
    values = np.random.default_rng(2).random(1_000_000)
    found = mean_of(values)
    few = mean_of(values[:9_000])
    assert found.high - found.low == pytest.approx(2 * 1.96 * 12**-0.5 / 1000, rel=0.01)
    assert few.high - few.low == pytest.approx(2 * 1.96 * (12 * 9_000) ** -0.5, rel=0.1)
