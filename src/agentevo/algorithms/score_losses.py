"""Policy losses -w A logp with a weight w that has no gradient: REINFORCE and its descendants. None
of them removes a gradient by a maximum.

Their value means little (its gradient is the policy gradient); the statistics of each show which
tokens it weighs down or leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agentevo.algorithms.loss_inputs import LossInputs, LossTables, Terms, bounded_exp


def reinforce(inputs: LossInputs) -> Terms:
    """-A logp. Source: Williams (1992); with GPG's advantages it is GPG's loss, arXiv 2504.02546,
    eq. 6."""
    return -inputs.advantages * inputs.logp, {}


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Terms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp. Source: arXiv 2506.13585, eq. 4 and 5."""
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.logp, {"pg_clipfrac": weight != ratio}


def dppo_tv(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> Terms:
    """-sg(min(r, cap)) A logp while the token's probability has risen by at most clip_high (A > 0)
    or fallen by at most clip_low.

    Source: arXiv 2602.04879, binary total variation. Log-probs above 0 count as 0 in probabilities.
    """
    change = _probability(inputs.logp.detach()) - _probability(inputs.old_logp)
    return _dppo(
        inputs, torch.where(inputs.advantages > 0, change <= clip_high, change >= -clip_low), cap
    )


def dppo_kl(inputs: LossInputs, *, clip_low: float, clip_high: float, cap: float) -> Terms:
    """-sg(min(r, cap)) A logp while the KL divergence of "this token or another" is within the
    bound, or the token moved the other way.

    Source: arXiv 2602.04879, binary KL; 1e-8 is added to both probabilities of "another", as in
    verl.
    """
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


def dro(inputs: LossInputs, *, beta: float) -> Terms:
    """-(A logp - beta / 2 (logp - old_logp)^2); the log-ratio is not bounded, since it is squared.
    Source: arXiv 2405.19107."""
    return -(inputs.advantages * inputs.logp - 0.5 * beta * inputs.log_ratio.square()), {}


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
    """-sg(r) A logp for tokens in the band of `minirl_keeps`, 0 for the others, which leave the
    denominators as well.

    The sign is that of a loss: r has no gradient, and minimising raises logp where A > 0.
    Denominators, on top of the aggregation that `losses.required_aggregation` names, by scaling the
    tokens that stay: token-mean: trained / kept tokens of the whole minibatch (statistic
    "kept_share"); seq-mean-token-mean: trained / kept tokens of the row; seq-mean-token-sum: no
    scale. Rows without kept tokens give 0 and still count as sequences. Source: arXiv 2512.01374;
    band and denominators: AgentCPM-Explore's AgentRL.
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


def minirl_statistics(tables: LossTables, hyper: Mapping[str, object]) -> dict[str, float]:
    """The share of the minibatch's trained tokens that are kept, where the loss needs it
    (token_level_loss)."""
    if not hyper["token_level_loss"]:
        return {}

    band: dict[str, Any] = {
        name: hyper[name] for name in ("strict_in_bound", "clip_low", "clip_high", "cap_ratio")
    }
    counts = [
        torch.stack([minirl_keeps(inputs, **band).sum(), inputs.mask.sum()])
        for inputs in tables.cleaned_blocks()
    ]
    num_kept, num_trained = torch.stack(counts).sum(0).tolist()
    return {"kept_share": num_kept / max(num_trained, 1)}


def _probability(logp: torch.Tensor) -> torch.Tensor:
    return torch.exp(logp.clamp(max=0.0))


def _dppo(inputs: LossInputs, valid: torch.Tensor, cap: float) -> Terms:
    weight = torch.where(valid, bounded_exp(inputs.log_ratio.detach()).clamp(max=cap), 0.0)
    return -weight * inputs.advantages * inputs.logp, {"pg_clipfrac": inputs.mask & ~valid}
