"""Policy losses around a probability ratio that is clipped, gated or averaged: PPO and its
descendants.

Each takes `LossInputs` and returns token losses and per-token statistics, [S, T], or [S, 1] where
one number holds for a whole row. The caller broadcasts, masks and aggregates them. Ratios come from
log-ratios bounded to +-20. The symbols of the formulas are those of loss_inputs.py.
"""

from __future__ import annotations

from agentevo.algorithms.entries import EntryTable, Hyperparameter, Switch
from agentevo.algorithms.importance import bound
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.loss_inputs import (
    LossInputs,
    PolicyLossEntry,
    Terms,
    bounded_exp,
    bounded_gap,
    row_mean,
)

LOSSES = EntryTable("policy loss", PolicyLossEntry)

ONE_RATIO = (
    "it has one ratio per sequence, and its gradient already carries 1/length, so another "
    "aggregation would weigh a sequence by its tokens a second time and break the ratio"
)


def clip_bounds(low: float, high: float) -> tuple[Hyperparameter, Hyperparameter]:
    """The hyper-parameters clip_low and clip_high with these defaults."""
    return (
        Hyperparameter("clip_low", low, "the ratio may fall to 1 - clip_low", low=0.0, high=1.0),
        Hyperparameter("clip_high", high, "the ratio may rise to 1 + clip_high", low=0.0),
    )


def clip_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where the second is larger (no
    gradient there)."""
    push = -advantages
    plain = push * ratio
    clipped = push * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


@LOSSES.entry(
    meaning="PPO's clipped surrogate; two bounds make DAPO's Clip-Higher, dual_clip bounds it "
    "where A < 0",
    formula="max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip c, where A < 0: "
    "min(that, -A c)",
    source="PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv 2503.14476, eq. 10; dual clip: "
    "arXiv 1912.09729, eq. 5",
    hyper=(
        *clip_bounds(0.2, 0.2),
        Switch(
            "dual_clip", 0.0, "largest ratio that counts where A < 0", low=1.0, low_allowed=False
        ),
    ),
    peers={
        "verl": "vanilla; dual_clip is clip_ratio_c",
        "TRL": "loss_type grpo, bnpo, dr_grpo, dapo, luspo; dual_clip is delta",
    },
)
def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Terms:
    loss, clipped = clip_surrogate(
        bounded_exp(inputs.log_ratio), inputs.advantages, clip_low=clip_low, clip_high=clip_high
    )
    if not dual_clip:
        return loss, {"pg_clipfrac": clipped}

    ceiling = -inputs.advantages * dual_clip
    lower = (inputs.advantages < 0) & (loss > ceiling)
    return torch.where(lower, ceiling, loss), {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower}


@LOSSES.entry(
    meaning="PPO around a proximal policy, with importance weights from the sampling policy to "
    "the proximal one",
    formula="w max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(l - p), w = exp(p - "
    "q), bounded by cap",
    source="Hilton et al., arXiv 2110.00641, eq. 5; AReaL, arXiv 2505.24298, eq. 5",
    hyper=(
        *clip_bounds(0.2, 0.2),
        Hyperparameter("cap", 5.0, "largest w", low=0.0, low_allowed=False),
        Hyperparameter(
            "mode",
            "clamp",
            "what happens to w above cap: min(w, cap), or 0",
            choices=("clamp", "mask"),
        ),
    ),
    needs=("proximal_logp", "rollout_logp"),
    peers={
        "AReaL": "use_decoupled_loss with rejection_sampling; without the latter (its "
        "default) w is left out"
    },
)
def decoupled_ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float, mode: str
) -> Terms:
    """w has no gradient."""
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


@LOSSES.entry(
    meaning="one ratio per sequence, clipped; its gradient is shared by the sequence's tokens",
    formula="per sequence: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean_t (l "
    "- o)), A = mean_t A_t",
    source="GSPO, arXiv 2507.18071, eq. 5 and 7",
    hyper=clip_bounds(3e-4, 4e-4),
    peers={
        "verl": "gspo, where a row has one advantage",
        "TRL": "importance_sampling_level=sequence with loss_type grpo",
    },
    aggregation=lambda hyper: "seq-mean-token-mean",
    aggregation_reason=ONE_RATIO + "; gspo_token or ppo_clip is a loss per token",
)
def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """[S, 1]. The gradient goes through s, so a token's share is 1 / length."""
    ratio = bounded_exp(row_mean(inputs.log_ratio, inputs.mask))
    advantage = row_mean(inputs.advantages, inputs.mask)
    loss, clipped = clip_surrogate(ratio, advantage, clip_low=clip_low, clip_high=clip_high)
    return loss, {"pg_clipfrac": clipped}


@LOSSES.entry(
    meaning="GSPO's sequence ratio, each token with an advantage and a gradient of its own",
    formula="max(-A s_t, -A clip(s_t, 1 - clip_low, 1 + clip_high)), s_t = sg(s) exp(l - sg(l)), "
    "s = exp(mean_t (l - o))",
    source="GSPO, arXiv 2507.18071, eq. 13 and 14",
    hyper=clip_bounds(3e-4, 4e-4),
    peers={
        "verl": "gspo",
        "TRL": "importance_sampling_level=sequence with loss_type dapo (no per-token advantages)",
    },
)
def gspo_token(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """s_t has the value of the row's ratio, and the gradient of the token's own log-prob."""
    sequence = bounded_exp(row_mean(inputs.log_ratio.detach(), inputs.mask))
    ratio = sequence * torch.exp(inputs.logp - inputs.logp.detach())
    loss, clipped = clip_surrogate(ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    return loss, {"pg_clipfrac": clipped}


@LOSSES.entry(
    meaning="the geometric mean of the token ratios, each clipped on its pessimistic side",
    formula="per sequence: -A exp(mean_t c_t), c_t = min(l - o, clip_high) if A > 0, max(l - o, "
    "-clip_low) if A < 0; A = mean_t A_t",
    source="GMPO, arXiv 2507.20673, eq. 4",
    hyper=(
        Hyperparameter("clip_low", 0.4, "a token's log-ratio counts from -clip_low on", low=0.0),
        Hyperparameter("clip_high", 0.4, "a token's log-ratio counts up to clip_high", low=0.0),
    ),
    peers={"verl": "geo_mean, bounds 0.2 unless set", "TRL": "trl.experimental.gmpo"},
    aggregation=lambda hyper: "seq-mean-token-mean",
    aggregation_reason=ONE_RATIO + "; ppo_clip is a loss per token",
)
def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """[S, 1]. A token's log-ratio is cut only where the cut makes the objective smaller."""
    gap = inputs.log_ratio
    advantage = row_mean(inputs.advantages, inputs.mask)
    clipped = torch.where(advantage > 0, gap > clip_high, (advantage < 0) & (gap < -clip_low))
    clipped_gap = torch.where(advantage > 0, gap.clamp(max=clip_high), gap.clamp(min=-clip_low))
    return -advantage * bounded_exp(row_mean(clipped_gap, inputs.mask)), {"pg_clipfrac": clipped}


@LOSSES.entry(
    meaning="a smooth gate instead of the clip, sharper for negative advantages",
    formula="-A sigmoid(tau (r - 1)) 4 / tau, tau = tau_pos if A > 0 else tau_neg",
    source="SAPO, arXiv 2511.20347, eq. 5 and 6",
    hyper=(
        Hyperparameter(
            "tau_pos", 1.0, "steepness of the gate where A > 0", low=0.0, low_allowed=False
        ),
        Hyperparameter(
            "tau_neg", 1.05, "steepness of the gate elsewhere", low=0.0, low_allowed=False
        ),
    ),
    peers={"verl": "sapo", "TRL": "loss_type sapo"},
)
def sapo(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> Terms:
    tau = torch.where(
        inputs.advantages > 0, inputs.logp.new_tensor(tau_pos), inputs.logp.new_tensor(tau_neg)
    )
    return -inputs.advantages * torch.sigmoid(tau * (bounded_exp(inputs.log_ratio) - 1.0)) * (
        4.0 / tau
    ), {}
