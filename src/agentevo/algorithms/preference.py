"""Losses on preferred and rejected answers, from log-probs of whole answers.

All tensors are [P], one entry per pair (or per single answer, for kto): the sum over an answer's
trained tokens, natural logarithms. The loss is the mean over all of them. References are constants.
Sequence log-ratios are not bounded: each loss is written so that none overflows an exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import logsigmoid

from agentevo.catalogue import Value, resolve
from agentevo.catalogue.preference import PREFERENCE_LOSSES

PerPair = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Losses [P], and the numbers that are reported, [P] each."""


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    margin = chosen - rejected
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }


def dpo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
    label_smoothing: float,
) -> PerPair:
    """-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h). Rewards: beta (logp - ref_logp).
    Source: arXiv 2305.18290, eq. 7."""
    chosen = beta * (chosen_logp - ref_chosen_logp)
    rejected = beta * (rejected_logp - ref_rejected_logp)
    margin = chosen - rejected
    losses = -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return losses, _rewards(chosen, rejected)


def bradley_terry(
    *, chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, center: float = 0.0
) -> PerPair:
    """-log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2, of the
    rewards [P] that a reward model gives. Sources: arXiv 2203.02155, eq. 1; the margin: arXiv
    2307.09288, eq. 2; the centre: arXiv 2312.09244, section 2.1."""
    losses = -logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2
    return losses, _rewards(chosen, rejected)


def ipo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
) -> PerPair:
    """(h - 1/(2 beta))^2 with h = the difference of the summed log-ratios: not length-normalised.
    Source: arXiv 2310.12036, eq. 17."""
    chosen = chosen_logp - ref_chosen_logp
    rejected = rejected_logp - ref_rejected_logp
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2, _rewards(beta * chosen, beta * rejected)


def kto(
    *,
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    desirable: torch.Tensor,
    kl_baseline: torch.Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> PerPair:
    """w (1 - sigmoid(+-beta (logp - ref_logp - z))), + and desirable_weight for desirable answers,
    - and undesirable_weight for others.

    z = max(kl_baseline, 0) is a constant: the paper's estimate of KL(policy || reference), the
    batch mean of logp - ref_logp on answers that belong to other prompts. The reward's margin is
    how far an answer is on its right side of z. Source: arXiv 2402.01306, eq. 8.
    """
    reward = beta * (logp - ref_logp)
    sign = torch.where(desirable, torch.ones_like(logp), -1.0)
    margin = sign * (reward - beta * kl_baseline.detach().clamp(min=0.0))
    weight = torch.where(
        desirable, torch.full_like(logp, desirable_weight), undesirable_weight
    )  # of numbers alone: float32
    metrics = {"reward": reward, "reward_margin": margin, "accuracy": (margin > 0).to(margin.dtype)}
    return weight * torch.sigmoid(-margin), metrics


def orpo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    coef: float,
) -> PerPair:
    """-chosen/n_c - coef log sigmoid(log odds_c - log odds_r), odds = P/(1 - P) with P = exp(logp /
    length).

    A mean log-prob above -1e-6 counts as -1e-6 in the odds (without gradient there), so that they
    stay finite. The reward is the log odds. Source: arXiv 2403.07691, eq. 6 and 7.
    """
    chosen = chosen_logp / chosen_lengths
    rejected = rejected_logp / rejected_lengths
    chosen_odds = _log_odds(chosen)
    rejected_odds = _log_odds(rejected)
    return -chosen - coef * logsigmoid(chosen_odds - rejected_odds), _rewards(
        chosen_odds, rejected_odds
    )


def _log_odds(logp: torch.Tensor) -> torch.Tensor:
    logp = logp.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


def spin(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
) -> PerPair:
    """`dpo` with the data's answers as chosen, the opponent's samples as rejected, the opponent as
    reference: arXiv 2401.01335, eq. 4.7."""
    return dpo(
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        ref_chosen_logp=ref_chosen_logp,
        ref_rejected_logp=ref_rejected_logp,
        beta=beta,
        label_smoothing=0.0,
    )


def sppo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    chosen_win_prob: torch.Tensor | None = None,
    rejected_win_prob: torch.Tensor | None = None,
    beta: float,
) -> PerPair:
    """(a - (p_c - 1/2)/beta)^2 + (b - (p_r - 1/2)/beta)^2 with a, b the log-ratios of chosen and
    rejected and p the chance that each beats the opponent; p_c is 1 and p_r is 1 - p_c if not
    given. Source: arXiv 2405.00675 with eta = 1/beta."""
    chosen = chosen_logp - ref_chosen_logp
    rejected = rejected_logp - ref_rejected_logp
    winning = torch.ones_like(chosen_logp) if chosen_win_prob is None else chosen_win_prob.detach()
    losing = 1.0 - winning if rejected_win_prob is None else rejected_win_prob.detach()
    losses = (chosen - (winning - 0.5) / beta) ** 2 + (rejected - (losing - 0.5) / beta) ** 2
    return losses, _rewards(beta * chosen, beta * rejected)


def rft(*, chosen_logp: torch.Tensor, chosen_lengths: torch.Tensor) -> PerPair:
    """-chosen/n_c: the mean negative log-prob per token of each answer. Source: arXiv 2308.01825,
    2304.06767, 2203.14465."""
    return -chosen_logp / chosen_lengths, {}


LOSSES: dict[str, Callable[..., PerPair]] = {
    "dpo": dpo,
    "ipo": ipo,
    "kto": kto,
    "orpo": orpo,
    "spin": spin,
    "sppo": sppo,
    "rft": rft,
}
WIN_PROBS = ("chosen_win_prob", "rejected_win_prob")


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss with its hyper-parameters, checked when it was bound."""

    name: str
    formula: Callable[..., PerPair]
    needs: tuple[str, ...]
    """Names of the inputs that the loss needs."""

    def __call__(
        self, **inputs: torch.Tensor | float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss over the answers, a scalar of the log-probs' dtype, and means of accuracy,
        rewards and their margin (none with rft).

        Inputs are [P] each: summed log-probs of the policy (`*_logp`, `logp`) and of the reference
        (`ref_*`), token counts (`*_lengths`, at least 1), bools (`desirable`), probabilities
        (`*_win_prob`, which only sppo uses and which are optional); `kl_baseline` is one number.
        Inputs that the loss does not use are ignored. Raises ValueError for an input that is
        missing or has the wrong shape.
        """
        missing = [need for need in self.needs if need not in inputs]
        if missing:
            raise ValueError(
                f"preference loss {self.name} needs {', '.join(missing)}: it works on "
                f"{', '.join(self.needs)}"
            )

        policy = inputs[self.needs[0]]
        if not isinstance(policy, torch.Tensor) or policy.dim() != 1:
            raise ValueError(
                f"preference loss {self.name}: {self.needs[0]} must be a tensor of shape [pairs], "
                "one summed log-prob per answer"
            )

        optional = WIN_PROBS if self.name == "sppo" else ()
        used = {
            name: _like(name, value, policy)
            for name, value in inputs.items()
            if name in self.needs or name in optional
        }
        losses, reported = self.formula(**used)
        count = max(len(losses), 1)
        return (losses * (1.0 / count)).sum(), {
            key: value.detach().sum() / count for key, value in reported.items()
        }


def bind_preference_loss(name: str, hyper: Mapping[str, Value]) -> PreferenceLoss:
    """The preference loss of that name; hyper-parameters that are not given are the catalogue's.
    Raises ValueError for an unknown name and for wrong hyper-parameters."""
    settings = resolve("preference loss", PREFERENCE_LOSSES, name, hyper)
    return PreferenceLoss(name, partial(LOSSES[name], **settings), PREFERENCE_LOSSES[name].needs)


def _like(name: str, value: torch.Tensor | float, policy: torch.Tensor) -> torch.Tensor:
    """An input as a tensor of the type and device of the policy's log-probs; without gradient
    unless it is the policy's own."""
    if name == "kl_baseline":
        return torch.as_tensor(value, dtype=policy.dtype, device=policy.device).expand_as(policy)

    if not isinstance(value, torch.Tensor) or value.shape != policy.shape:
        raise ValueError(
            f"{name} must be a tensor of shape {list(policy.shape)}: give one entry per pair"
        )

    if name == "desirable":
        return value.bool()

    if name.endswith("lengths") and bool((value < 1).any()):
        raise ValueError(
            f"{name} has a {value.min().item():g}: an answer without tokens has no log-prob; "
            "leave its pair out"
        )

    if name in WIN_PROBS and not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"{name} must lie between 0 and 1")

    constant = name not in ("chosen_logp", "rejected_logp", "logp")
    return value.detach().to(policy.dtype) if constant else value
