"""Presets that train by a preference loss: pairs of answers in place of advantages.

resolve_preference("ipo", {"beta": 0.5})
->  PreferenceAlgorithm(loss="ipo", hyper={"beta": 0.5}, pairs="best_worst")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentevo.catalogue import Value, find, resolve
from agentevo.catalogue.preference import PREFERENCE_LOSSES

Pairs = Literal["best_worst", "all", "demonstrations"]
ALONE = ("kto", "rft")
"""Losses of single answers: they make no pairs."""
DEFAULT_PAIRS: Mapping[str, Pairs] = {"spin": "demonstrations"}
"""The kind of pairs that a group gives, by loss; `best_worst` for the losses that are not named."""


@dataclass(frozen=True)
class PreferencePreset:
    """One published algorithm: a preference loss, its hyper-parameters, and other keys of the
    recipe's algorithm section."""

    name: str
    meaning: str
    source: str
    preference_loss: str
    hyper: Mapping[str, Value] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceAlgorithm:
    """The algorithm that is computed: the loss, every number, and where the answers come from."""

    loss: str
    hyper: Mapping[str, Any]
    pairs: Pairs | None
    """None for a loss of single answers."""

    @property
    def needs_reference(self) -> bool:
        return any(need.startswith("ref_") for need in PREFERENCE_LOSSES[self.loss].needs)

    @property
    def within_group(self) -> bool:
        """Whether an attempt is useless without another one of its group that earned more or
        less."""
        return self.pairs in ("best_worst", "all")


PREFERENCE_PRESETS: Mapping[str, PreferencePreset] = {
    preset.name: preset
    for preset in (
        PreferencePreset(
            "dpo",
            "the best attempt of each group against the worst, on fresh groups (online) or on "
            "given pairs",
            "arXiv 2305.18290; online: 2402.04792",
            "dpo",
        ),
        PreferencePreset(
            "ipo",
            "DPO's pairs with a target gain instead of one as large as possible",
            "arXiv 2310.12036",
            "ipo",
        ),
        PreferencePreset(
            "kto",
            "each attempt alone: desirable where it succeeded, else undesirable",
            "arXiv 2402.01306",
            "kto",
        ),
        PreferencePreset(
            "orpo",
            "imitates the best attempt and lowers the odds of the worst; no reference",
            "arXiv 2403.07691",
            "orpo",
        ),
        PreferencePreset(
            "spin",
            "self-play: the solver's demonstrations against the policy's own attempts; the "
            "reference follows the policy",
            "arXiv 2401.01335",
            "spin",
            keys={"reference": "synced", "reference_every": 10},
        ),
        PreferencePreset(
            "sppo",
            "self-play: log-ratios towards each attempt's chance to beat its group; the "
            "reference follows the policy",
            "arXiv 2405.00675",
            "sppo",
            keys={"reference": "synced", "reference_every": 10},
        ),
        PreferencePreset(
            "rft",
            "rejection-sampling fine-tuning: imitates the best successful attempts of each group",
            "arXiv 2308.01825; RAFT 2304.06767; STaR 2203.14465",
            "rft",
        ),
    )
}


def resolve_preference(
    name: str,
    hyper: Mapping[str, Value],
    *,
    preference_loss: str | None = None,
    pairs: Pairs | None = None,
) -> PreferenceAlgorithm:
    """The preset with the given choices in place of its own; its hyper-parameters count only for
    its own loss. Raises ValueError."""
    preset = PREFERENCE_PRESETS[name]
    loss = preference_loss or preset.preference_loss
    hyper_names = {hyper.name for hyper in find("preference loss", PREFERENCE_LOSSES, loss).hyper}
    inherited = {
        key: value
        for key, value in preset.hyper.items()
        if key in hyper_names and preference_loss is None
    }
    resolved = resolve("preference loss", PREFERENCE_LOSSES, loss, inherited | dict(hyper))
    if loss in ALONE:
        if pairs is not None:
            raise ValueError(
                f"preference loss {loss} takes single answers: remove algorithm.pairs, or choose "
                "a loss of pairs such as dpo"
            )
        return PreferenceAlgorithm(loss, resolved, None)

    return PreferenceAlgorithm(loss, resolved, pairs or DEFAULT_PAIRS.get(loss, "best_worst"))
