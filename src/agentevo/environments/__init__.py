"""Seeded text worlds: the contract (`environment`), our own worlds, and adapters to other people's.

`EnvironmentUnion` is the type of a configuration's `environment` section: our own configs by their `type`, and any environment that another
package registers under the entry-point group `agentevo.environments`. Importing this package imports neither torch nor an optional package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

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

OWN_TYPES = ("bandit", "coins", "countdown", "frozen_lake", "gymnasium", "reasoning_gym", "sokoban", "textarena")


def _tag(value: Any) -> str | None:
    """Which member of the union a section is; None if it doesn't say."""
    name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    if not isinstance(name, str):
        return None
    return name if name in OWN_TYPES else "plugin"


def _plugin_config(value: Any) -> EnvironmentConfig:
    """The section of an environment from another package, checked by that package's config. Raises `UnknownNameError`."""
    if isinstance(value, EnvironmentConfig):
        return value
    return environments.get(value["type"]).Config.model_validate(value)


EnvironmentUnion = Annotated[
    Annotated[BanditConfig, pydantic.Tag("bandit")]
    | Annotated[CoinsConfig, pydantic.Tag("coins")]
    | Annotated[CountdownConfig, pydantic.Tag("countdown")]
    | Annotated[FrozenLakeConfig, pydantic.Tag("frozen_lake")]
    | Annotated[GymnasiumConfig, pydantic.Tag("gymnasium")]
    | Annotated[ReasoningGymConfig, pydantic.Tag("reasoning_gym")]
    | Annotated[SokobanConfig, pydantic.Tag("sokoban")]
    | Annotated[TextArenaConfig, pydantic.Tag("textarena")]
    | Annotated[pydantic.SerializeAsAny[EnvironmentConfig], pydantic.BeforeValidator(_plugin_config), pydantic.Tag("plugin")],
    pydantic.Discriminator(
        _tag,
        custom_error_type="environment_type",
        custom_error_message=f"say which environment: set type to one of {', '.join(OWN_TYPES)}",
    ),
]
"""Any environment's config, chosen by `type`."""


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
