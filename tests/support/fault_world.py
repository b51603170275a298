"""A world for runs that are killed: two quick turns, and every answer pays something else, so that every step has a gradient."""

from __future__ import annotations

import random
import time
import zlib
from typing import ClassVar, Literal

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import EpisodicEnvironment, Outcome
from agentevo.types import Baselines

WORDS = ("red", "green", "blue", "black", "white", "brown", "left", "right", "up", "down")


class LotteryConfig(EnvironmentConfig):
    """Two draws."""

    type: Literal["lottery"] = "lottery"
    max_actions: int = 2
    hangs: int = 0
    """One world in so many never answers; 0: none."""


@environments.register("lottery")
class LotteryEnvironment(EpisodicEnvironment):
    """Pays what the checksum of seed and answer says."""

    Config: ClassVar[type[EnvironmentConfig]] = LotteryConfig
    config: LotteryConfig
    instructions = "Say words."

    def start(self, seed: int) -> None:
        self._seed, self._said = seed, WORDS[seed % len(WORDS)]

    def observe(self) -> str:
        return f"The last word was {self._said}."

    def act(self, action: str) -> Outcome:
        if self.config.hangs and self._seed // 4 % self.config.hangs == 0:
            time.sleep(3600.0)
        drawn = zlib.crc32(f"{self._seed}/{action}".encode())
        self._said = WORDS[drawn % len(WORDS)]
        return Outcome(reward=drawn % 101 / 100, success=drawn % 2 == 0)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(WORDS)

    def optimal_action(self) -> str | None:
        return None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=0.5, optimal=1.0)
