"""Importance weights against their slow version, what they do to a loss, and the effective sample
size."""

from __future__ import annotations

import numpy as np
import pytest
import slow_policy_losses as slow
import torch
from by_name import effective_share, importance_weights, policy_loss, policy_terms
from hypothesis import given, settings
from hypothesis import strategies as st

from agentevo.algorithms.importance import IMPORTANCE, bind_importance
from examples import examples

NAMES = [name for name in IMPORTANCE[0].choices if name != "none"]
seeds = st.integers(0, 2**32)


def pair(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 5)), int(rng.integers(1, 7)))
    mask = rng.random(shape) < 0.7
    old = -rng.exponential(1.0, shape)
    rollout = old + scale * rng.normal(size=shape).clip(-2.4, 2.4)
    return (
        torch.tensor(np.where(mask, old, np.nan)),
        torch.tensor(np.where(mask, rollout, np.inf)),
        torch.tensor(mask),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(50), deadline=None)
@given(
    seed=seeds,
    scale=st.sampled_from([0.0, 0.3, 25.0]),
    cap=st.sampled_from([1.0, 2.0, 1e9]),
    floor=st.sampled_from([0.0, 0.5]),
)
def test_agrees_with_the_slow_version(
    name: str, seed: int, scale: float, cap: float, floor: float
) -> None:
    old, rollout, mask = pair(seed, scale)
    floor = 0.0 if name.endswith("tis") else floor
    weights = importance_weights(name, old.requires_grad_(), rollout, mask, cap, floor)
    expected = slow.importance_weights(
        name, old.detach().numpy(), rollout.numpy(), mask.numpy(), cap, floor
    )
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12, atol=0)
    assert not weights.requires_grad and weights.dtype == old.dtype

    ess = effective_share(weights, mask)
    assert (
        ess == pytest.approx(slow.effective_sample_size(expected, mask.numpy()))
        and 0.0 <= ess <= 1.0 + 1e-12
    )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(15), deadline=None)
@given(seed=seeds)
def test_row_order_and_padding_change_nothing(name: str, seed: int) -> None:
    old, rollout, mask = pair(seed, 0.5)
    weights = importance_weights(name, old, rollout, mask)
    assert torch.equal(
        importance_weights(name, old.flip(0), rollout.flip(0), mask.flip(0)), weights.flip(0)
    )
    wider = [torch.nn.functional.pad(x, (0, 2), value=np.nan) for x in (old, rollout)]
    padded = importance_weights(name, *wider, torch.nn.functional.pad(mask, (0, 2)))
    torch.testing.assert_close(padded[:, : mask.shape[1]], weights, rtol=1e-12, atol=0)
    assert not padded[:, mask.shape[1] :].any()


@pytest.mark.parametrize("name", NAMES)
def test_weights_multiply_any_loss_and_its_gradient(name: str) -> None:
    old, rollout, mask = pair(7, 0.5)
    inputs = {
        "old_logp": old,
        "rollout_logp": rollout,
        "mask": mask,
        "advantages": torch.ones_like(old),
    }
    weights = importance_weights(name, old, rollout, mask, 1.5)
    for loss_name in ("ppo_clip", "reinforce", "cispo"):
        logp = (old + 0.1).requires_grad_()
        plain = policy_terms(loss_name, logp=logp, **inputs)[0]
        weighed, found = policy_terms(
            loss_name, logp=logp, **inputs, importance=name, importance_cap=1.5
        )
        torch.testing.assert_close(weighed, plain * weights)
        torch.testing.assert_close(found["rollout_is_mean"], weights)
        gradients = [
            torch.autograd.grad(x.sum(), logp, retain_graph=True)[0] for x in (plain, weighed)
        ]
        torch.testing.assert_close(gradients[1], gradients[0] * weights)

    metrics = policy_loss("ppo_clip", logp=old, **inputs, importance=name, importance_cap=1.5)[1]
    assert metrics["ess"] == pytest.approx(effective_share(weights, mask))
    assert "ess" not in policy_loss("ppo_clip", logp=old, **inputs)[1]


def test_equal_weights_have_the_whole_sample_and_one_weight_a_share_of_it() -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert effective_share(torch.full((2, 4), 0.3), mask) == pytest.approx(1.0)
    only = torch.zeros(2, 4)
    only[0, 0] = 5.0
    assert effective_share(only, mask) == pytest.approx(1 / 8)
    assert effective_share(torch.zeros(2, 4), mask) == 0.0


def test_none_has_no_weights() -> None:
    assert bind_importance("none", 2.0, 0.0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "tis"}, "one of none, token_tis"),
        ({"cap": 0.0}, "above 0"),
        ({"floor": -1.0}, "at least 0"),
        ({"floor": 0.5}, "does nothing with importance=token_tis"),
        ({"name": "token_mis", "floor": 3.0}, "no token would train"),
    ],
)
def test_refusals_say_what_to_do(change: dict[str, object], message: str) -> None:
    old = torch.zeros(2, 3)
    rollout = torch.zeros(2, 3)
    mask = torch.ones(2, 3)
    with pytest.raises(ValueError, match=message):
        importance_weights(
            **{
                "name": "token_tis",
                "old_logp": old,
                "rollout_logp": rollout,
                "mask": mask,
                **change,
            }
        )
