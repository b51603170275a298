"""The agent contract: make one attempt at a task by asking a policy."""

from __future__ import annotations

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
    turn_rewards: dict[int, float] = {}
    """Turn index -> what that turn earned."""
    truncated: bool = False
    """A limit ended it."""
    metrics: dict[str, float] = {}


class Agent(Protocol):
    """Anything that plays. It may raise: the attempt is then recorded as failed and the run goes on."""

    async def run(self, task: Task, policy: Policy) -> Outcome: ...


agents: Registry[type[Agent]] = Registry("agents")
