"""Importance weights: the probability of the sampled tokens under the trained policy, divided by
their probability under the policy that sampled them.

A weight is a constant (no gradient) that multiplies the loss of a token. The weights of a row
depend on that row alone, and not on the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentevo.algorithms.entries import Hyperparameter
from agentevo.algorithms.lazy_torch import torch
from agentevo.algorithms.loss_inputs import bounded_exp, row_mean

IMPORTANCE = (
    Hyperparameter(
        "importance",
        "none",
        "corrects for sampling with another policy",
        choices=("none", "token_tis", "token_mis", "sequence_tis", "sequence_mis", "geometric_mis"),
    ),
    Hyperparameter("importance_cap", 2.0, "largest weight", low=0.0, low_allowed=False),
    Hyperparameter("importance_floor", 0.0, "smallest weight that mis keeps", low=0.0),
)
"""The settings of `bind_importance`. Sources: TIS: Yao et al., "Your efficient RL framework
secretly brings you off-policy RL training" (2025); sequence and geometric masks: Liu et al., "When
speed kills stability" (2025). verl: rollout_is (token, sequence) with rollout_is_threshold,
IcePop's "lo_hi"."""


def _token_log_ratios(gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gap


def _sequence_log_ratio(gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gap.sum(1, keepdim=True)


LEVELS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": _token_log_ratios,
    "sequence": _sequence_log_ratio,
    "geometric": row_mean,
}
"""How each level combines the log-ratios of a row's tokens."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights with their settings; see `bind_importance`."""

    log_ratio: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    mode: str
    """`clamp` or `mask`; see `bound`."""
    cap: float
    floor: float

    def __call__(self, gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Weights [S, T], 0 where the mask is False, without a gradient. `gap` [S, T] = old_logp -
        rollout_logp, 0 where the bool mask is False."""
        ratio = bounded_exp(self.log_ratio(gap.detach(), mask))
        return torch.where(mask, bound(ratio, self.mode, cap=self.cap, floor=self.floor), 0.0)


def bind_importance(name: str, cap: float, floor: float) -> ImportanceWeights | None:
    """The importance weights called `name`; None for "none". With d = old_logp - rollout_logp over
    a row's trained tokens:

    token_*: w_t = exp(d_t). sequence_*: w = exp(sum d), the same for every token of the row.
    geometric_mis: w = exp(mean d). *_tis (truncated) gives min(w, cap). *_mis (masked) gives w
    where floor <= w <= cap, else 0. Log-ratios are bounded to +-20 before exp.
    `check_importance` checks which names and numbers are valid together.
    """
    if name == "none":
        return None
    level, kind = name.split("_")
    return ImportanceWeights(LEVELS[level], "clamp" if kind == "tis" else "mask", cap, floor)


def check_importance(name: str, cap: float, floor: float) -> None:
    """Raises ValueError for an unknown name, values out of range, and a floor that would have no
    effect or keep no token."""
    for hyper, value in zip(IMPORTANCE, (name, cap, floor), strict=True):
        hyper.check("importance weights", value)

    if floor and not name.endswith("_mis"):
        raise ValueError(
            f"importance_floor={floor} does nothing with importance={name}: leave it out, or "
            "choose token_mis"
        )

    if floor > cap:
        raise ValueError(
            f"importance_floor={floor} is above importance_cap={cap}, so no token would train: "
            "swap the two values"
        )


def bound(weights: torch.Tensor, mode: str, *, cap: float, floor: float = 0.0) -> torch.Tensor:
    """clamp: min(w, cap). mask: w where floor <= w <= cap, else 0."""
    if mode == "clamp":
        return weights.clamp(max=cap)
    return torch.where((weights >= floor) & (weights <= cap), weights, 0.0)


def age_decay(ages: torch.Tensor, power: float) -> torch.Tensor:
    """(1 + age)^-power, a factor on the weight of a token that was sampled `age` steps ago. The
    factor of a fresh token is 1.

    Staleness-aware asynchronous SGD (Zhang et al., arXiv 1511.05950) divides the learning rate by a
    gradient's staleness, counted from 1. Power 1 does the same for each token. The factor does not
    measure how far the policy has moved, as the ratio does. It is therefore a deliberate bias
    towards new tokens and not a correction.
    """
    return (1.0 + ages).pow(-power)


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """total^2 / (count * squares), from the sums of `count` weights and of their squares. The
    result is 1 if all weights are equal, 1/N if only one of N weights is not 0, and 0 if all are
    0."""
    return total * total / (count * squares) if squares > 0 else 0.0
