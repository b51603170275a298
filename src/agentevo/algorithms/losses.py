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

import torch

from agentevo.algorithms.clipped import decoupled_ppo, gmpo, gspo, gspo_token, ppo_clip, sapo
from agentevo.algorithms.covariance import clip_cov, clip_cov_statistics, kl_cov, kl_cov_statistics
from agentevo.algorithms.importance import ImportanceWeights, bind_importance
from agentevo.algorithms.loss_inputs import LossInputs, LossTables, Terms, bounded_gap
from agentevo.algorithms.score_losses import (
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    minirl,
    minirl_statistics,
    reinforce,
)
from agentevo.catalogue import Value, check_function, resolve
from agentevo.catalogue.policy_losses import POLICY_LOSSES, check_aggregation, check_importance

LOSSES: Mapping[str, Callable[..., Terms]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "gpg": reinforce,
    "reinforce": reinforce,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "minirl": minirl,
    "decoupled_ppo": decoupled_ppo,
}
"""Loss name -> function of (LossInputs, **hyper)."""

STATISTICS: Mapping[str, Callable[[LossTables, Mapping[str, object]], dict[str, float]]] = {
    "clip_cov": clip_cov_statistics,
    "kl_cov": kl_cov_statistics,
    "minirl": minirl_statistics,
}
"""Statistics of the whole minibatch that a loss needs before the minibatch is split: for clip_cov
and kl_cov mean_advantage, mean_logp and threshold, for minirl with token_level_loss kept_share."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss with its hyper-parameters, checked when it was bound."""

    name: str
    formula: Callable[[LossInputs], Terms]
    importance: ImportanceWeights | None
    """Weighs tokens with the old over the rollout policy; None where the recipe has no such
    weights."""
    statistics_of: Callable[[LossTables], dict[str, float]] | None
    """The function that computes them (see STATISTICS); None for most losses."""

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
    settings = resolve("policy loss", POLICY_LOSSES, name, hyper)
    check_function("policy loss", name, function)
    check_aggregation(name, settings, aggregation)
    check_importance(name, importance, importance_cap, importance_floor)

    # minirl needs the whole minibatch only where its denominator is that of all tokens
    statistics = STATISTICS.get(name) if settings.get("token_level_loss", True) else None
    return PolicyLoss(
        name,
        function or partial(LOSSES[name], **settings),
        bind_importance(importance, importance_cap, importance_floor),
        None if statistics is None else lambda tables: statistics(tables, settings),
    )
