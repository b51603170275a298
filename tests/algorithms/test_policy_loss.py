"""Losses against the papers' formulas in float64, gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentevo.algorithms.policy_loss import aggregation_weights, kl_k3, ppo_clip

logprobs = st.floats(-8, 0)
tokens = st.lists(st.tuples(logprobs, logprobs, st.floats(-3, 3)), min_size=1, max_size=12)
clips = st.floats(0, 0.9), st.floats(0, 2)


def columns(rows) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def surrogate(logp: float, old: float, advantage: float, low: float, high: float) -> float:
    """PPO's objective, to be maximised: min(r A, clip(r) A)."""
    ratio = np.exp(logp - old)
    return min(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


@given(tokens, *clips)
def test_ppo_clip_is_minus_the_papers_objective(rows, low, high):
    loss, clipped = ppo_clip(*columns(rows), clip_low=low, clip_high=high)
    np.testing.assert_allclose(loss.numpy(), [-surrogate(*row, low, high) for row in rows], rtol=1e-12, atol=1e-12)
    for (logp, old, advantage), hit in zip(rows, clipped.tolist(), strict=True):
        ratio = np.exp(logp - old)
        outside = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
        near = min(abs(ratio - 1 - high), abs(ratio - 1 + low)) < 1e-9
        assert hit == outside or near


@given(tokens, *clips)
def test_gradient_of_ppo_clip(rows, low, high):
    logp, old, advantage = columns(rows)
    logp.requires_grad_()
    ppo_clip(logp, old, advantage, clip_low=low, clip_high=high)[0].sum().backward()
    step = 1e-6
    for grad, row in zip(logp.grad.tolist(), rows, strict=True):
        ratio = np.exp(row[0] - row[1])
        if min(abs(ratio - 1 - high), abs(ratio - 1 + low)) < 1e-4 * (1 + ratio):
            continue  # at the kink there is no derivative
        up, down = (surrogate(row[0] + sign * step, *row[1:], low, high) for sign in (1, -1))
        assert grad == pytest.approx(-(up - down) / (2 * step), rel=1e-4, abs=1e-6)


def test_ppo_clip_by_hand():
    """Ratios 2 and 1/2 with both signs of the advantage: only the two that went too far in their favour are clipped."""
    logp, old = torch.tensor([2.0, 2.0, 0.5, 0.5]).log(), torch.zeros(4)
    loss, clipped = ppo_clip(logp, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-1.28, 2.0, -0.5, 0.8])
    assert clipped.tolist() == [True, False, False, True]


@given(st.lists(st.tuples(logprobs, logprobs), min_size=1, max_size=12))
def test_kl_k3(rows):
    logp, ref = columns(rows)
    logp.requires_grad_()
    found = kl_k3(logp, ref)
    expected = [np.exp(r - p) - (r - p) - 1 for p, r in rows]
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    assert (found >= 0).all()
    found.sum().backward()
    np.testing.assert_allclose(logp.grad.numpy(), [1 - np.exp(r - p) for p, r in rows], rtol=1e-9, atol=1e-9)


def test_kl_k3_is_unbiased():
    """Its mean over the policy's own tokens is the divergence."""
    policy, reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    assert float((policy * kl_k3(policy.log(), reference.log())).sum()) == pytest.approx(float((policy * (policy / reference).log()).sum()))


@pytest.mark.parametrize("distance", [50.0, 1000.0, float("inf")])
def test_extreme_log_ratios_overflow_nowhere(distance):
    logp = torch.tensor([0.0, -distance])
    other = torch.tensor([-distance, 0.0])
    assert torch.isfinite(kl_k3(logp, other)).all()
    assert torch.isfinite(ppo_clip(logp, other, torch.tensor([-1.0, 1.0]))[0]).all()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_aggregations_against_loops(lengths):
    rng = np.random.default_rng(len(lengths))
    losses = [rng.normal(size=n) for n in lengths]
    told = [loss for loss in losses if len(loss)]
    expected = {
        "token-mean": np.concatenate(losses).mean() if told else 0.0,
        "seq-mean-token-sum": np.mean([loss.sum() for loss in told]) if told else 0.0,
        "seq-mean-token-mean": np.mean([loss.mean() for loss in told]) if told else 0.0,
    }
    for name, value in expected.items():
        weights = aggregation_weights(name, lengths)
        assert sum(weight * loss.sum() for weight, loss in zip(weights, losses, strict=True)) == pytest.approx(value)
        assert all(weight == 0 for weight, n in zip(weights, lengths, strict=True) if not n)
