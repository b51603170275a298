"""Seeded text worlds: the contract (`environment`), our own worlds, and adapters to other people's.

Importing this package registers our own environments; it imports neither torch nor an optional package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import pydantic

from agentevo.environments.bandit import BanditConfig
from agentevo.environments.coins import CoinsConfig
from agentevo.environments.countdown import CountdownConfig
from agentevo.environments.environment import EnvironmentConfig, TextEnvironment, environments
from agentevo.environments.frozen_lake import FrozenLakeConfig
from agentevo.environments.gymnasium_adapter import GymnasiumConfig
from agentevo.environments.reasoning_gym_adapter import ReasoningGymConfig
from agentevo.environments.sokoban import SokobanConfig
from agentevo.environments.textarena_adapter import TextArenaConfig
from agentevo.types import Baselines

__all__ = ["EnvironmentConfig", "EnvironmentUnion", "TextEnvironment", "environments", "make", "mean_baselines"]

EnvironmentUnion = Annotated[
    BanditConfig
    | CoinsConfig
    | CountdownConfig
    | FrozenLakeConfig
    | GymnasiumConfig
    | ReasoningGymConfig
    | SokobanConfig
    | TextArenaConfig,
    pydantic.Field(discriminator="type"),
]
"""The config of any of our own environments, chosen by `type`."""


def make(config: EnvironmentConfig) -> TextEnvironment:
    """The environment that `config` describes. Raises `UnknownNameError`, or `MissingExtraError` where an optional package is needed."""
    return environments.get(config.type)(config)


def mean_baselines(config: EnvironmentConfig, seeds: Iterable[int], max_actions: int | None = None) -> Baselines:
    """Mean success rates of the two reference players over the worlds of `seeds`; None where one world's is unknown. Needs a seed."""
    environment = make(config)
    rates: list[Baselines] = []
    for seed in seeds:
        environment.reset(seed=seed)
        rates.append(environment.baselines(max_actions))
    if not rates:
        raise ValueError("mean_baselines needs at least one seed")
    return Baselines(random=_mean([rate.random for rate in rates]), optimal=_mean([rate.optimal for rate in rates]))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
