"""A recipe's own hyper-parameters under another preset than the one for which they were chosen.

Overrides change only what they name, so `algorithm.name=gspo` leaves a recipe's clip_high=0.28,
chosen for GRPO, in a loss whose own value is 0.0004. This is allowed, and the user is warned of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from agentevo.algorithms.presets import PRESETS
from agentevo.config import sources
from agentevo.config.algorithm import AlgorithmSection
from agentevo.config.preset_keys import changed_keys, drop_idle_keys
from agentevo.config.recipe import config_keys


def kept_keys(
    tree: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    where: str,
    options: Mapping[str, Any] | None = None,
) -> list[str]:
    """The lines of the warning. Empty if the overrides and `options` (whole sections, applied
    before the overrides) keep the preset of the recipe (`tree`), or if the recipe sets only the new
    preset's own values. The remedy is written for the command line, or for Python if `options` is
    given."""
    is_text = config_keys().is_text
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
    section = dict(now)
    idle = drop_idle_keys({"algorithm": before}, {"algorithm": section}, changed)
    dropped = [key.removeprefix("algorithm.") for key in idle]

    return _dropped_lines(before, dropped, where, was, name) + _kept_lines(
        {
            key: value
            for key, value in before.items()
            if key not in dropped and f"algorithm.{key}" not in changed
        },
        where,
        was,
        name,
        in_python=options is not None,
    )


def _dropped_lines(
    settings: Mapping[str, Any], dropped: Sequence[str], where: str, was: str, name: str
) -> list[str]:
    written = ", ".join(_written(key, settings[key]) for key in dropped)
    line = (
        f"{where} sets keys for algorithm.name={was} that {name} does not use; they are left out: "
        f"{written}"
    )
    return [line] if dropped else []


def _kept_lines(
    settings: Mapping[str, Any], where: str, was: str, name: str, *, in_python: bool
) -> list[str]:
    """About the keys of `settings` that are not the preset's own."""
    preset_values = own_values(name)
    retained = {key: value for key, value in settings.items() if value != preset_values.get(key)}
    if not retained:
        return []

    width = max(len(_written(key, value)) for key, value in retained.items())
    remedies = [_written(key, preset_values.get(key)) for key in retained]
    return [
        f"{where} sets values for algorithm.name={was}, and they stay in effect with {name}:",
        *(
            f"  {_written(key, value):<{width}}  {name}'s own is {_yaml(preset_values.get(key))}"
            for key, value in retained.items()
        ),
        f"to use {name}'s own, add: {f'overrides={remedies}' if in_python else ' '.join(remedies)}",
    ]


def own_values(name: str) -> dict[str, Any]:
    """Every key of the algorithm section as the preset sets it, with its entries' defaults."""
    section = AlgorithmSection(name=name)
    values = section.model_dump(mode="json")

    preference = section.preference()
    if preference is not None:
        entries = {
            "preference_loss": preference.loss,
            "pairs": preference.pairs,
            **preference.hyper,
        }
    else:
        algorithm = section.resolve()
        entries = {
            "advantage": algorithm.advantage,
            "policy_loss": algorithm.policy_loss,
            "aggregation": algorithm.aggregation,
        }
        entries |= {
            **algorithm.advantage_hyper,
            **algorithm.loss_hyper,
            **algorithm.aggregation_hyper,
        }

    return {key: entries.get(key) if value is None else value for key, value in values.items()}


def _written(key: str, value: object) -> str:
    return f"algorithm.{key}={_yaml(value)}"


def _yaml(value: object) -> str:
    """The value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
