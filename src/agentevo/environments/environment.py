"""The environment contract: Gymnasium's reset and step, with text for actions, and text or images
for observations (observation.py).

An environment serves one player. The seed given to `reset` determines everything random in the
environment. A bad action is part of the game, never an exception: `info["valid"]` is false, the
environment does not change, and the action counts.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
import pydantic

from agentevo.environments.observation import Shown
from agentevo.errors import ConfigError, EnvironmentFailure
from agentevo.runtime.registry import Registry
from agentevo.types import Baselines

E = TypeVar("E", bound="TextEnvironment")


class EnvironmentConfig(pydantic.BaseModel):
    """The options of every environment. Subclass it to add options of your own."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Registered name of the environment."""
    max_actions: int = pydantic.Field(default=10, ge=1)
    """Actions after which an unfinished episode is truncated."""

    @property
    def shows_images(self) -> bool:
        """Whether the player is shown images with these options. If so, a run whose model reads
        text only is refused before it begins. False where only an episode tells."""
        return False


class PicturedConfig(EnvironmentConfig):
    """The options of a grid world that can be drawn."""

    observation: Literal["text", "image", "both"] = "text"
    """What the player sees: the `text` that `view` chooses, a picture of the map (`image`), or the
    picture and the text (`both`)."""
    cell_pixels: int = pydantic.Field(default=32, ge=8, le=128)
    """The width and height of a cell in the picture."""

    @property
    def shows_images(self) -> bool:
        return self.observation in ("image", "both")


class TextEnvironment(gymnasium.Env[Shown, str], ABC):
    """A seeded environment with text actions, whose observations are texts or have images.
    Subclasses also describe the rules, a random player and, if there is one, a solver.

    The `info` of `reset` and `step` has `valid: bool` (the action was understood and legal),
    `effective: bool` (it changed the environment) and `success: bool` (the task is solved).
    """

    Config: ClassVar[type[EnvironmentConfig]]
    config: EnvironmentConfig

    def __init__(self, config: EnvironmentConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def instructions(self) -> str:
        """The rules, the legend and the names of actions. The player reads the instructions once,
        before the first observation."""

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]: ...

    @abstractmethod
    def step(self, action: str) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        """Plays an action. Returns (observation, reward, terminated, truncated, info)."""

    def random_action(self, rng: random.Random) -> str:
        """A uniformly random legal action. Raises EnvironmentFailure if the legal actions cannot be
        listed. Only demonstrations with random actions need this method."""
        raise EnvironmentFailure(f"{type(self).__name__} has no random_action()")

    def optimal_action(self) -> str | None:
        """The next action of an optimal player, given the number of actions left. None if there is
        no solver or no way to succeed."""
        return None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        """The success rates of a uniformly random and an optimal player, from the state after
        `reset`, with at most `max_actions` actions (default: the config's). Small environments
        compute the rates exactly, others estimate them by seeded play. An unknown rate is None. The
        episode does not change."""
        return Baselines(random=None, optimal=None)


environments: Registry[type[TextEnvironment]] = Registry("environments")


def environment(name: str) -> Callable[[type[E]], type[E]]:
    """Decorator that registers an environment class under `name`. A recipe imports its module with
    the key `import`. A class without options of its own needs no `Config`.

    Raises ConfigError for an object that cannot be an environment.
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
