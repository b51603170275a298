"""An environment and a recipe for runs that are killed: two quick turns in which every answer has a
reward of its own, so every step has a gradient."""

from __future__ import annotations

import random
import time
import zlib
from typing import Any, ClassVar, Literal

from agentevo.environments.environment import EnvironmentConfig, environments
from agentevo.environments.episode import ActionResult, EpisodicEnvironment
from agentevo.types import Baselines

WORDS = ("red", "green", "blue", "black", "white", "brown", "left", "right", "up", "down")


SMALL: dict[str, Any] = {
    "environment": {"type": "lottery"},
    "model": {
        "name": "tiny",
        "device": "cpu",
        "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "context_length": 256},
    },
    "agent": {"format": "plain", "max_turns": 2},
    "sampling": {"max_new_tokens": 4},
    "algorithm": {"drop_zero_variance": False},
    "trainer": {"steps": 20, "groups_per_step": 2, "group_size": 3, "learning_rate": 3e-3},
    "engine": {"timeout_s": 20, "max_running": 32, "kv_cache_tokens": 4096},
    "evaluation": {"tasks": 1, "every": 0, "samples": 0},
    "checkpoint": {"every": 3, "keep_last": 2},
    "rollout": {"staleness": 2, "lease_s": 1.0, "poll_s": 0.02},
    "tracking": {"tensorboard": False, "report": False},
    "run": {"seed": 5, "threads": 1},
}
"""A recipe with about 40 ms of computing per step."""


def under(policy: str) -> list[str]:
    """Overrides that make SMALL a recipe with that `rollout.policy`."""
    weights = (
        ["algorithm.importance=token_tis", "algorithm.old_logprobs=recomputed"]
        if policy == "correct"
        else []
    )
    return [f"rollout.policy={policy}", *weights]


class LotteryConfig(EnvironmentConfig):
    """Two draws."""

    type: Literal["lottery"] = "lottery"
    max_actions: int = 2
    """Actions after which an episode is truncated."""
    hangs: int = 0
    """One episode in so many never answers; 0: none."""


@environments.register("lottery")
class LotteryEnvironment(EpisodicEnvironment):
    """Pays a reward that is the checksum of seed and answer."""

    Config: ClassVar[type[EnvironmentConfig]] = LotteryConfig
    config: LotteryConfig
    instructions = "Say words."

    def start(self, seed: int) -> None:
        self._seed = seed
        self._said = WORDS[seed % len(WORDS)]

    def observe(self) -> str:
        return f"The last word was {self._said}."

    def act(self, action: str) -> ActionResult:
        if self.config.hangs and self._seed // 4 % self.config.hangs == 0:
            time.sleep(3600.0)
        drawn = zlib.crc32(f"{self._seed}/{action}".encode())
        self._said = WORDS[drawn % len(WORDS)]
        return ActionResult(reward=drawn % 101 / 100, success=drawn % 2 == 0)

    def random_action(self, rng: random.Random) -> str:
        return rng.choice(WORDS)

    def optimal_action(self) -> str | None:
        return None

    def baselines(self, max_actions: int | None = None) -> Baselines:
        return Baselines(random=0.5, optimal=1.0)
