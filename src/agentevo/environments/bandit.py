"""RAGEN's two-armed bandit. One arm is dull and always pays a little, and the other is lively and
pays more on average but seldom.

The names hint at the rule (a Phoenix is dull, a Dragon is lively, or the reverse). So a policy that
learned "take the lively one" can be tested with other names. Reward: low arm 0.1; high arm 1.0 with
probability 0.25, else 0. Success: the high arm was chosen.
"""

from __future__ import annotations

import random
from typing import ClassVar, Literal

import pydantic

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import INVALID, ActionResult, EpisodicEnvironment, choose, stream
from agentevo.types import Baselines


class BanditConfig(EnvironmentConfig):
    """Two arms, one pull. For RAGEN's test of other names: `low_arm: Trader`, `high_arm:
    Librarian`."""

    type: Literal["bandit"] = "bandit"
    max_actions: int = pydantic.Field(default=1, ge=1)
    """Actions after which an unfinished episode is truncated."""
    low_arm: str = pydantic.Field(default="Phoenix", min_length=1)
    """Name of the arm that always pays `low_reward`."""
    high_arm: str = pydantic.Field(default="Dragon", min_length=1)
    """Name of the arm that pays `high_reward` with probability `high_probability`."""
    low_reward: float = 0.1
    """The reward of the low arm."""
    high_reward: float = 1.0
    """The reward of the high arm when it pays."""
    high_probability: float = pydantic.Field(default=0.25, ge=0, le=1)
    """The probability that the high arm pays, from 0 to 1."""

    @pydantic.model_validator(mode="after")
    def _check_arms(self) -> BanditConfig:
        if self.low_arm.casefold() == self.high_arm.casefold():
            raise ValueError(
                f"low_arm and high_arm are both {self.low_arm!r}: give the arms different names"
            )

        if self.high_probability * self.high_reward <= self.low_reward:
            raise ValueError(
                "the high arm must pay more on average: raise high_probability or high_reward, "
                "or lower low_reward"
            )

        return self


@environments.register("bandit")
class BanditEnvironment(EpisodicEnvironment):
    """Choose one of two arms, named in random order."""

    Config: ClassVar[type[EnvironmentConfig]] = BanditConfig
    config: BanditConfig

    @property
    def instructions(self) -> str:
        return (
            "You play a bandit machine with two arms. Each arm pays by its own rule, which its "
            "name hints at. Choose the arm that pays "
            "more on average. Your action is the name of one arm."
        )

    def start(self, seed: int) -> None:
        rng = stream(self.config, seed, "world")
        self._arms = [self.config.low_arm, self.config.high_arm]
        rng.shuffle(self._arms)
        self._pays = rng.random() < self.config.high_probability

    def observe(self) -> str:
        return f"The arms are named {self._arms[0]} and {self._arms[1]}. Which arm do you choose?"

    def act(self, action: str) -> ActionResult:
        chosen = choose(action, self._arms)
        if chosen is None:
            return INVALID
        if self._arms[chosen] == self.config.low_arm:
            return ActionResult(reward=self.config.low_reward, terminated=True)
        return ActionResult(
            reward=self.config.high_reward if self._pays else 0.0, terminated=True, success=True
        )

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(self._arms)

    def optimal_action(self) -> str | None:
        return self.config.high_arm

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=0.5, optimal=1.0)
