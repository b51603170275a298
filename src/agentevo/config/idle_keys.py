"""Removes keys that a recipe sets for its own preset only, if overrides choose another preset.

`algorithm.name=dpo` on a recipe of GRPO keeps its clip_high, if DPO has one (`other_preset` warns
about it). An entropy bonus, a critic or the pairs of a preference loss have no meaning for another
kind of preset, and would be refused. They are removed, unless an override sets them: a key in an
override is intended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentevo.algorithms.aggregation import AGGREGATIONS
from agentevo.algorithms.entries import FUNCTION
from agentevo.algorithms.estimators import ADVANTAGES
from agentevo.algorithms.losses import POLICY_LOSSES
from agentevo.algorithms.preference import PREFERENCE_LOSSES
from agentevo.algorithms.preference_presets import PREFERENCE_PRESETS
from agentevo.algorithms.presets import PRESETS, hyper_parameters
from agentevo.config.preference import OF_PREFERENCE, OF_REFERENCE, OF_RL

SECTIONS = {"critic": "values", "process_reward": "process_rewards"}
"""Section -> the need of an advantage that uses the section."""


def drop_idle_keys(
    before: Mapping[str, Any], now: dict[str, Any], changed: Collection[str]
) -> list[str]:
    """Removes from the tree `now` the keys that the recipe `before` sets for its own preset and
    that the preset of `now` does not use; returns the dotted keys. `changed`: the dotted keys
    that were set since; a section in it means all its keys. Invalid trees stay unchanged: a later
    check refuses them."""
    was = before.get("algorithm")
    section = now.get("algorithm")
    if not isinstance(section, dict) or not (was is None or isinstance(was, Mapping)):
        return []

    name = section.get("name", "grpo")
    old = (was or {}).get("name", "grpo")
    if name == old or not isinstance(name, str) or name not in (*PRESETS, *PREFERENCE_PRESETS):
        return []

    parts = _parts(name, section)
    if parts is None:
        return []

    idle, needs = parts
    dropped = [
        f"algorithm.{key}"
        for key in section
        if key in idle and key in (was or {}) and not _is_changed(f"algorithm.{key}", changed)
    ]
    dropped += [
        key
        for key, need in SECTIONS.items()
        if key in now and key in before and need not in needs and not _is_changed(key, changed)
    ]
    for key in dropped:
        parent, _, leaf = key.rpartition(".")
        del (now[parent] if parent else now)[leaf]

    return dropped


def _is_changed(key: str, changed: Collection[str]) -> bool:
    return any(
        f"{key}.".startswith(f"{changed_key}.") or f"{changed_key}.".startswith(f"{key}.")
        for changed_key in changed
    )


def _parts(name: str, section: Mapping[str, Any]) -> tuple[set[str], tuple[str, ...]] | None:
    """(unused keys of the algorithm section, needs of the advantage); None if the section names
    something unknown."""
    if name in PREFERENCE_PRESETS:
        loss = PREFERENCE_LOSSES.get(
            section.get("preference_loss") or PREFERENCE_PRESETS[name].preference_loss
        )
        if loss is None:
            return None

        idle = {*OF_RL, *(set(hyper_parameters()) - loss.hyper_names)}
        if not loss.needs_reference:
            idle |= {*OF_REFERENCE}

        if loss.pairs is None:
            idle |= {"pairs", "pair_margin", *(["pairs_per_group"] if loss.name == "kto" else [])}
        elif (section.get("pairs") or loss.pairs) == "demonstrations":
            idle |= {"pair_margin"}

        return idle - {*PREFERENCE_PRESETS[name].keys}, ()

    preset = PRESETS[name]
    entries = [
        ADVANTAGES.get(
            FUNCTION
            if section.get("advantage_function")
            else section.get("advantage") or preset.advantage
        ),
        POLICY_LOSSES.get(
            FUNCTION
            if section.get("loss_function")
            else section.get("policy_loss") or preset.policy_loss
        ),
        AGGREGATIONS.get(section.get("aggregation") or preset.aggregation),
    ]
    used = set()
    for entry in entries:
        if entry is None:
            return None
        used |= entry.hyper_names

    assert entries[0] is not None
    idle = {*OF_PREFERENCE, *(set(hyper_parameters()) - used)}
    rounds = section.get("dynamic_sampling", preset.keys.get("dynamic_sampling", 0))
    if (
        rounds and section.get("drop_zero_variance") is False
    ):  # dynamic sampling leaves out groups that this would keep
        idle.add("drop_zero_variance")
    return idle, entries[0].needs


def changed_keys(overrides: Collection[tuple[str, Any]]) -> set[str]:
    """The dotted keys that overrides (key, value) set; for a section that is given as a mapping,
    each key in it."""
    return {
        key
        for name, value in overrides
        for key in (
            [f"{name}.{inner}" for inner in value]
            if isinstance(value, Mapping) and value
            else [name]
        )
    }
