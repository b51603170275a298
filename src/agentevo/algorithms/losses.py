"""Policy losses by name: `policy_loss` for a number and its metrics, `policy_loss_terms` for what
stands per token before aggregation.

    loss = sum over tokens of weight * token_loss,   weight = aggregation_weights(aggregation, mask)

Split invariance: with `weights` and `statistics` taken once on a minibatch, the losses and
gradients of its parts (rows) add up to those of the whole. A row is a sequence; how its tokens are
spread over padding does not matter. Log-ratios are bounded to +-20 before exp, so finite inputs
give finite results; where the bound holds, a ratio has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from agentevo.algorithms.aggregation import check_weights, row_weights, weighted_sum
from agentevo.algorithms.blocks import row_blocks
from agentevo.algorithms.clipped import decoupled_ppo, gmpo, gspo, gspo_token, ppo_clip, sapo
from agentevo.algorithms.covariance import clip_cov, clip_cov_statistics, kl_cov, kl_cov_statistics
from agentevo.algorithms.importance import correction, effective_share
from agentevo.algorithms.loss_inputs import LossTables, Terms, bounded_gap
from agentevo.algorithms.score_losses import (
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    minirl,
    minirl_statistics,
    reinforce,
)
from agentevo.catalogue import Value, resolve
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

STATISTICS: Mapping[str, Callable[[LossTables, Mapping[str, object]], dict[str, float]]] = {
    "clip_cov": clip_cov_statistics,
    "kl_cov": kl_cov_statistics,
    "minirl": minirl_statistics,
}


@dataclass(frozen=True)
class _Chosen:
    """A policy loss with its settings, checked."""

    name: str
    hyper: Mapping[str, Any]
    importance: tuple[str, float, float]
    """Name, cap, floor."""
    statistics: Mapping[str, float]

    def terms(self, tables: LossTables) -> Terms:
        """Token losses and detached statistics, [S, T], 0 where untrained, float32 or wider."""
        inputs = tables.cleaned(self.statistics)
        loss, found = LOSSES[self.name](inputs, **self.hyper)
        found.setdefault("ppo_kl", -bounded_gap(inputs.log_ratio.detach()))
        name, cap, floor = self.importance
        if name != "none":
            gap = inputs.old_logp - inputs.needed(
                "rollout_logp", f"{tables.entry} with importance={name}"
            )
            is_weights = correction(name, gap, inputs.mask, cap=cap, floor=floor)
            loss, found["rollout_is_mean"] = loss * is_weights, is_weights
        if inputs.entropy is not None:
            found["entropy"] = inputs.entropy
        spread = {
            key: torch.where(inputs.mask, values.detach().to(loss.dtype), 0.0)
            for key, values in found.items()
        }
        return torch.where(inputs.mask, loss, 0.0), spread

    def sums(
        self, tables: LossTables, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The sum of weighted token losses, and sums of the statistics (of squares of
        rollout_is_mean as well), float64. Scalars.

        weights [S, T] or [S, 1].
        """
        loss, found = self.terms(tables)
        sums = {key: values.sum(dtype=torch.float64) for key, values in found.items()}
        if "rollout_is_mean" in found:
            sums["squares"] = found["rollout_is_mean"].double().square().sum()
        return weighted_sum(
            loss, weights.detach().to(loss.dtype).expand_as(loss), tables.mask
        ), sums


def policy_loss(
    name: str,
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    rollout_logp: torch.Tensor | None = None,
    proximal_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    aggregation: str = "token-mean",
    weights: torch.Tensor | None = None,
    trajectory_ids: Sequence[Hashable] | torch.Tensor | None = None,
    aggregation_hyper: Mapping[str, Any] | None = None,
    statistics: Mapping[str, float] | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
    importance_floor: float = 0.0,
    **hyper: Value,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss (a scalar of logp's dtype) and its metrics. Tensors are [S, T]; what stands where
    mask is 0 has no influence.

    `weights` [S, T] take the place of the aggregation (the part of `aggregation_weights` of a whole
    minibatch that belongs to these rows); `statistics` come from `batch_statistics` on that
    minibatch and are taken from these rows if left out. `importance` weighs tokens with old over
    rollout policy, see `importance.importance_weights`. Metrics are means over the trained tokens
    given here: ppo_kl (old_logp - logp; decoupled_ppo: proximal_logp - logp), pg_clipfrac,
    pg_clipfrac_lower, cov_clipfrac, cov_klfrac, entropy, rollout_is_mean, where they apply; and ess
    in (0, 1], the effective share of tokens under importance weights (0 if none counts).

    Large tables are worked on in blocks of rows, which the backward pass computes again: a pass
    takes the memory of a few tables [S, T].
    """
    tables = LossTables(
        f"policy loss {name}",
        logp,
        old_logp,
        advantages,
        mask,
        rollout_logp,
        proximal_logp,
        entropy,
    )
    chosen = _chosen(
        tables, name, hyper, aggregation, statistics, (importance, importance_cap, importance_floor)
    )
    if weights is None:
        weights = row_weights(
            aggregation, mask, trajectory_ids=trajectory_ids, **(aggregation_hyper or {})
        )
    else:
        check_weights(weights, logp.shape)
    blocks = list(
        zip(tables.blocks(), (part for _, part in row_blocks(logp, weights)), strict=True)
    )
    run = (
        chosen.sums
        if len(blocks) == 1
        else partial(checkpoint, chosen.sums, use_reentrant=False, preserve_rng_state=False)
    )
    found = [run(*block) for block in blocks]
    sums = {key: torch.stack([part[key] for _, part in found]).sum() for key in found[0][1]}
    return torch.stack([loss for loss, _ in found]).sum().to(logp.dtype), _metrics(
        sums, mask.count_nonzero()
    )


def policy_loss_terms(
    name: str,
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    rollout_logp: torch.Tensor | None = None,
    proximal_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    aggregation: str = "token-mean",
    statistics: Mapping[str, float] | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
    importance_floor: float = 0.0,
    **hyper: Value,
) -> Terms:
    """Token losses [S, T] before aggregation, importance weights included, and statistics [S, T]
    whose means are the metrics.

    All are 0 where mask is 0 and of logp's dtype; only the losses carry a gradient. Arguments as of
    `policy_loss`; `aggregation` is only checked against the loss. ess =
    `importance.effective_sample_size(statistics["rollout_is_mean"], mask)`.
    """
    tables = LossTables(
        f"policy loss {name}",
        logp,
        old_logp,
        advantages,
        mask,
        rollout_logp,
        proximal_logp,
        entropy,
    )
    chosen = _chosen(
        tables, name, hyper, aggregation, statistics, (importance, importance_cap, importance_floor)
    )
    loss, found = chosen.terms(tables)
    return loss.to(logp.dtype), {key: values.to(logp.dtype) for key, values in found.items()}


def batch_statistics(
    name: str,
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    **hyper: Value,
) -> dict[str, float]:
    """What the loss needs to know of a whole minibatch before it is split: for clip_cov and kl_cov
    mean_advantage, mean_logp and threshold, for minirl with token_level_loss kept_share, for all
    others nothing.
    """
    resolved = resolve("policy loss", POLICY_LOSSES, name, hyper)
    if name not in STATISTICS:
        return {}
    return STATISTICS[name](
        LossTables(f"policy loss {name}", logp.detach(), old_logp, advantages, mask), resolved
    )


def _chosen(
    tables: LossTables,
    name: str,
    given: Mapping[str, Value],
    aggregation: str,
    statistics: Mapping[str, float] | None,
    importance: tuple[str, float, float],
) -> _Chosen:
    """Raises ValueError where settings are wrong or make no sense together. Statistics that were
    not given are taken from these rows."""
    hyper = resolve("policy loss", POLICY_LOSSES, name, given)
    check_aggregation(name, hyper, aggregation)
    check_importance(name, *importance)
    if statistics:
        _check_statistics(tables.entry, name, hyper, statistics)
    elif name in STATISTICS:
        statistics = STATISTICS[name](replace(tables, logp=tables.logp.detach()), hyper)
    return _Chosen(name, hyper, importance, statistics or {})


def _check_statistics(
    entry: str, name: str, hyper: Mapping[str, Any], statistics: Mapping[str, float]
) -> None:
    expected = {
        "clip_cov": _COVARIANCE,
        "kl_cov": _COVARIANCE,
        "minirl": {"kept_share"} if hyper.get("token_level_loss") else set(),
    }
    if set(statistics) != expected.get(name, set()):
        raise ValueError(
            f"{entry}: statistics has {sorted(statistics)}, it needs "
            f"{sorted(expected.get(name, set()))}: take them from"
            f" batch_statistics({name!r}, ...) with the same hyper-parameters"
        )


_COVARIANCE = {"mean_advantage", "mean_logp", "threshold"}


def _metrics(sums: Mapping[str, torch.Tensor], count: torch.Tensor) -> dict[str, float]:
    """Means over `count` tokens; ess where there are sums of squares."""
    means = {key: total / count.clamp(min=1) for key, total in sums.items() if key != "squares"}
    if "squares" in sums:
        means["ess"] = effective_share(sums["rollout_is_mean"], sums["squares"], count)
    return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
