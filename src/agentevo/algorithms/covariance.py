"""Losses that protect entropy: they exclude or restrain the few tokens with the largest covariance
of log-prob and advantage, because training on these tokens collapses entropy.

cov_t = (A_t - mean A) (logp_t - mean logp), with means over all N trained tokens. A loss chooses
the max(1, floor(fraction N)) candidates of largest cov, and every token that ties with the smallest
of them (to 12 digits). The choice therefore depends neither on order nor on a random draw (the
paper of Clip-Cov draws at random among its candidates). A covariance of exactly 0 is never chosen;
all are 0 if all advantages are equal. The means and the threshold are computed once, over the whole
minibatch, so each part of the minibatch chooses the same tokens. Rounding differs between the parts
and the whole, so the threshold lies halfway to the largest covariance that is not chosen, and there
is none if all candidates are chosen. Covariances are float64. Source: arXiv 2505.22617.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agentevo.algorithms.clipped import clip_bounds, clip_surrogate
from agentevo.algorithms.entries import EntryTable, Hyperparameter
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.loss_inputs import (
    LossInputs,
    LossTables,
    PolicyLossEntry,
    StatisticsFunction,
    Terms,
    bounded_exp,
)

LOSSES = EntryTable("policy loss", PolicyLossEntry)

TIE_TOLERANCE = 1e-12
"""The relative distance up to which covariances tie."""

_FRACTION = Hyperparameter(
    "fraction",
    0.0002,
    "share of all trained tokens that is chosen (at least one token)",
    low=0.0,
    high=1.0,
    low_allowed=False,
)


def clip_cov_statistics(hyper: Mapping[str, Any]) -> StatisticsFunction:
    """mean_advantage, mean_logp and threshold (between chosen and other covariances) of a whole
    minibatch."""
    clip_low, clip_high, fraction, low, high = (
        float(hyper[name]) for name in ("clip_low", "clip_high", "fraction", "low", "high")
    )

    def is_unclipped(inputs: LossInputs) -> torch.Tensor:
        return ~clip_surrogate(
            bounded_exp(inputs.log_ratio), inputs.advantages, clip_low=clip_low, clip_high=clip_high
        )[1]

    return lambda tables: _statistics(tables, is_unclipped, fraction, low, high)


def kl_cov_statistics(hyper: Mapping[str, Any]) -> StatisticsFunction:
    """The same statistics for a loss whose candidates are all trained tokens."""
    fraction = float(hyper["fraction"])
    return lambda tables: _statistics(
        tables, lambda inputs: inputs.mask, fraction, -math.inf, math.inf
    )


@LOSSES.entry(
    meaning="PPO without the tokens of largest covariance of log-prob and advantage, which reduce "
    "entropy most",
    formula="PPO's clipped loss; 0 for the max(1, fraction N) unclipped tokens of largest low < "
    "cov < high, cov = (A - mean A) (l - mean l), means over the N trained tokens",
    source="Clip-Cov, arXiv 2505.22617, eq. 11 and 12; the paper draws at random between the "
    "bounds, here the largest are chosen",
    hyper=(
        *clip_bounds(0.2, 0.2),
        _FRACTION,
        Hyperparameter("low", 1.0, "tokens above this covariance are candidates"),
        Hyperparameter("high", 5.0, "tokens below this covariance are candidates"),
    ),
    peers={"verl": "clip_cov"},
    statistics=clip_cov_statistics,
)
def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    low: float,
    high: float,
) -> Terms:
    """A token that PPO clips has no gradient to remove, so it is not a candidate (as in the
    paper's code)."""
    loss, clipped = clip_surrogate(
        bounded_exp(inputs.log_ratio), inputs.advantages, clip_low=clip_low, clip_high=clip_high
    )
    chosen = _candidates(inputs, ~clipped, inputs.statistics, low, high)[1]
    return torch.where(chosen, 0.0, loss), {"pg_clipfrac": clipped, "cov_clipfrac": chosen}


@LOSSES.entry(
    meaning="unclipped PPO with a pull towards the old policy on the tokens of largest covariance",
    formula="-A r + coef |l - o| for the max(1, fraction N) tokens of largest cov = (A - mean A) "
    "(l - mean l), -A r elsewhere",
    source="KL-Cov, arXiv 2505.22617, eq. 13 and 14",
    hyper=(_FRACTION, Hyperparameter("coef", 1.0, "strength of the pull", low=0.0)),
    peers={"verl": "kl_cov; coef is ppo_kl_coef"},
    statistics=kl_cov_statistics,
)
def kl_cov(inputs: LossInputs, *, fraction: float, coef: float) -> Terms:
    chosen = _candidates(inputs, inputs.mask, inputs.statistics, -math.inf, math.inf)[1]
    pull = torch.where(chosen, coef * inputs.log_ratio.abs(), 0.0)
    return -inputs.advantages * bounded_exp(inputs.log_ratio) + pull, {"cov_klfrac": chosen}


def _statistics(
    tables: LossTables,
    eligible: Callable[[LossInputs], torch.Tensor],
    fraction: float,
    low: float,
    high: float,
) -> dict[str, float]:
    sums = [
        torch.stack(
            [
                inputs.mask.sum().double(),
                inputs.advantages.sum(dtype=torch.float64),
                inputs.logp.sum(dtype=torch.float64),
            ]
        )
        for inputs in tables.cleaned_blocks()
    ]
    num_trained, advantages, logp = torch.stack(sums).sum(0).tolist()
    statistics = {
        "mean_advantage": advantages / max(num_trained, 1.0),
        "mean_logp": logp / max(num_trained, 1.0),
        "threshold": -math.inf,
    }
    parts = []
    for inputs in tables.cleaned_blocks():
        covariance, candidates = _candidates(inputs, eligible(inputs), statistics, low, high)
        parts.append(covariance[candidates])

    values = torch.cat(parts)
    if not len(values):
        return statistics | {"threshold": math.inf}

    num_selected = min(max(1, int(fraction * num_trained)), len(values))
    smallest_selected = float(values.topk(num_selected).values[-1])
    tie_limit = smallest_selected - TIE_TOLERANCE * abs(smallest_selected)
    lower_values = values[values < tie_limit]
    if not len(lower_values):  # all candidates are chosen
        return statistics
    return statistics | {"threshold": (smallest_selected + float(lower_values.max())) / 2}


def _candidates(
    inputs: LossInputs,
    eligible: torch.Tensor,
    statistics: Mapping[str, float],
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Covariances [S, T] float64, and a bool mask of the eligible trained tokens that are between
    the bounds and reach the threshold."""
    covariance = _subtract_mean(inputs.advantages, statistics["mean_advantage"]) * _subtract_mean(
        inputs.logp.detach(), statistics["mean_logp"]
    )
    bounded = (
        (covariance != 0)
        & (covariance > low)
        & (covariance < high)
        & (covariance >= statistics["threshold"])
    )
    return covariance, inputs.mask & eligible & bounded


def _subtract_mean(values: torch.Tensor, mean: float) -> torch.Tensor:
    """values - mean in float64. A distance within the rounding of the mean becomes exactly 0."""
    distance = values.to(torch.float64) - mean
    return torch.where(distance.abs() <= TIE_TOLERANCE * abs(mean), 0.0, distance)
