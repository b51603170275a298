"""The recipe's key `tasks.curriculum`: past success rates choose the tasks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from agentevo.runtime.section import Section

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class Curriculum(Section):
    """Samples mostly tasks at the edge of the agent's ability. A task has weight 4 p (1 - p), the
    variance of its success in units of the largest variance: 1 for a task that half of its attempts
    solve. p is (s + 1) / (n + 2) for s successes in n attempts, so an untried task has weight 1."""

    window: int = Field(default=2, ge=1)
    """A task's successes and attempts are those of this many newest steps that played it."""
    retire_after: int = Field(default=2, ge=0)
    """A task retires when all its attempts succeed in this many of its steps in a row. A step plays
    retired tasks only if the others do not fill it. 0 retires none."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The smallest weight of a task that is not retired. It sets how often tasks return that were
    always or never solved."""


def curriculum_contradictions(config: RunConfig) -> list[str]:
    """Contradictions with other sections, as 'what: remedy'."""
    if config.tasks.curriculum is not None and config.rollout.policy != "wait":
        return [
            "tasks.curriculum chooses a step's tasks by the results of earlier steps, but "
            f"rollout.policy={config.rollout.policy} queues tasks without regard to steps: set "
            "rollout.policy=wait, or leave out tasks.curriculum"
        ]
    return []
