"""Rewards that are sums of the same parts in another order are equal to everything that compares
them: filters, pairs, advantages, metrics."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from by_name import advantage
from hypothesis import given
from hypothesis import strategies as st

from agentevo.algorithms.filters import (
    RLPRStd,
    dynamic_sampling,
    is_informative,
    reward_std,
    starpo_s,
)
from agentevo.algorithms.value import explained_variance
from agentevo.config import AlgorithmSection
from agentevo.runs.orchestration.step_metrics import rollout_metrics
from agentevo.training.batching.selection import select
from agentevo.training.pairs import make_pairs, win_probabilities
from agentevo.types import Trajectory, Turn
from agentevo.types.equality import are_equal, levels

MORE = 0.1 + 0.2 + 0.3
LESS = 0.3 + 0.2 + 0.1


def attempt(group: str, number: int, reward: float) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2 + number, 2],
        logprobs=[0.0, 0.0],
        versions=[0, 0],
        finish_reason="stop",
    )
    name = f"{group}{number}"
    return Trajectory(
        id=name, task_id=group, group_id=group, attempt=number, reward=reward, turns=[turn]
    )


def group(name: str, *rewards: float) -> list[Trajectory]:
    return [attempt(name, number, reward) for number, reward in enumerate(rewards)]


def pairs(trajectories, **options):
    section = AlgorithmSection(name="dpo", **options)
    made = make_pairs(list(trajectories), section.preference(), section)
    return [(pair.chosen.name, pair.rejected.name) for pair in made]


@pytest.mark.parametrize(
    "rewards", [(MORE, LESS), (-LESS, -MORE), (0.1 * 3, 0.3), (1e9 + 1e-7, 1e9)]
)
def test_rewards_that_differ_by_rounding_are_equal(rewards):
    assert rewards[0] != rewards[1]
    assert not is_informative(rewards) and reward_std(rewards) == 0.0
    assert win_probabilities(rewards) == [0.5, 0.5]
    assert pairs(group("a", *rewards)) == [] == pairs(group("a", *reversed(rewards)))


@pytest.mark.parametrize("rewards", [(0.6, 0.5999), (1e-9, 0.0), (-1e-300, 1e-300), (1e9, 1e9 - 1)])
def test_rewards_that_differ_are_not(rewards):
    assert is_informative(rewards) and reward_std(rewards) > 0
    assert win_probabilities(rewards) == [0.75, 0.25] or rewards[0] < rewards[1]
    assert len(pairs(group("a", *rewards))) == 1


def test_a_group_of_equals_is_dropped_and_the_informative_one_kept():
    equal = group("a", MORE, LESS, MORE)
    differing = group("b", 0.5, 0.6, 0.6)
    for section, wanted in ((AlgorithmSection(name="dapo"), 1), (AlgorithmSection(), None)):
        kept, dropped = select(equal + differing, section, num_groups=wanted)
        assert [t.id for t in kept] == ["b0", "b1", "b2"]
        assert set(dropped.values()) == {"zero-variance"}

    rewards = [t.reward for t in equal + differing]
    ids = [t.group_id for t in equal + differing]
    assert dynamic_sampling(rewards, ids, wanted=1) == [3, 4, 5]


def test_starpo_s_ranks_equal_spreads_by_their_order():
    rewards = [LESS, 0.0, MORE, 0.0, MORE, LESS, 0.7, 0.7]
    kept = starpo_s(rewards, ["a", "a", "b", "b", "c", "c", "d", "d"], keep=0.25)
    assert kept == [0, 1], "b's spread is larger by rounding alone"
    assert starpo_s(rewards[4:], [0, 0, 1, 1], keep=0.5) == [0, 1]


def test_rlpr_keeps_a_spread_that_is_its_bound():
    kept = RLPRStd(beta=1.0, record_from=1, start=2)
    kept.filter([MORE, 0.0], [0, 0])
    kept.end_step()
    assert kept.filter([LESS, 0.0], [0, 0]) == [0, 1]


def test_pairs_are_chosen_by_rewards_and_then_by_attempts():
    """Which of two equal ones is best, worst or furthest apart does not hang on their rounding."""
    for best, other in ((MORE, LESS), (LESS, MORE)):
        assert pairs(group("a", best, other, 0.0), pairs_per_group=1) == [("a0", "a2")]
        assert pairs(group("a", 0.0, best, other)) == [("a1", "a0")]
    assert pairs(group("a", 0.3, 0.2), pair_margin=0.1) == [("a0", "a1")], "0.09999999999999998"
    assert win_probabilities([MORE, LESS, 0.0]) == [2 / 3, 2 / 3, 1 / 6]


def test_the_best_of_a_group_may_be_tied_by_rounding():
    rewards = torch.tensor([[MORE], [LESS], [0.0]], dtype=torch.float64)
    found, _ = advantage(
        "grpo_passk", token_rewards=rewards, mask=torch.ones(3, 1), group_ids=["a"] * 3
    )
    assert not found.any()


def test_metrics_count_a_group_of_equals():
    done = [
        msgspec.structs.replace(t, status="completed")
        for t in group("a", MORE, LESS) + group("b", 0.0, 1.0)
    ]
    assert rollout_metrics(done, {})["group/zero_std_ratio"] == 0.5


def test_a_critic_explains_nothing_of_equal_returns():
    returns = torch.tensor([[MORE, LESS, MORE]], dtype=torch.float64)
    assert explained_variance(torch.zeros(1, 3), returns, torch.ones(1, 3).bool()) == 0


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=8))
def test_levels_are_those_of_the_values(values):
    found = levels(values)
    assert (max(found) == 0) == are_equal(values)
    assert sorted(set(found)) == list(range(max(found) + 1))
    for (one, low), (two, high) in itertools.permutations(zip(values, found, strict=True), 2):
        assert one < two or low >= high, "in the order of the values"
        assert (
            low != high
            or are_equal([*values, one, two])
            or abs(one - two) <= 1e-12 * max(map(abs, values))
        )
