"""Losses on preferred and rejected answers, from log-probs of whole answers.

All tensors are [P], one entry per pair (or per single answer, for kto): the sum over an answer's
trained tokens, natural logarithms. The loss is the mean over all of them. References are constants.
Sequence log-ratios are not bounded: each loss is written so that none overflows an exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentevo.algorithms.entries import AlgorithmEntry, EntryTable, Hyperparameter, Value
from agentevo.algorithms.lazy_torch import torch

PerPair: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
"""Losses [P], and the numbers that are reported, [P] each."""
Pairs = Literal["best_worst", "all", "demonstrations"]

_PAIRS = ("chosen_logp", "rejected_logp")
_REFERENCE = ("ref_chosen_logp", "ref_rejected_logp")
WIN_PROBS = ("chosen_win_prob", "rejected_win_prob")


@dataclass(frozen=True, kw_only=True)
class PreferenceEntry(AlgorithmEntry):
    """A preference loss, (**inputs, **hyper) -> PerPair. `needs` begins with log-probs of the
    policy."""

    optional: tuple[str, ...] = ()
    """Inputs that it uses where they are given."""
    pairs: Pairs | None = "best_worst"
    """The kind of pairs that a group gives by default; None for a loss of single answers."""

    @property
    def needs_reference(self) -> bool:
        return any(need.startswith("ref_") for need in self.needs)


PREFERENCE_LOSSES = EntryTable("preference loss", PreferenceEntry)
_BETA = Hyperparameter("beta", 0.1, "strength of the pull to the reference", 0.0, low_allowed=False)


def _rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    margin = chosen - rejected
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }


@PREFERENCE_LOSSES.entry(
    meaning="the chosen answer should gain more probability over the reference than the rejected "
    "one",
    formula="-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h = (chosen - ref_chosen) - "
    "(rejected - ref_rejected)",
    source="arXiv 2305.18290, eq. 7; label smoothing s: Mitchell, A note on DPO with noisy "
    "preferences (2023)",
    hyper=(
        _BETA,
        Hyperparameter(
            "label_smoothing",
            0.0,
            "probability that a pair is labelled the wrong way round",
            0.0,
            0.5,
        ),
    ),
    needs=(*_PAIRS, *_REFERENCE),
    peers={"TRL": "DPOTrainer loss_type sigmoid"},
)
def dpo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
    label_smoothing: float,
) -> PerPair:
    """Rewards: beta (logp - ref_logp)."""
    chosen = beta * (chosen_logp - ref_chosen_logp)
    rejected = beta * (rejected_logp - ref_rejected_logp)
    margin = chosen - rejected
    losses = -(1.0 - label_smoothing) * torch.nn.functional.logsigmoid(
        margin
    ) - label_smoothing * torch.nn.functional.logsigmoid(-margin)
    return losses, _rewards(chosen, rejected)


def bradley_terry(
    *, chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, center: float = 0.0
) -> PerPair:
    """-log sigmoid(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)^2, of the
    rewards [P] that a reward model gives. Sources: arXiv 2203.02155, eq. 1; the margin: arXiv
    2307.09288, eq. 2; the centre: arXiv 2312.09244, section 2.1."""
    losses = (
        -torch.nn.functional.logsigmoid(chosen - rejected - margin)
        + center * (chosen + rejected) ** 2
    )
    return losses, _rewards(chosen, rejected)


@PREFERENCE_LOSSES.entry(
    meaning="the gain over the rejected answer should be 1/(2 beta), not as large as possible",
    formula="(h - 1/(2 beta))^2, h as in dpo, summed log-probs (not length-normalised)",
    source="arXiv 2310.12036, eq. 17 (its tau is beta)",
    hyper=(
        Hyperparameter(
            "beta",
            0.1,
            "strength of the pull to the reference: 1/(2 beta) is the wanted gain",
            0.0,
            low_allowed=False,
        ),
    ),
    needs=(*_PAIRS, *_REFERENCE),
    peers={"TRL": "DPOTrainer loss_type ipo"},
)
def ipo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
) -> PerPair:
    chosen = chosen_logp - ref_chosen_logp
    rejected = rejected_logp - ref_rejected_logp
    return (chosen - rejected - 1.0 / (2.0 * beta)) ** 2, _rewards(beta * chosen, beta * rejected)


@PREFERENCE_LOSSES.entry(
    meaning="single answers, each desirable or undesirable, against a shared baseline",
    formula="w_d sigmoid(-beta (r - z)) if desirable else w_u sigmoid(beta (r - z)), r = logp - "
    "ref_logp, z = max(kl_baseline, 0)",
    source="arXiv 2402.01306, eq. 8",
    hyper=(
        _BETA,
        Hyperparameter("desirable_weight", 1.0, "weight of desirable answers", 0.0),
        Hyperparameter("undesirable_weight", 1.0, "weight of undesirable answers", 0.0),
    ),
    needs=("logp", "ref_logp", "desirable", "kl_baseline"),
    peers={"TRL": "KTOTrainer"},
    pairs=None,
)
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
    """z is a constant: the paper's estimate of KL(policy || reference), the batch mean of logp -
    ref_logp on answers that belong to other prompts. The reward's margin is how far an answer is on
    its right side of z."""
    reward = beta * (logp - ref_logp)
    sign = torch.where(desirable, torch.ones_like(logp), -1.0)
    margin = sign * (reward - beta * kl_baseline.detach().clamp(min=0.0))
    weight = torch.where(
        desirable, torch.full_like(logp, desirable_weight), undesirable_weight
    )  # of numbers alone: float32
    metrics = {"reward": reward, "reward_margin": margin, "accuracy": (margin > 0).to(margin.dtype)}
    return weight * torch.sigmoid(-margin), metrics


@PREFERENCE_LOSSES.entry(
    meaning="supervised loss on the chosen answer and a penalty on the odds of the rejected one; "
    "no reference",
    formula="-chosen/n_c - coef log sigmoid(log odds_c - log odds_r), odds = P/(1 - P), P = "
    "exp(logp / length)",
    source="arXiv 2403.07691, eq. 6 and 7",
    hyper=(Hyperparameter("coef", 0.1, "weight of the odds-ratio term (lambda)", 0.0),),
    needs=(*_PAIRS, "chosen_lengths", "rejected_lengths"),
    peers={
        "TRL": "ORPOTrainer, its coef is called beta and its supervised loss is a mean "
        "over the batch's tokens"
    },
)
def orpo(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    coef: float,
) -> PerPair:
    """A mean log-prob above -1e-6 counts as -1e-6 in the odds (without gradient there), so that
    they stay finite. The reward is the log odds."""
    chosen = chosen_logp / chosen_lengths
    rejected = rejected_logp / rejected_lengths
    chosen_odds = _log_odds(chosen)
    rejected_odds = _log_odds(rejected)
    return -chosen - coef * torch.nn.functional.logsigmoid(chosen_odds - rejected_odds), _rewards(
        chosen_odds, rejected_odds
    )


def _log_odds(logp: torch.Tensor) -> torch.Tensor:
    logp = logp.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


@PREFERENCE_LOSSES.entry(
    meaning="self-play: DPO of the data's answers (chosen) against the opponent's own samples "
    "(rejected), with it as reference",
    formula="-log sigmoid(beta h), h as in dpo with the opponent's log-probs as reference",
    source="arXiv 2401.01335, eq. 4.7 (its lambda is beta) with the logistic loss",
    hyper=(
        Hyperparameter("beta", 0.1, "strength of the pull to the opponent", 0.0, low_allowed=False),
    ),
    needs=(*_PAIRS, *_REFERENCE),
    peers={"verl": "recipe/spin: online DPO, chosen = the better of two samples"},
    pairs="demonstrations",
)
def spin(
    *,
    chosen_logp: torch.Tensor,
    rejected_logp: torch.Tensor,
    ref_chosen_logp: torch.Tensor,
    ref_rejected_logp: torch.Tensor,
    beta: float,
) -> PerPair:
    return dpo(
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
        ref_chosen_logp=ref_chosen_logp,
        ref_rejected_logp=ref_rejected_logp,
        beta=beta,
        label_smoothing=0.0,
    )


@PREFERENCE_LOSSES.entry(
    meaning="self-play: each answer's log-ratio should be its chance of winning less 1/2, over "
    "beta",
    formula="(a - (p_c - 1/2)/beta)^2 + (b - (p_r - 1/2)/beta)^2, a = chosen - ref_chosen, b = "
    "rejected - ref_rejected, p = chance to beat the opponent (p_c = chosen_win_prob, else 1; p_r "
    "= rejected_win_prob, else 1 - p_c)",
    source="arXiv 2405.00675, its squared loss on the best and the worst of K samples (its eta is "
    "1/beta)",
    hyper=(
        Hyperparameter(
            "beta",
            0.001,
            "strength of the pull to the opponent; the paper's eta = 1000",
            0.0,
            low_allowed=False,
        ),
    ),
    needs=(*_PAIRS, *_REFERENCE),
    peers={
        "TRL": "DPOTrainer loss_type sppo_hard (p = 1)",
        "verl": "recipe/sppo: one sample at a time, rewards less their soft mean for p - 1/2",
    },
    optional=WIN_PROBS,
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
    chosen = chosen_logp - ref_chosen_logp
    rejected = rejected_logp - ref_rejected_logp
    winning = torch.ones_like(chosen_logp) if chosen_win_prob is None else chosen_win_prob.detach()
    losing = 1.0 - winning if rejected_win_prob is None else rejected_win_prob.detach()
    losses = (chosen - (winning - 0.5) / beta) ** 2 + (rejected - (losing - 0.5) / beta) ** 2
    return losses, _rewards(beta * chosen, beta * rejected)


@PREFERENCE_LOSSES.entry(
    meaning="rejection-sampling fine-tuning: supervised loss on answers that were good; no "
    "rejected ones, no reference",
    formula="-chosen/n_c",
    source="arXiv 2308.01825 (RFT), 2304.06767 (RAFT), 2203.14465 (STaR): sample, keep the good, "
    "imitate them",
    needs=("chosen_logp", "chosen_lengths"),
    peers={
        "TRL": "SFTTrainer on the chosen answers, whose mean is over the batch's tokens "
        "and not over answers"
    },
    pairs=None,
)
def rft(*, chosen_logp: torch.Tensor, chosen_lengths: torch.Tensor) -> PerPair:
    return -chosen_logp / chosen_lengths, {}


SINGLE_ANSWER_LOSSES = frozenset(
    name for name, entry in PREFERENCE_LOSSES.items() if entry.pairs is None
)


PreferenceLoss: TypeAlias = Callable[..., PerPair]
"""(**inputs) -> the mean loss over the answers, a scalar of the log-probs' dtype, and means of
accuracy, rewards and their margin (none with rft).

Inputs are [P] each: summed log-probs of the policy (`*_logp`, `logp`) and of the reference
(`ref_*`), token counts (`*_lengths`, at least 1), bools (`desirable`), probabilities (`*_win_prob`,
which only sppo uses and which are optional); `kl_baseline` is one number. Inputs that the loss does
not use are ignored. Raises ValueError for an input that is missing or has the wrong shape."""


def bind_preference_loss(name: str, hyper: Mapping[str, Value]) -> PreferenceLoss:
    """The preference loss of that name; hyper-parameters that are not given are its entry's. Raises
    ValueError for an unknown name and for wrong hyper-parameters."""
    settings = PREFERENCE_LOSSES.resolve(name, hyper)
    entry = PREFERENCE_LOSSES[name]

    def loss(**inputs: torch.Tensor | float) -> PerPair:
        missing = [need for need in entry.needs if need not in inputs]
        if missing:
            raise ValueError(
                f"preference loss {name} needs {', '.join(missing)}: it works on "
                f"{', '.join(entry.needs)}"
            )

        policy = inputs[entry.needs[0]]
        if not isinstance(policy, torch.Tensor) or policy.dim() != 1:
            raise ValueError(
                f"preference loss {name}: {entry.needs[0]} must be a tensor of shape [pairs], "
                "one summed log-prob per answer"
            )

        used = {
            key: _like(key, value, policy)
            for key, value in inputs.items()
            if key in entry.needs or key in entry.optional
        }
        losses, reported = entry.function(**used, **settings)
        count = max(len(losses), 1)
        return (losses * (1.0 / count)).sum(), {
            key: value.detach().sum() / count for key, value in reported.items()
        }

    return loss


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
