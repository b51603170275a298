"""Policy losses -w A logp with a weight w that has no gradient: REINFORCE and its descendants. None
of them removes a gradient by a maximum.

Their value means little (its gradient is the policy gradient); the statistics of each show which
tokens it weighs down or leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentevo.algorithms.clipped import clip_bounds
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


def _thresholds(divergence: str, value: float) -> tuple[Hyperparameter, ...]:
    return (
        Hyperparameter(
            "clip_low",
            value,
            f"{divergence} up to which a token of negative advantage still trains",
            low=0.0,
        ),
        Hyperparameter(
            "clip_high",
            value,
            f"{divergence} up to which a token of positive advantage still trains",
            low=0.0,
        ),
        Hyperparameter("cap", 20.0, "largest ratio that counts", low=0.0, low_allowed=False),
    )


@LOSSES.entry(
    meaning="the plain policy gradient; off-policy with an importance correction",
    formula="-A l",
    source="Williams, 'Simple statistical gradient-following algorithms' (1992), eq. 5",
    peers={
        "verl": "bypass_mode with loss_type reinforce (its weights follow the current policy)",
        "Tinker": "importance_sampling",
    },
)
def reinforce(inputs: LossInputs) -> Terms:
    return -inputs.advantages * inputs.logp, {}


@LOSSES.entry(
    meaning="the plain policy gradient, to be used with GPG's advantages",
    formula="-A l",
    source="GPG, arXiv 2504.02546, eq. 6",
    peers={"verl": "gpg"},
)
def gpg(inputs: LossInputs) -> Terms:
    return reinforce(inputs)


@LOSSES.entry(
    meaning="REINFORCE weighted with the clipped ratio: no token loses its gradient",
    formula="-sg(clip(r, 1 - clip_low, 1 + clip_high)) A l",
    source="CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5 (no lower bound: clip_low = 1)",
    hyper=clip_bounds(1.0, 4.0),
    peers={
        "verl": "cispo",
        "TRL": "loss_type cispo: no lower bound, epsilon_high is the largest ratio (5.0 "
        "is our 4.0)",
    },
)
def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.logp, {"pg_clipfrac": weight != ratio}


@LOSSES.entry(
    meaning="trains a token unless its probability has already moved too far in the direction of "
    "its advantage",
    formula="-A sg(min(r, cap)) l where e^l - e^o <= clip_high (A > 0) or e^l - e^o >= -clip_low "
    "(A <= 0), else 0",
    source="DPPO, arXiv 2602.04879 (binary total variation)",
    hyper=_thresholds("change of the token's probability", 0.15),
    peers={
        "verl": "dppo_tv; cap is clip_ratio_c",
        "prime-rl": "its default loss, 0.2 on both sides",
    },
)
def dppo_tv(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> Terms:
    """Log-probs above 0 count as 0 in probabilities."""
    change = _probability(inputs.logp.detach()) - _probability(inputs.old_logp)
    return _dppo(
        inputs, torch.where(inputs.advantages > 0, change <= clip_high, change >= -clip_low), cap
    )


@LOSSES.entry(
    meaning="DPPO with the KL divergence of 'this token or another' as the measure",
    formula="-A sg(min(r, cap)) l where KL <= clip_high or e^l <= e^o (A > 0), KL <= clip_low or "
    "e^l >= e^o (A <= 0), else 0; KL = P (o - l) + (1 - P) log((1 - P) / (1 - e^l)), P = e^o",
    source="DPPO, arXiv 2602.04879 (binary KL)",
    hyper=_thresholds("KL divergence of the token's probability", 0.05),
    peers={"verl": "dppo_kl; cap is clip_ratio_c"},
)
def dppo_kl(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> Terms:
    """1e-8 is added to both probabilities of "another", as in verl."""
    logp = inputs.logp.detach()
    new = _probability(logp)
    old = _probability(inputs.old_logp)
    new_rest, old_rest = (-torch.expm1(x.clamp(max=0.0)) for x in (logp, inputs.old_logp))
    divergence = old * (inputs.old_logp - logp) + old_rest * torch.log(
        (old_rest + 1e-8) / (new_rest + 1e-8)
    )
    up = (divergence <= clip_high) | (new <= old)
    down = (divergence <= clip_low) | (new >= old)
    return _dppo(inputs, torch.where(inputs.advantages > 0, up, down), cap)


@LOSSES.entry(
    meaning="policy gradient with a quadratic pull towards the old policy, no clip",
    formula="-(A l - beta / 2 (l - o)^2)",
    source="Direct Reward Optimisation, arXiv 2405.19107, with the advantage instead of r - V",
    hyper=(Hyperparameter("beta", None, "strength of the pull", low=0.0, low_allowed=False),),
    peers={"verl": "dro with dro_beta", "Tinker": "dro"},
)
def dro(inputs: LossInputs, *, beta: float) -> Terms:
    """The log-ratio is not bounded, since it is squared."""
    return -(inputs.advantages * inputs.logp - 0.5 * beta * inputs.log_ratio.square()), {}


def minirl_keeps(
    inputs: LossInputs,
    *,
    strict_in_bound: bool,
    clip_low: float,
    clip_high: float,
    cap_ratio: float,
) -> torch.Tensor:
    """Trained tokens that are not (r > 1 + (clip_low + clip_high) k and A > 0) or (r < 1 - clip_low
    k and A < 0). [S, T] bool

    k = 1 if strict_in_bound else cap_ratio: the defaults give r in [0.8, 1.3] strictly, [0.2, 2.2]
    otherwise.
    """
    k = 1.0 if strict_in_bound else cap_ratio
    ratio = bounded_exp(inputs.log_ratio.detach())
    left_up = (ratio > 1.0 + (clip_low + clip_high) * k) & (inputs.advantages > 0)
    left_down = (ratio < 1.0 - clip_low * k) & (inputs.advantages < 0)
    return inputs.mask & ~left_up & ~left_down


def minirl_statistics(hyper: Mapping[str, Any]) -> StatisticsFunction | None:
    """The share of the minibatch's trained tokens that are kept, with token_level_loss."""
    if not hyper["token_level_loss"]:
        return None

    names = ("strict_in_bound", "clip_low", "clip_high", "cap_ratio")
    band: dict[str, Any] = {name: hyper[name] for name in names}

    def compute(tables: LossTables) -> dict[str, float]:
        counts = [
            torch.stack([minirl_keeps(inputs, **band).sum(), inputs.mask.sum()])
            for inputs in tables.cleaned_blocks()
        ]
        num_kept, num_trained = torch.stack(counts).sum(0).tolist()
        return {"kept_share": num_kept / max(num_trained, 1)}

    return compute


def minirl_aggregation(hyper: Mapping[str, Any]) -> str:
    """Raises ValueError for switches that contradict each other."""
    if hyper["token_level_loss"] and hyper["skip_length_normalization"]:
        raise ValueError(
            "policy loss minirl: skip_length_normalization does nothing with token_level_loss: "
            "set token_level_loss=False or leave it out"
        )

    if hyper["token_level_loss"]:
        return "token-mean"
    return "seq-mean-token-sum" if hyper["skip_length_normalization"] else "seq-mean-token-mean"


@LOSSES.entry(
    meaning="REINFORCE weighted with the ratio; tokens outside the band in the direction of their "
    "advantage are dropped, also from the denominator",
    formula="-sg(r) A l for tokens in the band, 0 for those with r > 1 + (clip_low + clip_high) "
    "k, A > 0, or r < 1 - clip_low k, A < 0; k = 1 if strict_in_bound else cap_ratio. Over kept "
    "tokens: token-mean if token_level_loss, else mean over sequences of their token mean, or sum "
    "if skip_length_normalization",
    source="MiniRL, arXiv 2512.01374; band and denominators: AgentCPM-Explore, AgentRL's arl.py",
    hyper=(
        Hyperparameter(
            "token_level_loss",
            True,
            "mean over all kept tokens (aggregation token-mean), not first per sequence",
        ),
        Hyperparameter("strict_in_bound", False, "the band is not widened by cap_ratio"),
        Hyperparameter(
            "skip_length_normalization",
            False,
            "sum over a sequence's tokens (aggregation seq-mean-token-sum) instead of their mean",
        ),
        Hyperparameter("clip_low", 0.2, "half-width of the band below 1, before widening", low=0.0),
        Hyperparameter(
            "clip_high", 0.1, "what the band has above 1 beyond clip_low, before widening", low=0.0
        ),
        Hyperparameter(
            "cap_ratio", 4.0, "widens the band, unless strict_in_bound", low=0.0, low_allowed=False
        ),
    ),
    peers={
        "AgentRL": "loss_calculater MINIRL; its o is the engine's log-prob, its "
        "denominators are per micro-batch"
    },
    statistics=minirl_statistics,
    aggregation=minirl_aggregation,
    aggregation_reason="its switches token_level_loss and skip_length_normalization name the "
    "denominator",
)
def minirl(
    inputs: LossInputs,
    *,
    token_level_loss: bool,
    strict_in_bound: bool,
    skip_length_normalization: bool,
    clip_low: float,
    clip_high: float,
    cap_ratio: float,
) -> Terms:
    """The sign is that of a loss: r has no gradient, and minimising raises logp where A > 0.
    Denominators, on top of the aggregation that `minirl_aggregation` names, by scaling the tokens
    that stay: token-mean: trained / kept tokens of the whole minibatch (statistic "kept_share");
    seq-mean-token-mean: trained / kept tokens of the row; seq-mean-token-sum: no scale. Rows
    without kept tokens give 0 and still count as sequences.
    """
    keeps = minirl_keeps(
        inputs,
        strict_in_bound=strict_in_bound,
        clip_low=clip_low,
        clip_high=clip_high,
        cap_ratio=cap_ratio,
    )
    loss = torch.where(
        keeps, -bounded_exp(inputs.log_ratio.detach()) * inputs.advantages * inputs.logp, 0.0
    )
    if token_level_loss:
        share = inputs.statistics["kept_share"]
        loss = loss / share if share else loss
    elif not skip_length_normalization:
        num_trained, num_kept = (
            places.sum(1, keepdim=True).to(loss.dtype) for places in (inputs.mask, keeps)
        )
        loss = loss * (num_trained / num_kept.clamp(min=1.0))

    return loss, {"pg_clipfrac": inputs.mask & ~keeps}


def _probability(logp: torch.Tensor) -> torch.Tensor:
    return torch.exp(logp.clamp(max=0.0))


def _dppo(inputs: LossInputs, valid: torch.Tensor, cap: float) -> Terms:
    weight = torch.where(valid, bounded_exp(inputs.log_ratio.detach()).clamp(max=cap), 0.0)
    return -weight * inputs.advantages * inputs.logp, {"pg_clipfrac": inputs.mask & ~valid}
