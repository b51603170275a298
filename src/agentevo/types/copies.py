"""Copies of records for a user's code, which may modify its arguments."""

from __future__ import annotations

import copy

import msgspec

from agentevo.types import Task, Trajectory, Turn
from agentevo.types.turn_columns import TURN_COLUMNS


def copy_of_task(task: Task) -> Task:
    """A task for a user's code. Changes to its answer and metadata do not affect other users of the
    task."""
    return msgspec.structs.replace(
        task, answer=copy.deepcopy(task.answer), metadata=copy.deepcopy(task.metadata)
    )


def copy_of_turn(turn: Turn) -> Turn:
    """A turn for a user's code. Changes to its columns and messages do not affect the record."""
    return msgspec.structs.replace(
        turn,
        messages=list(turn.messages),
        teacher_logprobs=None if turn.teacher_logprobs is None else turn.teacher_logprobs[:],
        **{column: getattr(turn, column)[:] for column in TURN_COLUMNS},
    )


def copy_of_trajectory(trajectory: Trajectory) -> Trajectory:
    """An attempt for a user's code. Changes to it do not affect what is stored or trained."""
    return msgspec.structs.replace(
        trajectory,
        turns=[copy_of_turn(turn) for turn in trajectory.turns],
        remote_turns=copy.deepcopy(trajectory.remote_turns),
        files=dict(trajectory.files),
        texts=dict(trajectory.texts),
        reward_parts=dict(trajectory.reward_parts),
        metrics=dict(trajectory.metrics),
    )
