"""A recipe's keys for its own preset, if overrides choose another preset.

Overrides change only what they name, so `algorithm.name=gspo` leaves a recipe's clip_high=0.28,
chosen for GRPO, in a loss whose own value is 0.0004. This is allowed, and the user is warned of it.
An entropy bonus, a critic or the pairs of a preference loss have no meaning for another kind of
preset, and would be refused. They are removed, unless an override sets them: a key in an override
is intended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from agentevo.algorithms.presets import PRESETS
from agentevo.config import sources
from agentevo.config.algorithm import AlgorithmSection
from agentevo.config.field_words import as_yaml
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


def kept_keys(
    tree: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    where: str,
    is_text: Callable[[str], bool],
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """The lines of the warning. Empty if the overrides and `options` (whole sections, applied
    before the overrides) keep the preset of the recipe (`tree`), or if the recipe sets only the new
    preset's own values. The remedy is written for the command line, or for Python if `options` is
    given. `is_text`: as in `sources.merge`."""
    before = sources.merge(tree, [], where=where, is_text=is_text).get("algorithm")
    now = sources.merge(
        sources.overlay(tree, options or {}), overrides, where=where, is_text=is_text
    ).get("algorithm")
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return []

    was, name = (str(section.get("name", AlgorithmSection().name)) for section in (before, now))
    if name == was or name not in PRESETS:
        return []

    changed = changed_keys(
        [*(options or {}).items(), *sources.overridden(overrides, is_text).items()]
    )
    idle = drop_idle_keys({"algorithm": before}, {"algorithm": dict(now)}, changed)
    settings = {f"algorithm.{key}": value for key, value in before.items()}
    lines = []
    if idle:
        left_out = ", ".join(f"{key}={as_yaml(settings[key])}" for key in idle)
        lines.append(
            f"{where} sets keys for algorithm.name={was} that {name} does not use; they are left "
            f"out: {left_out}"
        )

    own = {f"algorithm.{key}": value for key, value in own_values(name).items()}
    kept = {
        f"{key}={as_yaml(value)}": f"{key}={as_yaml(own.get(key))}"
        for key, value in settings.items()
        if key not in idle and key not in changed and value != own.get(key)
    }
    if not kept:
        return lines

    width = max(map(len, kept))
    remedies = list(kept.values())
    return [
        *lines,
        f"{where} sets values for algorithm.name={was}, and they stay in effect with {name}:",
        *(
            f"  {setting:<{width}}  {name}'s own is {remedy.partition('=')[2]}"
            for setting, remedy in kept.items()
        ),
        f"to use {name}'s own, add: "
        f"{' '.join(remedies) if options is None else f'overrides={remedies}'}",
    ]


def own_values(name: str) -> dict[str, Any]:
    """Every key of the algorithm section as the preset sets it, with its entries' defaults."""
    section = AlgorithmSection(name=name)
    preference = section.preference()
    if preference is not None:
        entries = {"preference_loss": preference.loss, "pairs": preference.pairs}
        entries |= preference.hyper
    else:
        algorithm = section.resolve()
        entries = {key: getattr(algorithm, key) for key in PRESETS[name].parts}
        entries |= algorithm.advantage_hyper
        entries |= {**algorithm.loss_hyper, **algorithm.aggregation_hyper}

    values = section.model_dump(mode="json")
    return {key: entries.get(key) if value is None else value for key, value in values.items()}
