"""Policy losses: `bind_policy_loss` makes one from its name and hyper-parameters, and the result
gives the loss of every token before aggregation.

    loss = sum over tokens of weight * token_loss,   weight = what the aggregation gives the row

Split invariance: with weights and `statistics` taken once on a minibatch, the losses and gradients
of its parts (rows) add up to those of the whole. A row is a sequence; how its tokens are spread
over padding does not matter. Log-ratios are bounded to +-20 before exp, so finite inputs give
finite results; where the bound holds, a ratio has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from agentevo.algorithms import clipped, covariance, score_losses
from agentevo.algorithms.entries import FUNCTION, EntryTable, Value, check_function
from agentevo.algorithms.importance import ImportanceWeights, bind_importance, check_importance
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.loss_inputs import (
    LossInputs,
    LossTables,
    PolicyLossEntry,
    StatisticsFunction,
    Terms,
    bounded_gap,
)

POLICY_LOSSES = EntryTable(
    "policy loss", PolicyLossEntry, clipped.LOSSES, score_losses.LOSSES, covariance.LOSSES
)


@POLICY_LOSSES.entry(
    name=FUNCTION,
    meaning="the loss that your own function computes (algorithm.loss_function)",
    formula="L_t = loss(inputs)_t, from the tokens of its own row",
    source="your function; docs/algorithms.md",
)
def _call_function(inputs: LossInputs, *, function: Callable[[LossInputs], Terms]) -> Terms:
    return function(inputs)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its hyper-parameters, checked when it was bound."""

    name: str
    formula: Callable[[LossInputs], Terms]
    importance: ImportanceWeights | None
    """Weighs tokens with the old over the rollout policy; None where the recipe has no such
    weights."""
    statistics_of: StatisticsFunction | None
    """Computes what the loss must know of the whole minibatch; None for most losses."""

    def statistics(self, tables: LossTables) -> dict[str, float]:
        """The statistics of a whole minibatch that calls on its parts need."""
        return {} if self.statistics_of is None else self.statistics_of(tables)

    def __call__(
        self, tables: LossTables, statistics: Mapping[str, float] = MappingProxyType({})
    ) -> Terms:
        """Token losses [S, T] before aggregation, importance weights included, and measurements [S,
        T] whose means over trained tokens are the metrics: ppo_kl (old_logp - logp; decoupled_ppo:
        proximal_logp - logp), pg_clipfrac, pg_clipfrac_lower, cov_clipfrac, cov_klfrac and
        rollout_is_mean, where they apply.

        All are 0 where the mask is 0 and of logp's dtype; only the losses carry a gradient. Without
        `statistics` these rows count as the whole minibatch.
        """
        inputs = tables.clean_inputs(statistics or self.statistics(tables))
        loss, measured = self.formula(inputs)
        measured.setdefault("ppo_kl", -bounded_gap(inputs.log_ratio.detach()))
        if self.importance is not None:
            rollout_logp = inputs.require(
                "rollout_logp", f"policy loss {self.name} with importance"
            )
            weights = self.importance(inputs.old_logp - rollout_logp, inputs.mask)
            loss = loss * weights
            measured["rollout_is_mean"] = weights

        dtype = tables.logp.dtype
        spread = {
            key: torch.where(inputs.mask, values.detach().to(loss.dtype), 0.0).to(dtype)
            for key, values in measured.items()
        }
        return torch.where(inputs.mask, loss, 0.0).to(dtype), spread


def bind_policy_loss(
    name: str,
    hyper: Mapping[str, Value],
    *,
    aggregation: str,
    importance: str = "none",
    importance_cap: float = 2.0,
    importance_floor: float = 0.0,
    function: Callable[[LossInputs], Terms] | None = None,
) -> PolicyLoss:
    """The policy loss of that name, for an aggregation by that name. `importance` names the weights
    of `importance.bind_importance`; `function` computes the loss FUNCTION. Raises ValueError where
    a setting is wrong or where settings are inconsistent."""
    settings = POLICY_LOSSES.resolve(name, hyper)
    entry = POLICY_LOSSES[name]
    check_function("policy loss", name, function)
    check_aggregation(name, settings, aggregation)
    check_weights(name, importance, importance_cap, importance_floor)

    bound = settings if function is None else {"function": function}
    return PolicyLoss(
        name,
        partial(entry.function, **bound),
        bind_importance(importance, importance_cap, importance_floor),
        None if entry.statistics is None else entry.statistics(settings),
    )


def required_aggregation(name: str, hyper: Mapping[str, Value]) -> str | None:
    """The only aggregation with which the loss matches its paper, or None where any aggregation
    does. `hyper` as from `EntryTable.resolve`."""
    entry = POLICY_LOSSES[name]
    return None if entry.aggregation is None else entry.aggregation(hyper)


def check_aggregation(name: str, hyper: Mapping[str, Value], aggregation: str) -> None:
    """Raises ValueError where a loss, its hyper-parameters and an aggregation are inconsistent."""
    needed = required_aggregation(name, hyper)
    if needed not in (None, aggregation):
        raise ValueError(
            f"policy loss {name} can't be aggregated by {aggregation}: "
            f"{POLICY_LOSSES[name].aggregation_reason}. Choose aggregation={needed}"
        )


def check_weights(name: str, importance: str, cap: float, floor: float) -> None:
    """Raises ValueError for importance weights that are wrong, or that the loss has already."""
    check_importance(importance, cap, floor)
    if POLICY_LOSSES[name].has_importance_weights and importance != "none":
        raise ValueError(
            f"policy loss {name} weighs with proximal over rollout policy already: leave "
            f"importance={importance} out, or use ppo_clip"
        )
