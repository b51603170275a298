"""Seeded text environments: the contract (`environment`), AgentEvo's own environments, and adapters
for those of other projects.

Importing this package registers the own environments. It imports neither torch nor an optional
package.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentevo.environments import (  # noqa: F401 (the imports register the environments)
    bandit,
    browser,
    coins,
    countdown,
    frozen_lake,
    gymnasium_adapter,
    openenv_adapter,
    reasoning_gym_adapter,
    sokoban,
    textarena_adapter,
)
from agentevo.environments.environment import EnvironmentConfig, TextEnvironment, environments
from agentevo.types import Baselines

__all__ = ["EnvironmentConfig", "TextEnvironment", "environments", "make", "mean_baselines"]


def make(config: EnvironmentConfig) -> TextEnvironment:
    """The environment that `config` describes. Raises `UnknownNameError`, and `MissingExtraError`
    if an optional package is missing."""
    return environments.get(config.type)(config)


def mean_baselines(
    config: EnvironmentConfig, seeds: Iterable[int], max_actions: int | None = None
) -> Baselines:
    """The mean success rates of the two reference players over the environments of `seeds`. None if
    a rate is unknown. Needs at least one seed."""
    environment = make(config)
    rates: list[Baselines] = []
    for seed in seeds:
        environment.reset(seed=seed)
        rates.append(environment.baselines(max_actions))

    if not rates:
        raise ValueError("mean_baselines needs at least one seed")

    return Baselines(
        random=_mean([rate.random for rate in rates]),
        optimal=_mean([rate.optimal for rate in rates]),
    )


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None
