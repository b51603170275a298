"""Importance weights: the probability of the sampled tokens under the policy that is trained,
divided by that under the policy that sampled them.

They are constants (no gradient), multiply a loss per token, and are a function of a row alone, so
they don't depend on the micro-batch.
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


def _of_token(gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gap


def _of_sequence(gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gap.sum(1, keepdim=True)


LEVELS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": _of_token,
    "sequence": _of_sequence,
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
    """The weights of that name; None for "none". With d = old_logp - rollout_logp over a row's
    trained tokens:

    token_*: w_t = exp(d_t). sequence_*: w = exp(sum d), the same for every token of the row.
    geometric_mis: w = exp(mean d). *_tis (truncated) gives min(w, cap). *_mis (masked) gives w
    where floor <= w <= cap, else 0. Log-ratios are bounded to +-20 before exp.
    `check_importance` says which names and numbers are valid together.
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
            "exchange them"
        )


def bound(weights: torch.Tensor, mode: str, *, cap: float, floor: float = 0.0) -> torch.Tensor:
    """clamp: min(w, cap). mask: w where floor <= w <= cap, else 0."""
    if mode == "clamp":
        return weights.clamp(max=cap)
    return torch.where((weights >= floor) & (weights <= cap), weights, 0.0)


def age_decay(ages: torch.Tensor, power: float) -> torch.Tensor:
    """(1 + age)^-power, the factor on the weight of a token that was drawn `age` steps ago: 1 for a
    fresh token.

    With power 1 it is the learning rate of staleness-aware asynchronous SGD (Zhang et al., arXiv
    1511.05950, which divides it by a gradient's staleness, counted from 1), token by token. Unlike
    the ratio it does not measure how far the policy has moved, so it is a deliberate bias towards
    new tokens, not a correction.
    """
    return (1.0 + ages).pow(-power)


def effective_sample_size(total: float, squares: float, count: float) -> float:
    """total^2 / (count * squares), from the sums of `count` weights and of their squares: 1 where
    all weights are equal, 1/N where one of N tokens counts, 0 where none does."""
    return total * total / (count * squares) if squares > 0 else 0.0
