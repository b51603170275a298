"""The critic's loss."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from agentevo.algorithms.aggregation import aggregation_weights, trained_tokens, weighted_sum
from agentevo.catalogue import Value


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    old_values: torch.Tensor | None = None,
    clip: float | None = 0.2,
    aggregation: str = "token-mean",
    trajectory_ids: Sequence[Hashable] | torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    **hyper: Value,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """0.5 aggregate(max((v - R)^2, (clip(v, old - c, old + c) - R)^2)): squared error, pessimistic
    where v has moved further than `clip`.

    values v, returns R, mask, old_values [S, T]; old_values are those at the start of the step,
    needed unless clip is None (plain squared error). Gradient flows into values only; on a tie of
    both terms it is that of the plain one. `weights` [S, T] replace the aggregation's (this batch's
    rows of the whole batch's `aggregation_weights`); `hyper` are the aggregation's. Loss: scalar of
    the values' dtype. Metrics, over trained tokens: vf_clipfrac = share with the second term above
    the first; explained_variance = 1 - var(R - v)/var(R) (0 if all R are equal); value_mean.
    Source: PPO's published code (baselines ppo2); Schulman et al., arXiv 1707.06347. verl uses clip
    0.5.
    """
    trained = trained_tokens(mask, values.shape)
    for what, tensor in (("returns", returns), ("old_values", old_values)):
        if tensor is not None and tensor.shape != values.shape:
            raise ValueError(
                f"{what} have shape {list(tensor.shape)}, values {list(values.shape)}: give one "
                "per token"
            )
    if clip is not None and old_values is None:
        raise ValueError(
            f"value_loss: clip={clip} needs old_values: give those from the start of the step, "
            "or clip=None for no clipping"
        )
    if clip is not None and not clip > 0:
        raise ValueError(
            f"value_loss: clip={clip} is not possible: give a number above 0, or None for no "
            "clipping"
        )

    zero = values.new_zeros(())
    v = torch.where(trained, values, zero)
    target = torch.where(trained, returns.detach().to(v.dtype), zero)
    plain = (v - target) ** 2
    hit = torch.zeros_like(trained)
    losses = plain
    if clip is not None and old_values is not None:
        old = torch.where(trained, old_values.detach().to(v.dtype), zero)
        clipped = (v.clamp(old - clip, old + clip) - target) ** 2
        hit = clipped > plain
        losses = torch.where(hit, clipped, plain)
    if weights is None:
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        weights = aggregation_weights(
            aggregation, mask, trajectory_ids=trajectory_ids, dtype=dtype, **hyper
        )
    loss = 0.5 * weighted_sum(losses, weights, mask)
    return loss, _metrics(v.detach().double(), target.double(), hit, trained)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """1 - var(returns - values) / var(returns) over trained tokens, all [S, T]; 0 where all returns
    are equal. A float64 scalar."""
    trained = trained_tokens(mask, values.shape)
    v = torch.where(trained, values.detach().double(), 0.0)
    target = torch.where(trained, returns.detach().double(), 0.0)
    count = trained.sum().clamp(min=1)

    def variance(x: torch.Tensor) -> torch.Tensor:
        return (torch.where(trained, x - x.sum() / count, 0.0) ** 2).sum() / count

    highest = torch.where(trained, target, -torch.inf).amax() if target.numel() else v.new_zeros(())
    lowest = torch.where(trained, target, torch.inf).amin() if target.numel() else v.new_zeros(())
    total = variance(target)
    spread = (highest > lowest) & (total > 0)  # equal returns have variance 0, not rounding noise
    return torch.where(spread, 1.0 - variance(target - v) / torch.where(spread, total, 1.0), 0.0)


def _metrics(
    v: torch.Tensor, target: torch.Tensor, hit: torch.Tensor, trained: torch.Tensor
) -> dict[str, torch.Tensor]:
    """All arguments [S, T], v and target 0 where untrained. float64 scalars."""
    count = trained.sum().clamp(min=1)
    return {
        "vf_clipfrac": hit.sum() / count.double(),
        "explained_variance": explained_variance(v, target, trained),
        "value_mean": v.sum() / count,
    }
