"""What peers' own functions answered (tests/conformance/peers/*.json), and our functions on the
same inputs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from by_name import advantage, aggregate, kl, policy_loss

FOLDER = Path(__file__).parent / "peers"
INTEGERS = ("mask", "group_ids", "chosen_lengths", "rejected_lengths")
Case = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@cache
def recording(peer: str) -> Case:
    return json.loads((FOLDER / f"{peer}.json").read_text(encoding="utf-8"))


@cache
def batch(name: str) -> Tensors:
    """The inputs of that name, float64 (masks and ids int64)."""
    found = recording("verl")["batches"][name]
    return {
        key: torch.tensor(value, dtype=None if key in (*INTEGERS, "desirable") else torch.float64)
        for key, value in found.items()
    }


def case(peer: str, name: str) -> Case:
    return recording(peer)["cases"][name]


def close(ours: torch.Tensor, theirs: Any, tolerance: float = 1e-6) -> bool:
    """Whether they agree to 1e-6, of the largest magnitude where that is above 1; a different shape
    or a NaN does not."""
    expected = torch.as_tensor(theirs, dtype=torch.float64)
    assert ours.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((ours.double() - expected).abs() <= tolerance * scale).all())


def our_advantage(
    name: str, inputs: Tensors, rewards: str = "token_rewards", **hyper: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours on a batch of scores; everything that some estimator needs is given."""
    return advantage(
        name,
        token_rewards=inputs[rewards],
        mask=inputs["mask"],
        group_ids=inputs["group_ids"],
        values=inputs["values"],
        baseline_rewards=inputs["baseline_rewards"],
        reward_parts=inputs["reward_parts"],
        logp=inputs["logp"],
        sum_pi_squared=inputs["sum_pi_squared"],
        **hyper,
    )


def our_loss(
    name: str,
    inputs: Tensors,
    aggregation: str = "token-mean",
    advantages: str = "advantages",
    k3_coef: float = 0.0,
    **hyper: Any,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient [S, T] in the log-probs and metrics of ours; `k3_coef` times k3 from the
    reference is added."""
    logp = inputs["logp"].clone().requires_grad_()
    loss, metrics = policy_loss(
        name,
        logp=logp,
        old_logp=inputs["old_logp"],
        advantages=inputs[advantages],
        mask=inputs["mask"],
        rollout_logp=inputs["rollout_logp"],
        aggregation=aggregation,
        **hyper,
    )
    if k3_coef:
        loss = loss + k3_coef * aggregate(
            aggregation, kl("k3", logp, inputs["ref_logp"], inputs["mask"]), inputs["mask"]
        )

    return loss.detach(), torch.autograd.grad(loss, logp)[0], metrics


def trl_advantages(name: str, found: Case, **hyper: Any) -> torch.Tensor:
    """Our advantages [rows] on the rewards of one of TRL's cases; a row that TRL could not score
    has no trained token."""
    rewards = torch.tensor(found["rewards"], dtype=torch.float64)
    mask = ~rewards.isnan().any(1, keepdim=True)
    rewards = rewards.nan_to_num()
    groups = torch.arange(len(rewards)) // found["generations"]
    parts = {f"reward {index}": column for index, column in enumerate(rewards.T)}
    weights = dict(zip(parts, found["settings"]["reward_weights"], strict=True))

    return advantage(
        name,
        token_rewards=rewards[:, :1],
        mask=mask,
        group_ids=groups,
        reward_parts=parts,
        reward_weights=weights,
        **hyper,
    )[0][:, 0]
