"""The base class of this package's environments, which keeps the state of one episode.

A subclass implements the start (`start`), the observation (`observe`) and the effect of an action
(`act`). This class counts the actions, truncates at `config.max_actions`, fills `info`, and rejects
a step after the end. Lifecycle:

    reset(seed) -> start -> observe
    step(action) -> act -> observe     until terminated or truncated; then reset(seed) again
"""

from __future__ import annotations

import random
from abc import abstractmethod
from typing import Any, NamedTuple

from agentevo.environments.environment import EnvironmentConfig, TextEnvironment
from agentevo.environments.observation import Shown
from agentevo.errors import EnvironmentFailure


class ActionResult(NamedTuple):
    """The result of one action."""

    reward: float = 0.0
    valid: bool = True
    """Whether the action was understood and legal."""
    effective: bool = True
    """Whether it changed the environment."""
    terminated: bool = False
    """Whether the episode has ended, won or lost."""
    success: bool = False
    truncated: bool = False
    """Whether a limit of the environment has ended the episode."""


class EpisodicEnvironment(TextEnvironment):
    """A base class that implements Gymnasium's `reset` and `step`. Subclasses implement `start`,
    `observe` and `act`. `num_actions` counts the actions of the episode, including invalid ones."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self.num_actions = 0
        self._running = False

    @abstractmethod
    def start(self, seed: int) -> None:
        """Starts the episode of `seed`. Everything random in the episode derives from it."""

    @abstractmethod
    def observe(self) -> Shown:
        """The current state as text, or with images (observation.py)."""

    @abstractmethod
    def act(self, action: str) -> ActionResult:
        """Plays an action without surrounding white space. Return `ActionResult(valid=False)` for
        an action that is not understood."""

    @property
    def actions_left(self) -> int:
        """The number of actions left under `config.max_actions`."""
        return self.config.max_actions - self.num_actions

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        """Starts the episode of `seed`. With None, the operating system provides a seed."""
        self.start(random.SystemRandom().randrange(2**31) if seed is None else seed)
        self.num_actions = 0
        self._running = True
        return self.observe(), {"valid": True, "effective": False, "success": False}

    def step(self, action: str) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        if not self._running:
            raise EnvironmentFailure(
                f"{self.config.type}: step() outside an episode; call reset(seed=...) first"
            )

        self.num_actions += 1
        outcome = self.act(action.strip())
        truncated = not outcome.terminated and (outcome.truncated or self.actions_left <= 0)
        self._running = not (outcome.terminated or truncated)
        info = {"valid": outcome.valid, "effective": outcome.effective, "success": outcome.success}
        return self.observe(), outcome.reward, outcome.terminated, truncated, info


def stream(config: EnvironmentConfig, seed: int, name: str) -> random.Random:
    """The random stream `name` of an environment's seed. Streams of other names, seeds and
    environment types are independent."""
    return random.Random(f"{config.type}/{name}/{seed}")


INVALID = ActionResult(valid=False, effective=False)
"""The result of an action that was not understood: no effect and no reward."""


def choose(action: str, names: tuple[str, ...] | list[str]) -> int | None:
    """The index of the name that equals `action`, ignoring case. None if there is none."""
    folded_action = action.casefold()
    return next(
        (index for index, name in enumerate(names) if name.casefold() == folded_action), None
    )
