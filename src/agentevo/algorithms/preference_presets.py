"""Presets that train by a preference loss: pairs of answers in place of advantages.

resolve_preference("ipo", {"beta": 0.5})
->  PreferenceAlgorithm(loss="ipo", hyper={"beta": 0.5}, pairs="best_worst")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentevo.algorithms.entries import Value
from agentevo.algorithms.preference import PREFERENCE_LOSSES, Pairs


@dataclass(frozen=True)
class PreferencePreset:
    """One published algorithm: a preference loss, and other keys of the recipe's algorithm
    section."""

    name: str
    meaning: str
    source: str
    preference_loss: str
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
        return PREFERENCE_LOSSES[self.loss].needs_reference

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
    """The preset with the given choices in place of its own. Its loss gets those of `hyper` that it
    has. Raises ValueError for an unknown name and values out of range."""
    loss = preference_loss or PREFERENCE_PRESETS[name].preference_loss
    entry = PREFERENCE_LOSSES.find(loss)
    resolved = PREFERENCE_LOSSES.resolve(
        loss, {key: value for key, value in hyper.items() if key in entry.hyper_names}
    )
    return PreferenceAlgorithm(loss, resolved, entry.pairs and (pairs or entry.pairs))
