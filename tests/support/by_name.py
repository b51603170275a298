"""The functions that training binds once (`agentevo.algorithms`), bound and called in one line, so
that a test can name an algorithm and give it tables."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from agentevo.algorithms.advantage_inputs import AdvantageTables
from agentevo.algorithms.aggregation import bind_aggregation
from agentevo.algorithms.divergence import bind_kl
from agentevo.algorithms.estimators import bind_advantage
from agentevo.algorithms.importance import (
    bind_importance,
    check_importance,
    effective_sample_size,
)
from agentevo.algorithms.loss_inputs import LossTables
from agentevo.algorithms.losses import PolicyLoss, bind_policy_loss
from agentevo.algorithms.preference import bind_preference_loss

TABLES = {field.name for field in fields(AdvantageTables)}
BINDING = ("importance", "importance_cap", "importance_floor")
LOSS_TABLES = {field.name for field in fields(LossTables)}


def advantage(name: str, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns; tables and hyper-parameters are given in any order."""
    hyper = {key: value for key, value in given.items() if key not in TABLES}
    tables = {key: value for key, value in given.items() if key in TABLES}
    return bind_advantage(name, hyper)(AdvantageTables(**tables))


def aggregation_weights(
    name: str, mask: torch.Tensor, trajectory_ids: Sequence[Hashable] | None = None, **hyper: Any
) -> torch.Tensor:
    """Weights [S, T] in float64, 0 where untrained; without ids each row is a trajectory."""
    trained = mask != 0
    ids = range(len(mask)) if trajectory_ids is None else trajectory_ids
    return bind_aggregation(name, hyper)(trained.sum(1), ids)[:, None] * trained


def weighted_sum(values: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (weights.to(values.dtype) * torch.where(mask != 0, values, 0.0)).sum()


def aggregate(
    name: str,
    values: torch.Tensor,
    mask: torch.Tensor,
    trajectory_ids: Sequence[Hashable] | None = None,
    **hyper: Any,
) -> torch.Tensor:
    return weighted_sum(values, aggregation_weights(name, mask, trajectory_ids, **hyper), mask)


def kl(
    name: str, logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    trained = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
    return bind_kl(name)(logp, ref_logp, trained)


def importance_weights(
    name: str,
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    cap: float = 2.0,
    floor: float = 0.0,
) -> torch.Tensor:
    """Weights [S, T] as a policy loss computes them; not for "none", which has none."""
    check_importance(name, cap, floor)
    weights = bind_importance(name, cap, floor)
    assert weights is not None
    trained = mask != 0
    return weights(torch.where(trained, old_logp - rollout_logp, 0.0), trained)


def effective_share(weights: torch.Tensor, mask: torch.Tensor) -> float:
    """The effective sample size of weights [S, T], as a share of the trained tokens."""
    wide = weights.double()
    return effective_sample_size(
        float(wide.sum()), float(wide.square().sum()), float((mask != 0).sum())
    )


def bound_loss(name: str, aggregation: str = "token-mean", **settings: Any) -> PolicyLoss:
    """A policy loss; hyper-parameters and importance settings are given in any order."""
    hyper = {key: value for key, value in settings.items() if key not in BINDING}
    binding = {key: value for key, value in settings.items() if key in BINDING}
    return bind_policy_loss(name, hyper, aggregation=aggregation, **binding)


def policy_terms(
    name: str,
    *,
    aggregation: str = "token-mean",
    statistics: Mapping[str, float] | None = None,
    **given: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses [S, T] and measurements; tables and settings are given in any order."""
    settings = {key: value for key, value in given.items() if key not in LOSS_TABLES}
    tables = {key: value for key, value in given.items() if key in LOSS_TABLES}
    return bound_loss(name, aggregation, **settings)(LossTables(**tables), statistics or {})


def batch_statistics(name: str, **given: Any) -> dict[str, float]:
    settings = {key: value for key, value in given.items() if key not in LOSS_TABLES}
    tables = {key: value for key, value in given.items() if key in LOSS_TABLES}
    return bound_loss(name, **settings).statistics(LossTables(**tables))


def policy_loss(
    name: str,
    *,
    aggregation: str = "token-mean",
    aggregation_hyper: Mapping[str, Any] | None = None,
    weights: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a whole minibatch, or with `weights` [S, T] of a part of it; and metrics as the
    trainer makes them: means over trained tokens."""
    mask = given["mask"]
    losses, measured = policy_terms(name, aggregation=aggregation, **given)
    if weights is None:
        weights = aggregation_weights(aggregation, mask, **(aggregation_hyper or {}))

    count = max(int((mask != 0).sum()), 1)
    metrics = {key: float(value.double().sum()) / count for key, value in measured.items()}
    if "rollout_is_mean" in measured:
        metrics["ess"] = effective_share(measured["rollout_is_mean"], mask)

    return weighted_sum(losses, weights, mask), metrics


def preference_loss(name: str, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and measurements per pair; inputs and hyper-parameters are given in any order."""
    inputs = {key: value for key, value in given.items() if key in PREFERENCE_INPUTS}
    hyper = {key: value for key, value in given.items() if key not in PREFERENCE_INPUTS}
    return bind_preference_loss(name, hyper)(**inputs)


PREFERENCE_INPUTS = (
    "chosen_logp",
    "rejected_logp",
    "ref_chosen_logp",
    "ref_rejected_logp",
    "chosen_lengths",
    "rejected_lengths",
    "chosen_win_prob",
    "rejected_win_prob",
    "logp",
    "ref_logp",
    "desirable",
    "kl_baseline",
    "weights",
)
