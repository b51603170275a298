"""The environment contract: Gymnasium's reset and step, with text for observations and actions.

An environment serves one player. The seed given to `reset` decides everything random in it. A bad
action is part of the game, never an exception: `info["valid"]` is false, the environment does not
change, and it still counts as an action.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import gymnasium
import pydantic

from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.registry import Registry
from agentevo.types import Baselines

E = TypeVar("E", bound="TextEnvironment")


class EnvironmentConfig(pydantic.BaseModel):
    """Options shared by every environment; each environment subclasses this with its own `type` and
    difficulty."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Registered name of the environment."""
    max_actions: int = pydantic.Field(default=10, ge=1)
    """Actions after which an unfinished episode is truncated."""


class TextEnvironment(gymnasium.Env[str, str], ABC):
    """A seeded text environment. Subclasses also say how to play it: the actions, a random player,
    a solver.

    `info` of `reset` and `step` holds `valid: bool` (was the action understood and legal),
    `effective: bool` (did it change the environment) and `success: bool` (is the task solved).
    """

    Config: ClassVar[type[EnvironmentConfig]]
    config: EnvironmentConfig

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def instructions(self) -> str:
        """Rules, legend and action names; the player sees them once, before the first
        observation."""

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]: ...

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Returns (observation, reward, terminated, truncated, info)."""

    def random_action(self, rng: random.Random) -> str:
        """An action drawn uniformly from those that a player may take now. Raises
        EnvironmentFailure where they can't be listed; only demonstrations with random actions ask
        for one."""
        raise EnvironmentFailure(f"{type(self).__name__} has no random_action()")

    def optimal_action(self) -> str | None:
        """The action an optimal player takes now with the actions it has left; None where no solver
        exists or nothing can still succeed."""
        return None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        """Success rates, from the state after `reset`, of a uniform random and an optimal player
        with at most `max_actions` actions (default: the config's). Exact where the environment is
        small, else by seeded play; None where unknown. Does not disturb the episode."""
        return Baselines(random=None, optimal=None)


environments: Registry[type[TextEnvironment]] = Registry("environments")


def environment(name: str) -> Callable[[type[E]], type[E]]:
    """Decorator: registers a class as the environment `name`, for recipes that import its module
    (key `import`). One without options of its own needs no `Config`.

    Raises ConfigError for what can't be an environment.
    """

    def add(item: type[E]) -> type[E]:
        if not (inspect.isclass(item) and issubclass(item, TextEnvironment)):
            raise ConfigError(
                f"the environment {name!r} must be a subclass of agentevo.TextEnvironment"
            )

        if "Config" not in vars(item):
            item.Config = pydantic.create_model(
                f"{item.__name__}Config", __base__=EnvironmentConfig, type=(str, name)
            )

        environments.register(name)(item)
        return item

    return add
