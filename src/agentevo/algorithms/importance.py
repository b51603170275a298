"""Importance weights: the probability of what was sampled under the policy that is trained, over
that under the policy that sampled it.

They are constants (no gradient), multiply a loss per token, and are a function of a row alone, so
they don't depend on the micro-batch.
"""

from __future__ import annotations

import torch

from agentevo.algorithms.loss_inputs import as_mask, bounded_exp, row_mean
from agentevo.catalogue.policy_losses import check_importance


def importance_weights(
    name: str,
    old_logp: torch.Tensor,
    rollout_logp: torch.Tensor,
    mask: torch.Tensor,
    cap: float = 2.0,
    floor: float = 0.0,
) -> torch.Tensor:
    """Weights [S, T], 0 where mask is 0, without a gradient. With d = old_logp - rollout_logp over
    a row's trained tokens:

    token_*: w_t = exp(d_t). sequence_*: w = exp(sum d), the same for every token of the row.
    geometric_mis: w = exp(mean d). *_tis (truncated) gives min(w, cap). *_mis (masked) gives w
    where floor <= w <= cap, else 0. none: 1. Log-ratios are bounded to +-20 before exp. Sources:
    see `catalogue.policy_losses.IMPORTANCE`.
    """
    check_importance("of any kind", name, cap, floor)
    trained = as_mask("importance_weights", mask, old_logp)
    if rollout_logp.shape != old_logp.shape:
        raise ValueError(
            f"importance_weights: rollout_logp has shape {list(rollout_logp.shape)}, old_logp "
            f"{list(old_logp.shape)}: give the same"
        )
    if name == "none":
        return trained.to(old_logp.dtype)
    wide = torch.promote_types(old_logp.dtype, torch.float32)
    gap = torch.where(trained, old_logp.detach().to(wide) - rollout_logp.detach().to(wide), 0.0)
    return correction(name, gap, trained, cap=cap, floor=floor).to(old_logp.dtype)


def correction(
    name: str, gap: torch.Tensor, mask: torch.Tensor, *, cap: float, floor: float
) -> torch.Tensor:
    """The weights from checked inputs: `gap` = old_logp - rollout_logp, 0 where the bool mask is
    False."""
    if name.startswith("sequence"):
        gap = gap.sum(1, keepdim=True)
    elif name.startswith("geometric"):
        gap = row_mean(gap, mask)
    return torch.where(
        mask,
        bound(bounded_exp(gap), "clamp" if name.endswith("_tis") else "mask", cap=cap, floor=floor),
        0.0,
    )


def bound(weights: torch.Tensor, mode: str, *, cap: float, floor: float = 0.0) -> torch.Tensor:
    """clamp: min(w, cap). mask: w where floor <= w <= cap, else 0."""
    if mode == "clamp":
        return weights.clamp(max=cap)
    return torch.where((weights >= floor) & (weights <= cap), weights, 0.0)


def effective_sample_size(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """1 / mean(w_hat^2), w_hat = w / mean(w), over trained tokens: 1 where all weights are equal,
    1/N where one of N tokens counts, 0 where none does. A scalar tensor. `weights` must be 0 where
    mask is False.
    """
    wide = weights.to(torch.float64)
    return effective_share(wide.sum(), wide.square().sum(), mask.sum())


def effective_share(
    total: torch.Tensor, squares: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """`effective_sample_size` from the sums of the weights and of their squares, float64, over
    `count` tokens. Scalar tensors."""
    spread = squares * count
    return torch.where(
        spread > 0, total.square() / spread.clamp(min=torch.finfo(torch.float64).tiny), 0.0
    )
