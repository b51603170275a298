"""Contradictions in recipes that train by a preference loss, and in recipes that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentevo.algorithms.preference_presets import PREFERENCE_PRESETS, PreferenceAlgorithm

if TYPE_CHECKING:
    from agentevo.config import AlgorithmKeys, RunConfig

OF_RL = (
    "advantage",
    "policy_loss",
    "aggregation",
    "kl_coef",
    "kl",
    "kl_in",
    "kl_target",
    "kl_horizon",
    "entropy_coef",
    "entropy_target",
    "old_logprobs",
    "importance",
    "importance_cap",
    "importance_floor",
    "importance_age_power",
    "train_observations",
    "reward_weights",
    "credit",
    "loss_function",
    "advantage_function",
)
"""Keys of the algorithm section that only advantages and policy losses use."""
OF_PREFERENCE = ("preference_loss", "pairs", "pairs_per_group", "pair_margin")
OF_REFERENCE = ("reference", "reference_model", "reference_every", "reference_decay")


def check_preference_keys(section: AlgorithmKeys, preference: PreferenceAlgorithm | None) -> None:
    """Raises ValueError for keys of the algorithm section that would do nothing."""
    if preference is None:
        idle = _changed_keys(section, OF_PREFERENCE)
        if idle:
            raise ValueError(
                f"{', '.join(idle)} works only with presets that train by a preference loss, and "
                f"name={section.name} does not: remove it, or choose one of "
                f"{', '.join(PREFERENCE_PRESETS)}"
            )

        return

    subject = f"name={section.name} trains by the preference loss {preference.loss}"
    idle = _changed_keys(section, OF_RL)
    if idle:
        beta_hint = (
            "; its pull to the reference is beta"
            if "kl_coef" in idle and preference.needs_reference
            else ""
        )
        raise ValueError(
            f"{subject}, which does not use {', '.join(idle)}: remove it (or set it to its "
            f"default){beta_hint}"
        )

    preset_values = {
        key: value
        for key, value in PREFERENCE_PRESETS[section.name].keys.items()
        if getattr(section, key) == value
    }
    idle = [key for key in _changed_keys(section, OF_REFERENCE) if key not in preset_values]
    if idle and not preference.needs_reference:
        raise ValueError(f"{subject}, which has no reference: remove {', '.join(idle)}")

    if section.pair_margin > 0 and not preference.within_group:
        raise ValueError(
            f"{subject} on {_answers(preference)}, which have no margin: remove pair_margin"
        )

    if section.pairs_per_group is not None and preference.loss == "kto":
        raise ValueError(f"{subject}, which takes every attempt: remove pairs_per_group")


def preference_contradictions(config: RunConfig) -> Iterator[str]:
    """Contradictions of the algorithm section with other sections, as 'what: remedy'."""
    section = config.algorithm
    data = config.data
    preference = section.preference()

    if data.pairs is not None and data.pairs_from is not None:
        yield (
            "data.pairs and data.pairs_from both set the training data: give only one of the two"
        )

    if preference is None:
        if data.given:
            yield (
                "data.pairs and data.pairs_from need a preference loss, and "
                f"algorithm.name={section.name} has none: "
                f"choose one of {', '.join(PREFERENCE_PRESETS)}, or remove them"
            )
        return

    if config.reward_model.name is not None:
        yield (
            f"reward_model.name scores single tokens, which algorithm.name={section.name} does "
            "not use: remove it"
        )

    if preference.pairs == "demonstrations" and data.pairs_from is not None:
        yield (
            "algorithm.pairs=demonstrations lets the environment's solver play sampled tasks, "
            "not stored groups: set algorithm.pairs=best_worst, or remove data.pairs_from"
        )

    idle = (
        []
        if data.pairs is None
        else _changed_keys(section, ("pairs", "pairs_per_group", "pair_margin"))
    )
    if idle:
        yield (
            f"data.pairs sets the pairs, so algorithm.{', algorithm.'.join(idle)} does nothing: "
            "remove it"
        )

    if preference.pairs == "demonstrations" and not data.given and config.environment is None:
        yield (
            "algorithm.pairs=demonstrations needs an environment with a solver: set "
            "algorithm.pairs=best_worst for an agent function"
        )


def _changed_keys(section: AlgorithmKeys, keys: tuple[str, ...]) -> list[str]:
    return [
        key
        for key in keys
        if getattr(section, key)
        != type(section).model_fields[key].get_default(call_default_factory=True)
    ]


def _answers(preference: PreferenceAlgorithm) -> str:
    return "single answers" if preference.pairs is None else preference.pairs
