"""The recipe's key `tasks.curriculum`: which tasks a step trains on follows from how often their
attempts succeeded so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from agentevo.config.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class Curriculum(Section):
    """Tasks are drawn at the edge of what the agent can do: with a weight of 4 p (1 - p), which is
    1 for a task that half of its attempts solve and the variance of their success in units of the
    largest. p is (s + 1) / (n + 2) of s successes in n attempts, so a task that nobody has tried
    has weight 1."""

    window: int = Field(default=2, ge=1)
    """So many of the newest steps that played a task say what its success is now."""
    retire_after: int = Field(default=2, ge=0)
    """A task is retired when every attempt of so many steps in a row that played it has succeeded;
    retired ones are played only where no others are left to fill a step. 0 retires none."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The least weight of a task that is not retired: how often tasks come back that were always or
    never solved."""


def curriculum_contradictions(config: RunConfig) -> list[str]:
    """Contradictions with other sections, as 'what: remedy'."""
    if config.tasks.curriculum is not None and config.rollout.policy != "wait":
        return [
            "tasks.curriculum decides by the steps before which tasks a step plays, and "
            f"rollout.policy={config.rollout.policy} queues tasks without regard to steps: set "
            "rollout.policy=wait, or leave out tasks.curriculum"
        ]
    return []
