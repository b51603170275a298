"""Divergence of the policy from a reference per token, and the controller of its coefficient.

d = logp - ref_logp, bounded to +-20 (+-10 in float16, where exp overflows beyond it). The bound is
straight-through: beyond it the value is constant, and the gradient keeps its value at the bound, so
that a token that has moved far is still pulled back. That gradient in logp is 1 (k1), +-1 (abs),
+-20 (k2 and every "+" form), 1 - exp(-20) = 1 above and 1 - exp(20) = -4.9e8 below (k3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from agentevo.algorithms.entries import AlgorithmEntry, EntryTable
from agentevo.algorithms.lazy_torch import torch

BOUND = 20.0

KL = EntryTable("kl", AlgorithmEntry)
"""Each maps d to the estimate, elementwise. In the formulas sg is stop-gradient."""

_SCHULMAN = "Schulman, Approximating KL divergence (2020)"


@KL.entry(
    meaning="log-ratio: unbiased, may be negative",
    formula="d = logp - ref_logp",
    source=f"{_SCHULMAN}, k1",
    peers={"verl": "kl or k1"},
)
def k1(d: torch.Tensor) -> torch.Tensor:
    return d


@KL.entry(
    meaning="half the squared log-ratio: biased, gradient is right on-policy",
    formula="d^2 / 2",
    source=f"{_SCHULMAN}, k2",
    peers={"verl": "mse or k2"},
)
def k2(d: torch.Tensor) -> torch.Tensor:
    return 0.5 * d * d


@KL.entry(
    meaning="unbiased and never negative",
    formula="exp(-d) - 1 + d",
    source=f"{_SCHULMAN}, k3; GRPO, arXiv 2402.03300, eq. 4",
    peers={
        "verl": "low_var_kl or k3",
        "TRL": "the only one of GRPOTrainer (RLOOTrainer: k1 in the reward)",
    },
)
def k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d  # expm1: exp(-d) - 1 loses every digit of a small d


@KL.entry(
    name="abs", meaning="absolute log-ratio", formula="|d|", source="verl", peers={"verl": "abs"}
)
def absolute(d: torch.Tensor) -> torch.Tensor:
    return d.abs()


def _add_with_gradient_of_k2(name: str, formula: str, source: str) -> None:
    """Adds the estimate `name`+, which has the value of `name` and another gradient."""
    value_of: Callable[[torch.Tensor], torch.Tensor] = KL[name].function

    @KL.entry(
        name=f"{name}+",
        meaning=f"the value of {name}, with the gradient of k2, which is that of the KL itself "
        "under on-policy samples",
        formula=formula,
        source=source,
        peers={"verl": f"{name}+"},
    )
    def estimate(d: torch.Tensor) -> torch.Tensor:
        half_square = k2(d)
        return value_of(d).detach() + (half_square - half_square.detach())


_add_with_gradient_of_k2("k1", "sg(d) + d^2/2 - sg(d^2/2)", "verl; arXiv 2510.01555")
_add_with_gradient_of_k2("k2", "d^2 / 2: the same as k2", "verl")
_add_with_gradient_of_k2("k3", "sg(exp(-d) - 1 + d) + d^2/2 - sg(d^2/2)", "verl; arXiv 2510.01555")
_add_with_gradient_of_k2("abs", "sg(|d|) + d^2/2 - sg(d^2/2)", "verl")


def bounded_log_ratio(logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """logp - ref_logp. Its value is bounded to +-20. Its gradient is 1 in logp and 0 in ref_logp
    everywhere. Never NaN for finite input."""
    info = torch.finfo(logp.dtype)
    bound = min(BOUND, math.floor(math.log(info.max)) - 1.0)
    half = info.max / 4  # so that the difference of two finite numbers is finite
    d = logp.clamp(-half, half) - ref_logp.detach().to(logp.dtype).clamp(-half, half)
    return d.detach().clamp(-bound, bound) + (d - d.detach())


KLEstimate: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]"
"""(logp, ref_logp, mask), [S, T] each -> estimate of KL(policy || reference) per token, [S, T] of
logp's dtype, 0 where the bool mask is False, whatever the inputs are there. No gradient flows into
ref_logp. Raises ValueError for different shapes."""


def bind_kl(name: str) -> KLEstimate:
    """The estimate of that name; for values beyond the bound see the module. Raises ValueError for
    an unknown name."""
    of_distance = KL.find(name).function

    def estimate(logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not logp.shape == ref_logp.shape == mask.shape:
            raise ValueError(
                f"logp has shape {list(logp.shape)}, ref_logp {list(ref_logp.shape)}, mask "
                f"{list(mask.shape)}: give all three for the same tokens"
            )

        zero = logp.new_zeros(())
        d = bounded_log_ratio(
            torch.where(mask, logp, zero), torch.where(mask, ref_logp.to(logp.dtype), zero)
        )
        bounded: torch.Tensor = of_distance(d)
        return bounded

    return estimate


class KLController:
    """The coefficient of the KL. With a target, it steers the measured KL towards it (arXiv
    1909.08593, section 2.2); without one it never changes.

    coef <- coef (1 + clip(kl/target - 1, -0.2, 0.2) min(n/horizon, 1)) after a step of n sequences.
    The minimum keeps it above 0 for any n.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 1) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Updates the coefficient; `kl` is the step's mean estimate per token. Raises ValueError if
        it is not finite."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(
                f"kl={kl} over {num_sequences} sequences can't steer the coefficient: leave a "
                "step without a finite KL out"
            )
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * min(num_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores the coefficient. Without a target the configured one holds, so that it may be
        changed on resuming."""
        if self.target is not None:
            self.coef = float(state["coef"])
