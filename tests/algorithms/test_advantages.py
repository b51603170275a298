"""GRPO's advantages against the formula, written as a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentevo.algorithms.advantages import grpo

members = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, -2.0])), min_size=1, max_size=24)


def by_loop(rewards: list[float], groups: list[str], scale_by_std: bool, epsilon: float) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        others = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        if len(others) == 1 or others.min() == others.max():
            found.append(0.0)
            continue
        deviation = np.sqrt(((others - others.mean()) ** 2).sum() / (len(others) - 1))
        found.append((reward - others.mean()) / (deviation + epsilon if scale_by_std else 1.0))
    return found


@given(members, st.booleans(), st.sampled_from([1e-6, 1e-2]))
def test_against_a_loop(pairs, scale_by_std, epsilon):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    found = grpo(torch.tensor(rewards, dtype=torch.float64), groups, scale_by_std=scale_by_std, epsilon=epsilon)
    np.testing.assert_allclose(found.numpy(), by_loop(rewards, groups, scale_by_std, epsilon), rtol=1e-9, atol=1e-9)


@given(members, st.randoms(use_true_random=False))
def test_order_and_other_groups_do_not_matter(pairs, rng):
    whole = dict(enumerate(grpo(torch.tensor([r for _, r in pairs], dtype=torch.float64), [g for g, _ in pairs]).tolist()))
    order = list(range(len(pairs)))
    rng.shuffle(order)
    shuffled = grpo(torch.tensor([pairs[i][1] for i in order], dtype=torch.float64), [pairs[i][0] for i in order]).tolist()
    assert shuffled == pytest.approx([whole[i] for i in order], abs=1e-9)
    only_a = [i for i, (group, _) in enumerate(pairs) if group == "a"]
    alone = grpo(torch.tensor([pairs[i][1] for i in only_a], dtype=torch.float64), ["a"] * len(only_a)).tolist()
    assert alone == pytest.approx([whole[i] for i in only_a], abs=1e-9)


def test_by_hand():
    """Mean 0.25, unbiased deviation 0.5."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0])
    found = grpo(rewards, ["g", "g", "g", "g", "alone"], epsilon=0.0)
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0.0])
    assert grpo(rewards, ["g", "g", "g", "g", "alone"], scale_by_std=False).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.0])


@pytest.mark.parametrize("reward", [0.1, 0.3, 1e6 / 3])
def test_equal_rewards_are_exactly_0_and_not_noise_over_epsilon(reward):
    assert grpo(torch.full((7,), reward), ["g"] * 7).tolist() == [0.0] * 7


def test_each_reward_needs_a_group():
    with pytest.raises(ValueError, match="3 rewards but 2 group ids"):
        grpo(torch.zeros(3), ["a", "b"])


def test_no_rewards_give_no_advantages():
    assert grpo(torch.zeros(0), []).tolist() == []
