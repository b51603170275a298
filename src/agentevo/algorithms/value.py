"""The critic's loss."""

from __future__ import annotations

from agentevo.algorithms.lazy_torch import torch
from agentevo.types.equality import EQUAL


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    old_values: torch.Tensor | None,
    clip: float | None,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """0.5 sum over trained tokens of weight * max((v - R)^2, (clip(v, old - c, old + c) - R)^2):
    squared error, pessimistic where v has moved further than `clip`.

    values v, returns R, mask (bool), old_values and weights [S, T]; old_values are those at the
    start of the step, needed unless clip is None (plain squared error); weights are this batch's
    rows of the whole minibatch's. Gradient flows into values only; on a tie of both terms it is
    that of the plain one. Loss: scalar of the values' dtype. Metrics, over trained tokens:
    vf_clipfrac = share with the second term above the first; value_mean. Source: PPO's published
    code (baselines ppo2); Schulman et al., arXiv 1707.06347. verl uses clip 0.5.
    """
    tensors = {"returns": returns, "mask": mask, "old_values": old_values, "weights": weights}
    for what, tensor in tensors.items():
        if tensor is not None and tensor.shape != values.shape:
            raise ValueError(
                f"{what}: shape {list(tensor.shape)}, values have {list(values.shape)}: give one "
                "per token"
            )

    if clip is not None and old_values is None:
        raise ValueError(
            f"value_loss: clip={clip} needs old_values: give those from the start of the step, "
            "or clip=None for no clipping"
        )

    zero = values.new_zeros(())
    v = torch.where(mask, values, zero)
    target = torch.where(mask, returns.detach().to(v.dtype), zero)
    plain = (v - target) ** 2
    hit = torch.zeros_like(mask)
    losses = plain
    if clip is not None and old_values is not None:
        old = torch.where(mask, old_values.detach().to(v.dtype), zero)
        clipped = (v.clamp(old - clip, old + clip) - target) ** 2
        hit = clipped > plain
        losses = torch.where(hit, clipped, plain)

    loss = 0.5 * (losses * torch.where(mask, weights, weights.new_zeros(()))).sum().to(v.dtype)
    count = mask.sum().clamp(min=1)
    return loss, {
        "vf_clipfrac": hit.sum() / count.double(),
        "value_mean": v.detach().double().sum() / count,
    }


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """1 - var(returns - values) / var(returns) over trained tokens, all [S, T], mask bool; 0 where
    all returns are equal. A float64 scalar."""
    v = torch.where(mask, values.detach().double(), 0.0)
    target = torch.where(mask, returns.detach().double(), 0.0)
    count = mask.sum().clamp(min=1)

    def variance(x: torch.Tensor) -> torch.Tensor:
        return (torch.where(mask, x - x.sum() / count, 0.0) ** 2).sum() / count

    highest = torch.where(mask, target, -torch.inf).amax() if target.numel() else v.new_zeros(())
    lowest = torch.where(mask, target, torch.inf).amin() if target.numel() else v.new_zeros(())
    total = variance(target)
    slack = EQUAL * target.abs().amax() if target.numel() else v.new_zeros(())
    spread = (highest - lowest > slack) & (total > 0)  # equal returns: not the noise of rounding
    return torch.where(spread, 1.0 - variance(target - v) / torch.where(spread, total, 1.0), 0.0)
