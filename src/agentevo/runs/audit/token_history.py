"""The history of a token in the store: the agent and the weights that sampled it, and the gradient
step that used it, or why none did."""

from __future__ import annotations

import math
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from agentevo.errors import ConfigError, TrainingError
from agentevo.store.records import StepRecord, StoredTask, StoredTrajectory
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan


class TokenHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a token."""

    trajectory: str
    turn: int
    position: int
    """Index of the token in the turn's completion, from 0."""
    token: int
    logprob: float
    version: int
    """Version of the weights that sampled it."""
    seed: int
    """The seed of the request. The token at `position` used the random number `position` of that
    request."""
    task: StoredTask
    attempt: int
    started_at: float
    written_at: float
    """Unix times in seconds."""
    state: str
    trained_step: int | None
    age: int | None
    """The age in versions, at the step that the trajectory was committed to."""
    fate: str
    """The outcome, in words."""
    committed_at: float | None
    checkpoint: str | None
    """The first checkpoint whose weights learned from the token, by the records of the steps."""
    checkpoint_there: bool

    def lines(self) -> list[tuple[str, str]]:
        """Rows of (name, value) to print."""
        task = self.task
        events = [
            f"{event.kind} at {_time(event.at)}, held by {event.worker}: {event.error}"
            for event in task.history
        ]

        learned = "none so far"
        if self.checkpoint is not None:
            learned = self.checkpoint + (
                "" if self.checkpoint_there else " (no longer there: checkpoint.keep_last)"
            )

        return [
            ("task", f"{task.task.id}, {task.state}, leased {task.num_leases} times"),
            *(("", event) for event in events),
            ("attempt", f"{self.attempt}, begun {_time(self.started_at)}: {self.trajectory}"),
            ("turn", f"{self.turn}, request seed {self.seed}"),
            (
                "token",
                f"{self.token} at position {self.position}, log-prob {self.logprob:.4f} "
                f"({math.exp(self.logprob):.2%})",
            ),
            ("weights", f"version {self.version}"),
            ("written", _time(self.written_at)),
            ("fate", self.fate),
            *([("committed", _time(self.committed_at))] if self.committed_at is not None else []),
            ("checkpoint", learned),
        ]


async def follow(
    store: Store, folder: Path, trajectory_id: str, turn: int, position: int
) -> TokenHistory:
    """Raises StoreError for an unknown trajectory, and ConfigError for a token that the trajectory
    does not have."""
    trajectory = await store.trajectory(trajectory_id)
    (stored,) = [
        candidate
        async for candidate in store.trajectories(group_id=trajectory.group_id)
        if candidate.trajectory.id == trajectory_id
    ]
    if not 0 <= turn < len(trajectory.turns):
        raise ConfigError(
            f"{trajectory_id} has {len(trajectory.turns)} turns, counted from 0: there is no "
            f"turn {turn}"
        )

    played_turn = trajectory.turns[turn]
    if not 0 <= position < len(played_turn.completion_ids):
        raise ConfigError(
            f"turn {turn} of {trajectory_id} has {len(played_turn.completion_ids)} tokens, counted "
            f"from 0: there is no {position}"
        )

    version = played_turn.versions[position]
    records = await store.steps()
    record = next(
        (r for r in records if stored.state == "committed" and r.step == stored.trained_step), None
    )
    learned, fate = _fate(stored, record, version)
    if again := [r.step for r in records if trajectory_id in _replayed_in(r)]:
        fate += f"; replayed in step{'s' * (len(again) > 1)} {', '.join(map(str, again))}"
    checkpoint = _first_checkpoint(records, record.step) if learned and record is not None else None

    return TokenHistory(
        trajectory=trajectory_id,
        turn=turn,
        position=position,
        token=played_turn.completion_ids[position],
        logprob=played_turn.logprobs[position],
        version=version,
        seed=played_turn.seed,
        task=await store.stored_task(trajectory.task_id),
        attempt=trajectory.attempt,
        started_at=trajectory.started_at,
        written_at=stored.written_at,
        state=stored.state,
        trained_step=stored.trained_step,
        age=None if record is None else record.step - 1 - version,
        fate=fate,
        committed_at=None if record is None else record.committed_at,
        checkpoint=checkpoint,
        checkpoint_there=checkpoint is not None and (folder / checkpoint).is_dir(),
    )


def _fate(stored: StoredTrajectory, record: StepRecord | None, version: int) -> tuple[bool, str]:
    """Whether a gradient step used it, and the explanation."""
    if stored.state == "dropped":
        return False, f"not trained on: its trajectory was dropped ({stored.drop_reason})"

    if stored.state == "failed":
        return (
            False,
            f"not trained on: its trajectory {stored.trajectory.status} "
            f"({stored.trajectory.error})",
        )

    if stored.split != "train":
        return False, f"not trained on: it is of the split {stored.split}"
    if stored.state == "reserved":
        return False, f"not yet trained on: reserved for step {stored.trained_step}"
    if stored.state == "ready":
        return False, "not yet trained on: ready"
    if record is None:
        return False, f"committed to step {stored.trained_step}, which has no record"

    age = record.step - 1 - version
    try:
        plan = StepPlan.of(record.step, record.record)
    except TrainingError as error:
        return True, f"trained on in step {record.step} at age {age} ({error})"

    if age > plan.staleness:
        return (
            False,
            f"left out of step {record.step}: age {age}, the bound was {plan.staleness}; its "
            "trajectory's reward counted",
        )

    return (
        True,
        f"trained on in step {record.step}, at version {record.step - 1} of the trainer: age "
        f"{age}, the bound was {plan.staleness}",
    )


def _replayed_in(record: StepRecord) -> Collection[str]:
    try:
        return StepPlan.of(record.step, record.record).replayed
    except TrainingError:  # a record of an older version
        return ()


def _first_checkpoint(records: list[StepRecord], step: int) -> str | None:
    named: list[dict[str, Any]] = [
        r.record["checkpoint"] for r in records if r.step >= step and r.record.get("checkpoint")
    ]
    return str(named[0]["path"]) if named else None


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(sep=" ", timespec="milliseconds")
