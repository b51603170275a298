"""Removes keys that a recipe sets for its own preset only, if overrides choose another preset.

`algorithm.name=dpo` on a recipe of GRPO keeps its clip_high, if DPO has one (`other_preset` warns
about it). An entropy bonus, a critic or the pairs of a preference loss have no meaning for another
kind of preset, and would be refused. They are removed, unless an override sets them: a key in an
override is intended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentevo.algorithms.presets import PRESETS
from agentevo.config.unused_keys import entries_of, unused_keys

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
    if name == old or not isinstance(name, str) or name not in PRESETS:
        return []

    try:
        idle = {*unused_keys(section)}
        entries = entries_of(section)
    except (ValueError, TypeError):
        return []

    if _leaves_out_equal_groups(name, section):
        idle.add("drop_zero_variance")
    needs = entries["advantage"].needs if "advantage" in entries else ()
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


def _leaves_out_equal_groups(name: str, section: Mapping[str, Any]) -> bool:
    """Whether dynamic sampling leaves out the groups that drop_zero_variance=false would keep."""
    rounds = section.get("dynamic_sampling", PRESETS[name].keys.get("dynamic_sampling"))
    return bool(rounds) and section.get("drop_zero_variance") is False


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
