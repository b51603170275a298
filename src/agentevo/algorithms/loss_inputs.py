"""What every policy loss reads: checked tensors, free of whatever stood at untrained places.

Invariant: wherever `mask` is False every tensor is 0, so NaN or garbage there reaches neither a loss nor a gradient. Only `logp` carries a
gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Terms = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What a loss returns: token losses, and statistics per token whose mean over trained tokens is the metric of that name."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are bounded to +- this before exp: no ratio overflows (e^20 = 4.9e8), and beyond it a ratio has no gradient."""


@dataclass(frozen=True)
class LossInputs:
    """Tensors [S, T], one sequence per row."""

    logp: torch.Tensor
    """log-prob of each token now; the only one with a gradient."""
    old_logp: torch.Tensor
    """The same before the update."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """bool, True where a token is trained."""
    rollout_logp: torch.Tensor | None = None
    """As sampled by the engine."""
    proximal_logp: torch.Tensor | None = None
    """Under the policy that the update must stay near."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """What the loss needs to know of the whole minibatch; empty for most losses."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """logp - old_logp. [S, T]"""
        return self.logp - self.old_logp

    def needed(self, name: str, piece: str) -> torch.Tensor:
        """An optional tensor that `piece` can't do without. Raises ValueError."""
        tensor: torch.Tensor | None = getattr(self, name)
        if tensor is None:
            raise ValueError(f"{piece} needs {name}: give it, [S, T] like logp")
        return tensor


def loss_inputs(
    piece: str,
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    rollout_logp: torch.Tensor | None = None,
    proximal_logp: torch.Tensor | None = None,
    statistics: Mapping[str, float] | None = None,
) -> LossInputs:
    """Checks shapes, cleans untrained places, detaches all but `logp`; numbers narrower than float32 are widened to it."""
    if not logp.is_floating_point():
        raise ValueError(f"{piece}: logp is {logp.dtype}: give a floating-point tensor")
    if logp.dim() != 2:
        raise ValueError(f"{piece}: logp has shape {list(logp.shape)}: give [sequences, tokens]")
    dtype = torch.promote_types(logp.dtype, torch.float32)
    trained = as_mask(piece, mask, logp)

    def clean(name: str, tensor: torch.Tensor) -> torch.Tensor:
        _check_shape(piece, name, tensor, logp)
        return torch.where(trained, tensor.to(dtype), 0.0)

    def optional(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else clean(name, tensor.detach())

    return LossInputs(
        logp=clean("logp", logp),
        old_logp=clean("old_logp", old_logp.detach()),
        advantages=clean("advantages", advantages.detach()),
        mask=trained,
        rollout_logp=optional("rollout_logp", rollout_logp),
        proximal_logp=optional("proximal_logp", proximal_logp),
        statistics=dict(statistics or {}),
    )


def as_mask(piece: str, mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`mask` as bool. Raises ValueError where its shape or device is another than `like`'s."""
    _check_shape(piece, "mask", mask, like)
    return mask if mask.dtype == torch.bool else mask != 0


def _check_shape(piece: str, name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(f"{piece}: {name} has shape {list(tensor.shape)}, the log-probs {list(like.shape)}: give the same, [S, T]")
    if tensor.device != like.device:
        raise ValueError(f"{piece}: {name} is on {tensor.device}, the log-probs on {like.device}: move it there")


def bounded_gap(log_ratio: torch.Tensor) -> torch.Tensor:
    """A log-ratio bounded to +- MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of a log-ratio that is first bounded to +- MAX_LOG_RATIO."""
    return torch.exp(bounded_gap(log_ratio))


def row_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over a row's trained tokens, [S, 1]; 0 for an empty row. `values` must be 0 where mask is False."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over all trained tokens, in float64; 0 if there are none. `values` must be 0 where mask is False. A scalar tensor."""
    return values.sum(dtype=torch.float64) / mask.sum().clamp(min=1)
