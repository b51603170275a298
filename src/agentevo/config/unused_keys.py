"""The keys of the algorithm section that its algorithm does not use.

An algorithm is made of entries: a preset names them, and keys of the section replace them
(`named_parts`). A key that no entry has is refused, with the entries that have it. So a recipe
never sets a number that does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from agentevo.algorithms.entries import FUNCTION, AlgorithmEntry
from agentevo.algorithms.preference import PREFERENCE_LOSSES
from agentevo.algorithms.presets import (
    PREFERENCE_PRESETS,
    PRESETS,
    TABLES,
    chosen_entries,
    hyper_parameters,
)

if TYPE_CHECKING:
    from agentevo.config.algorithm import AlgorithmKeys

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
    "replay_successes",
    "replay_per_task",
    "replay_max_age",
)
"""Keys of the algorithm section that only advantages and policy losses use."""
OF_PREFERENCE = ("preference_loss", "pairs", "pairs_per_group", "pair_margin")
OF_REFERENCE = ("reference", "reference_model", "reference_every", "reference_decay")


def named_parts(section: Mapping[str, Any]) -> dict[str, str]:
    """Key of TABLES -> the entry that the section names in place of the preset's."""
    keys = ("advantage", "policy_loss", "aggregation", "preference_loss")
    parts = {key: section[key] for key in keys if section.get(key)}
    if section.get("credit"):
        parts["advantage"] = "credit"
    elif section.get("advantage_function"):
        parts["advantage"] = FUNCTION
    if section.get("loss_function"):
        parts["policy_loss"] = FUNCTION

    return parts


def entries_of(section: Mapping[str, Any]) -> dict[str, AlgorithmEntry]:
    """Key of TABLES -> the entry that the algorithm of the section uses. Raises ValueError for an
    unknown name of an entry, KeyError for one of a preset."""
    return chosen_entries(section.get("name", "grpo"), named_parts(section))


def unused_keys(section: Mapping[str, Any]) -> dict[str, str]:
    """Key that the algorithm of the section does not use -> a hint in words, or "". Raises as
    `entries_of`."""
    entries = entries_of(section)
    used = set().union(*(entry.hyper_names for entry in entries.values()))
    unused = {key: _owners(key) for key in hyper_parameters() if key not in used}
    if "preference_loss" not in entries:
        presets = f"with a preference loss (name={', '.join(PREFERENCE_PRESETS)})"
        return unused | {key: f"{key} works only {presets}" for key in OF_PREFERENCE}

    unused |= dict.fromkeys(OF_RL, "")
    loss = PREFERENCE_LOSSES[entries["preference_loss"].name]
    if loss.needs_reference:
        unused["kl_coef"] = "the pull to the reference is beta"
    else:
        unused |= dict.fromkeys(OF_REFERENCE, f"preference loss {loss.name} has no reference")

    if loss.pairs is None:
        single = f"preference loss {loss.name} takes single answers, not pairs as dpo does"
        unused |= dict.fromkeys(("pairs", "pair_margin"), single)
    elif (section.get("pairs") or loss.pairs) == "demonstrations":
        unused["pair_margin"] = "demonstrations have no margin"

    if loss.name == "kto":
        unused["pairs_per_group"] = "kto takes every attempt"
    return unused


def check_used_keys(section: AlgorithmKeys) -> None:
    """Raises ValueError for keys that are not at their defaults, nor the preset's, and that the
    algorithm does not use."""
    values = dict(section)
    preset = PRESETS[section.name]
    unused = unused_keys(values)
    idle = [
        key
        for key in keys_off_default(section, tuple(type(section).model_fields))
        if key in unused and not (key in preset.keys and preset.keys[key] == values[key])
    ]
    if not idle:
        return

    entries = entries_of(values)
    parts = ", ".join(f"{TABLES[key].kind} {entry.name}" for key, entry in entries.items())
    own_keys = ", ".join(hyper.name for entry in entries.values() for hyper in entry.hyper)
    hints = dict.fromkeys(hint for key in idle if (hint := unused[key]))
    raise ValueError(
        f"name={section.name} ({parts}) does not use {', '.join(idle)}: remove "
        f"{'it' if len(idle) == 1 else 'them'}. Its hyper-parameters are {own_keys or 'none'}"
        + "".join(f"; {hint}" for hint in hints)
    )


def keys_off_default(section: AlgorithmKeys, keys: tuple[str, ...]) -> list[str]:
    """The keys whose values differ from their defaults."""
    return [
        key
        for key in keys
        if getattr(section, key)
        != type(section).model_fields[key].get_default(call_default_factory=True)
    ]


@cache
def _owners(key: str) -> str:
    """Which entries have the hyper-parameter."""
    owners = [
        f"{table.kind} {', '.join(names)}"
        for table in TABLES.values()
        if (names := [entry.name for entry in table.values() if key in entry.hyper_names])
    ]
    return f"{key} belongs to {', '.join(owners)}"
