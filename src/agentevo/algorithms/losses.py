"""Policy losses by name: `policy_loss` for a number and its metrics, `policy_loss_terms` for what stands per token before aggregation.

    loss = sum over tokens of weight * token_loss,   weight = aggregation_weights(aggregation, mask)

Split invariance: with `weights` and `statistics` taken once on a minibatch, the losses and gradients of its parts (rows) add up to those of
the whole. A row is a sequence; how its tokens are spread over padding does not matter. Log-ratios are bounded to +-20 before exp, so
finite inputs give finite results; where the bound holds, a ratio has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from agentevo.algorithms.aggregation import aggregation_weights, weighted_sum
from agentevo.algorithms.clipped import decoupled_ppo, gmpo, gspo, gspo_token, ppo_clip, sapo
from agentevo.algorithms.covariance import clip_cov, clip_cov_statistics, kl_cov, kl_cov_statistics
from agentevo.algorithms.importance import correction, effective_sample_size
from agentevo.algorithms.loss_inputs import LossInputs, Terms, bounded_gap, loss_inputs, masked_mean
from agentevo.algorithms.score_losses import cispo, dppo_kl, dppo_tv, dro, minirl, minirl_statistics, reinforce
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

STATISTICS: Mapping[str, Callable[[LossInputs, Mapping[str, object]], dict[str, float]]] = {
    "clip_cov": clip_cov_statistics,
    "kl_cov": kl_cov_statistics,
    "minirl": minirl_statistics,
}


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
    """The loss (a scalar of logp's dtype) and its metrics. Tensors are [S, T]; what stands where mask is 0 has no influence.

    `weights` [S, T] take the place of the aggregation (the part of `aggregation_weights` of a whole minibatch that belongs to these rows);
    `statistics` come from `batch_statistics` on that minibatch and are taken from these rows if left out.
    `importance` weighs tokens with old over rollout policy, see `importance.importance_weights`.
    Metrics are means over the trained tokens given here: ppo_kl (old_logp - logp; decoupled_ppo: proximal_logp - logp), pg_clipfrac,
    pg_clipfrac_lower, cov_clipfrac, cov_klfrac, entropy, rollout_is_mean, where they apply; and ess in (0, 1], the effective share of
    tokens under importance weights (0 if none counts).
    """
    settled = _hyper(name, hyper, aggregation)
    loss, found = _terms(
        name,
        settled,
        loss_inputs(
            f"policy loss {name}",
            logp=logp,
            old_logp=old_logp,
            advantages=advantages,
            mask=mask,
            rollout_logp=rollout_logp,
            proximal_logp=proximal_logp,
            statistics=statistics,
        ),
        (importance, importance_cap, importance_floor),
        entropy,
    )
    trained = mask != 0
    if weights is None:
        weights = aggregation_weights(aggregation, trained, trajectory_ids=trajectory_ids, dtype=loss.dtype, **(aggregation_hyper or {}))
    return weighted_sum(loss, weights.detach().to(loss.dtype), trained).to(logp.dtype), _metrics(found, trained)


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
    """Token losses [S, T] before aggregation, importance weights included, and statistics [S, T] whose means are the metrics.

    All are 0 where mask is 0 and of logp's dtype; only the losses carry a gradient. Arguments as of `policy_loss`; `aggregation` is only
    checked against the loss. ess = `importance.effective_sample_size(statistics["rollout_is_mean"], mask)`.
    """
    settled = _hyper(name, hyper, aggregation)
    inputs = loss_inputs(
        f"policy loss {name}",
        logp=logp,
        old_logp=old_logp,
        advantages=advantages,
        mask=mask,
        rollout_logp=rollout_logp,
        proximal_logp=proximal_logp,
        statistics=statistics,
    )
    loss, found = _terms(name, settled, inputs, (importance, importance_cap, importance_floor), entropy)
    return loss.to(logp.dtype), {key: values.to(logp.dtype) for key, values in found.items()}


def batch_statistics(
    name: str, *, logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, **hyper: Value
) -> dict[str, float]:
    """What the loss needs to know of a whole minibatch before it is split: for clip_cov and kl_cov mean_advantage, mean_logp and
    threshold, for minirl with token_level_loss kept_share, for all others nothing.
    """
    settled = resolve("policy loss", POLICY_LOSSES, name, hyper)
    if name not in STATISTICS:
        return {}
    inputs = loss_inputs(f"policy loss {name}", logp=logp.detach(), old_logp=old_logp, advantages=advantages, mask=mask)
    return STATISTICS[name](inputs, settled)


def _hyper(name: str, given: Mapping[str, Value], aggregation: str) -> dict[str, Value]:
    """All hyper-parameters. Raises ValueError, also where they and the aggregation make no sense together."""
    hyper = resolve("policy loss", POLICY_LOSSES, name, given)
    check_aggregation(name, hyper, aggregation)
    return hyper


def _terms(
    name: str, hyper: Mapping[str, Any], inputs: LossInputs, importance: tuple[str, float, float], entropy: torch.Tensor | None
) -> Terms:
    """Token losses and detached statistics, [S, T], 0 where untrained."""
    piece = f"policy loss {name}"
    check_importance(name, *importance)
    _check_statistics(piece, name, hyper, inputs)
    loss, found = LOSSES[name](inputs, **hyper)
    found.setdefault("ppo_kl", -bounded_gap(inputs.log_ratio.detach()))
    if importance[0] != "none":
        gap = inputs.old_logp - inputs.needed("rollout_logp", f"{piece} with importance={importance[0]}")
        is_weights = correction(importance[0], gap, inputs.mask, cap=importance[1], floor=importance[2])
        loss, found["rollout_is_mean"] = loss * is_weights, is_weights
    if entropy is not None:
        if entropy.shape != inputs.logp.shape:
            raise ValueError(f"{piece}: entropy has shape {list(entropy.shape)}, logp {list(inputs.logp.shape)}: give the same, [S, T]")
        found["entropy"] = entropy
    spread = {key: torch.where(inputs.mask, values.detach().to(loss.dtype), 0.0) for key, values in found.items()}
    return torch.where(inputs.mask, loss, 0.0), spread


def _check_statistics(piece: str, name: str, hyper: Mapping[str, Any], inputs: LossInputs) -> None:
    if not inputs.statistics:
        return
    expected = {"clip_cov": _COVARIANCE, "kl_cov": _COVARIANCE, "minirl": {"kept_share"} if hyper.get("token_level_loss") else set()}
    if set(inputs.statistics) != expected.get(name, set()):
        raise ValueError(
            f"{piece}: statistics has {sorted(inputs.statistics)}, it needs {sorted(expected.get(name, set()))}: take them from"
            f" batch_statistics({name!r}, ...) with the same hyper-parameters"
        )


_COVARIANCE = {"mean_advantage", "mean_logp", "threshold"}


def _metrics(found: Mapping[str, torch.Tensor], trained: torch.Tensor) -> dict[str, float]:
    means = {key: masked_mean(values, trained) for key, values in found.items()}
    if "rollout_is_mean" in found:
        means["ess"] = effective_sample_size(found["rollout_is_mean"], trained)
    return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))
