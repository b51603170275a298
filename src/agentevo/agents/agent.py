"""The agent contract: make one attempt at a task by asking a policy."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from agentevo.agents.policy import Policy
from agentevo.registry import Registry
from agentevo.types import Task


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended."""

    reward: float
    """Of the whole attempt, penalties included."""
    success: bool
    reward_parts: dict[str, float] = {}
    """What the reward is the sum of, by name; empty if it is not taken apart. A ValueError if the
    sum is another."""
    turn_rewards: dict[int, float] = {}
    """Turn index -> what that turn earned."""
    truncated: bool = False
    """A limit ended it."""
    metrics: dict[str, float] = {}

    def __post_init__(self) -> None:
        total = sum(self.reward_parts.values())
        if self.reward_parts and not math.isclose(total, self.reward, rel_tol=1e-6, abs_tol=1e-6):
            raise ValueError(
                f"reward_parts {self.reward_parts} sum to {total:g}, but reward is "
                f"{self.reward:g}: "
                "give parts that sum to the reward, or none"
            )


class Agent(Protocol):
    """Anything that plays. It may raise: the attempt is then recorded as failed and the run goes
    on."""

    async def run(self, task: Task, policy: Policy) -> Outcome: ...


agents: Registry[type[Agent]] = Registry("agents")
