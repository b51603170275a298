"""The recipe's list `rewards`. Each entry is checked against the options of the registered reward
that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pydantic

from agentevo.config.field_words import read_entry
from agentevo.config.imports import OF_YOUR_OWN
from agentevo.config.sources import plain_option
from agentevo.errors import ConfigError
from agentevo.rewards import RewardConfig, reward, rewards
from agentevo.rewards.reward import reward_config

if TYPE_CHECKING:
    from agentevo.config import RunConfig

Reward: TypeAlias = str | Mapping[str, Any] | pydantic.BaseModel | Callable[..., Any] | type
"""A reward by name, with options, or as a function or class."""


def reward_entry(candidate: Reward) -> Any:
    """The entry of the recipe's list for a reward. A function or class is registered under its own
    name. Raises ConfigError."""
    if isinstance(candidate, (str, Mapping, pydantic.BaseModel)):
        return plain_option(candidate, named=False)

    name = str(getattr(candidate, "__name__", type(candidate).__name__))
    if not callable(candidate) or not name.isidentifier():
        raise ConfigError(
            f"rewards: {candidate!r} has no name: give a function, a class, or the name of a "
            "registered reward"
        )

    if rewards.name_of(candidate) is None:
        reward(name)(candidate)

    return {"name": rewards.name_of(candidate)}


def read_rewards(value: Any) -> tuple[tuple[RewardConfig, ...], list[str]]:
    """Reads the entries. Returns the valid entries and a line about each problem. An entry is a
    name, or a mapping with a name."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    configs: list[RewardConfig] = []
    lines: list[str] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, RewardConfig):
            configs.append(entry)
            continue

        config, problems = read_entry(
            f"rewards[{index}]", entry, rewards.names(), reward_config, OF_YOUR_OWN
        )
        configs += [config] if config is not None else []
        lines += problems

    names = [config.title for config in configs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        lines.append(
            f"rewards: {duplicate} is listed twice: give one entry with a larger weight, or a "
            "different label to each"
        )

    if configs and not lines:
        lines += _stage_problems(configs)

    for index, config in enumerate(configs if not lines else ()):
        for name in config.requires:
            if name == config.title or name not in names:
                other_titles = (
                    ", ".join(title for title in names if title != config.title) or "none"
                )
                lines.append(
                    f"rewards[{index}].requires: got {name!r}; needs another reward of the list: "
                    f"{other_titles}"
                )

    return tuple(configs), lines


def penalty_contradictions(config: RunConfig) -> list[str]:
    """Texts about the agent's penalties that a list of rewards leaves out, each with a remedy."""
    listed = [reward.name for reward in config.rewards]
    if not listed or "returned" in listed:
        return []

    keys = [key for key in ("call_penalty", "code_penalty") if getattr(config.agent, key, 0)]
    return [
        f"agent.{key} is part of the agent's own reward, which `rewards` replaces: add `returned` "
        f"to the list, as in rewards=[{', '.join([*listed, 'returned'])}], or remove {key}"
        for key in keys
    ]


def _stage_problems(configs: Sequence[RewardConfig]) -> list[str]:
    """Finds a reward that ends before it begins, or a step in which no reward counts. Returns at
    most one problem."""
    for index, config in enumerate(configs):
        if config.until_step is not None and config.until_step < config.from_step:
            return [
                f"rewards[{index}].until_step: {config.until_step} is before from_step="
                f"{config.from_step}: swap the two values"
            ]

    if not any(config.counts_at(None) for config in configs):
        return [
            "rewards: no reward counts at the end of the run and in evaluations: remove "
            "until_step from one of them"
        ]

    starts = [1, *(config.until_step + 1 for config in configs if config.until_step is not None)]
    for step in sorted(starts):
        if not any(config.counts_at(step) for config in configs):
            return [
                f"rewards: no reward counts at step {step}: change from_step or until_step so "
                "that there is no gap"
            ]

    return []
