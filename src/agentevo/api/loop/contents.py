"""Checks of submitted attempts. Seals cover tokens and names; the program writes rewards, metrics
and reasons freely, so no value of those may end the run."""

from __future__ import annotations

import msgspec

from agentevo.api.loop.encoding import decode, encode
from agentevo.errors import LONGEST, ConfigError, shown
from agentevo.rewards.returned_values import MAX_METRIC, plain_number, plain_numbers
from agentevo.types import Task, Trajectory

LONGEST_ID = 1000
"""Characters of a task's or group's id."""


def check_outcome(trajectory: Trajectory, *, is_baseline: bool = False) -> None:
    """Raises ConfigError for an attempt whose outcome can't be trained on or stored. Only a
    baseline may be greedy."""
    try:
        plain_number(trajectory.reward, "its reward")
        plain_numbers(trajectory.reward_parts, "its reward_parts")
        plain_numbers(trajectory.metrics, "its metrics", MAX_METRIC)

        for turn in trajectory.turns:
            plain_number(turn.reward, f"the reward of its turn {turn.index}")

        if trajectory.error is not None and len(trajectory.error) > 2 * LONGEST:
            raise ValueError(f"its error has {len(trajectory.error)} characters")

        outcome = msgspec.structs.replace(trajectory, turns=[], remote_turns=[])
        decode(encode(outcome), Trajectory)  # a program's own objects have no types so far
    except Exception as error:
        raise ConfigError(f"train: the attempt {shown(trajectory.id)}: {error}") from error

    if not is_baseline and any(
        turn.overrides is None and turn.temperature == 0 for turn in trajectory.turns
    ):
        raise ConfigError(
            f"train: the attempt {shown(trajectory.id)} is greedy, which is for evaluation only: "
            f"submit sampled attempts"
        )


def check_task(task: Task) -> None:
    """Raises ConfigError for an invalid task."""
    check_id(task.id, "a task")
    try:
        decode(encode(task), Task)
    except Exception as error:
        raise ConfigError(f"train: the task {shown(task.id)}: {error}") from error


def check_id(name: object, what: str) -> None:
    """Raises ConfigError for an id that is not a text, or is too long."""
    if not isinstance(name, str) or len(name) > LONGEST_ID:
        raise ConfigError(
            f"{shown(name)} is not a valid id of {what}: give a text of at most {LONGEST_ID} "
            f"characters"
        )
