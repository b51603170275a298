"""Policy losses around a probability ratio that is clipped, gated or averaged: PPO and its
descendants.

Each takes `LossInputs` and returns token losses and per-token statistics, [S, T], or [S, 1] where
one number holds for a whole row. The caller broadcasts, masks and aggregates them. Ratios come from
log-ratios bounded to +-20.
"""

from __future__ import annotations

import torch

from agentevo.algorithms.importance import bound
from agentevo.algorithms.loss_inputs import LossInputs, Terms, bounded_exp, bounded_gap, row_mean


def clip_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where the second is larger (no
    gradient there)."""
    push = -advantages
    plain = push * ratio
    clipped = push * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Terms:
    """PPO's clipped surrogate; with dual_clip c (0 or None: off) also min(that, -A c) where A < 0.

    Source: arXiv 1707.06347, eq. 7; two bounds: arXiv 2503.14476, eq. 10; dual clip: arXiv
    1912.09729, eq. 5.
    """
    loss, clipped = clip_surrogate(
        bounded_exp(inputs.log_ratio), inputs.advantages, clip_low=clip_low, clip_high=clip_high
    )
    if not dual_clip:
        return loss, {"pg_clipfrac": clipped}

    ceiling = -inputs.advantages * dual_clip
    lower = (inputs.advantages < 0) & (loss > ceiling)
    return torch.where(lower, ceiling, loss), {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower}


def decoupled_ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float, mode: str
) -> Terms:
    """w times PPO's clipped surrogate around the proximal policy: r = exp(logp - proximal_logp), w
    = exp(proximal_logp - rollout_logp).

    w has no gradient and is bounded by `cap`: min(w, cap) (clamp) or 0 above it (mask). Source:
    arXiv 2505.24298, eq. 5.
    """
    proximal = inputs.require("proximal_logp", "policy loss decoupled_ppo")
    rollout = inputs.require(
        "rollout_logp", "policy loss decoupled_ppo (it weighs with proximal over rollout policy)"
    )
    gap = inputs.logp - proximal
    loss, clipped = clip_surrogate(
        bounded_exp(gap), inputs.advantages, clip_low=clip_low, clip_high=clip_high
    )
    weights = torch.where(inputs.mask, bound(bounded_exp(proximal - rollout), mode, cap=cap), 0.0)

    return weights * loss, {
        "pg_clipfrac": clipped,
        "ppo_kl": -bounded_gap(gap),
        "rollout_is_mean": weights,
    }


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """The clipped surrogate of a whole row, [S, 1]: s = exp(mean over its tokens of logp -
    old_logp), with the row's mean advantage.

    The gradient goes through s, so a token's share is 1 / length. Source: arXiv 2507.18071, eq. 5
    and 7.
    """
    ratio = bounded_exp(row_mean(inputs.log_ratio, inputs.mask))
    advantage = row_mean(inputs.advantages, inputs.mask)
    loss, clipped = clip_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return loss, {"pg_clipfrac": clipped}


def gspo_token(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """The clipped surrogate per token with the value of the row's ratio and the gradient of the
    token's own log-prob.

    s_t = sg(s) exp(logp - sg(logp)). Source: arXiv 2507.18071, eq. 13 and 14.
    """
    sequence = bounded_exp(row_mean(inputs.log_ratio.detach(), inputs.mask))
    ratio = sequence * torch.exp(inputs.logp - inputs.logp.detach())
    loss, clipped = clip_surrogate(ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"pg_clipfrac": clipped}


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """-A times the geometric mean of a row's token ratios, [S, 1]; A is the row's mean advantage.

    A token's log-ratio is cut at clip_high where A > 0 and at -clip_low where A < 0: only where the
    cut makes the objective smaller. Source: arXiv 2507.20673, eq. 4.
    """
    gap = inputs.log_ratio
    advantage = row_mean(inputs.advantages, inputs.mask)
    clipped = torch.where(advantage > 0, gap > clip_high, (advantage < 0) & (gap < -clip_low))
    clipped_gap = torch.where(advantage > 0, gap.clamp(max=clip_high), gap.clamp(min=-clip_low))
    return -advantage * bounded_exp(row_mean(clipped_gap, inputs.mask)), {"pg_clipfrac": clipped}


def sapo(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> Terms:
    """-A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A (tau_neg where A = 0). Source: arXiv
    2511.20347, eq. 5 and 6."""
    tau = torch.where(
        inputs.advantages > 0, inputs.logp.new_tensor(tau_pos), inputs.logp.new_tensor(tau_neg)
    )
    return -inputs.advantages * torch.sigmoid(tau * (bounded_exp(inputs.log_ratio) - 1.0)) * (
        4.0 / tau
    ), {}
