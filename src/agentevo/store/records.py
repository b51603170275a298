"""Records of the store: tasks, trajectories and steps with their places in the ledger, leases, and
filters. store.py describes how their states change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, get_args

import msgspec

from agentevo.errors import StoreError
from agentevo.types import Status, Task, Trajectory

Split = Literal["train", "eval", "doctor"]
TaskState = Literal["queued", "leased", "completed", "failed", "poison"]
TrajectoryState = Literal["ready", "reserved", "committed", "dropped", "failed"]

SPLITS: tuple[Split, ...] = get_args(Split)
TASK_STATES: tuple[TaskState, ...] = get_args(TaskState)
TRAJECTORY_STATES: tuple[TrajectoryState, ...] = get_args(TrajectoryState)


class Emptied(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that remain of turns that `gc` has deleted."""

    num_turns: int
    num_completion_tokens: int


class StoredTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory and its place in the ledger."""

    trajectory: Trajectory
    split: Split
    step: int
    """The step that the trajectory was sampled for."""
    state: TrajectoryState
    trained_step: int | None = None
    """The step that the trajectory is reserved for or committed to."""
    drop_reason: str | None = None
    written_at: float
    """Unix time in seconds."""
    tokens_deleted: bool = False
    """Whether `gc` has deleted the turns. `trajectory.turns` is then empty."""
    emptied: Emptied | None = None
    """Facts about the deleted turns, if they were deleted."""
    digest: bytes = b""
    """The digest of the whole content as it was written. Empty if no store has written it.
    `codec.is_as_written` compares the digest with the content."""


class TaskEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of a task."""

    kind: Literal["retried", "expired", "failed"]
    worker: str
    fencing_id: int
    at: float
    """Unix time in seconds."""
    error: str


class StoredTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and its place in the ledger."""

    task: Task
    state: TaskState
    fencing_id: int
    num_leases: int
    num_failures: int
    """The number of leases that `retry_task` returned."""
    num_expiries: int
    """The number of leases that expired and were leased again."""
    error: str | None
    """The error of its failure, of its poisoning, or of its last retry."""
    history: list[TaskEvent]
    digest: bytes = b""
    """The digest of the task as it was added. Empty if no store has it. `codec.is_as_added`
    compares the digest with the task."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often a task is tried again. The n-th retry waits min(first_delay_s * 2^(n-1),
    max_delay_s)."""

    max_failures: int = 5
    """With this many failures, `retry_task` makes the task poison."""
    max_expiries: int = 20
    """A task with this many expired leases becomes poison too, because it may kill its workers. The
    number is larger than max_failures, since workers also end for other reasons."""
    first_delay_s: float = 1.0
    max_delay_s: float = 60.0

    def delay_s(self, num_failures: int) -> float:
        return min(self.first_delay_s * 2.0 ** min(num_failures - 1, 60), self.max_delay_s)


RETRIES = RetryPolicy()


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a stored trajectory except its turns, so thousands of summaries are cheap to
    read. The fields are those of Trajectory and StoredTrajectory."""

    id: str
    task_id: str
    group_id: str
    attempt: int
    split: Split
    step: int
    status: Status
    state: TrajectoryState
    trained_step: int | None
    drop_reason: str | None
    reward: float
    success: bool
    error: str | None
    truncated: bool
    metrics: dict[str, float]
    """The metrics, with the parts of the reward as `reward_parts/NAME`."""
    num_turns: int
    num_completion_tokens: int
    started_at: float
    duration_s: float
    written_at: float


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to work on a task, until another worker leases the task."""

    task: Task
    fencing_id: int
    """Grows with every lease of the task. Only the newest holder may finish the task."""
    attempt: int
    """How often the task has been leased, this lease included."""
    worker: str
    lease_s: float
    expires_at: float
    """In seconds, on the store's clock for leases, which in general is not Unix time. Compare it
    only with other leases, and renew a lease every `lease_s` / 3. An expired lease stays valid
    until another worker leases the task."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed optimizer step."""

    step: int
    record: dict[str, Any]
    """The trainer's data of the step (metrics, checkpoint). Non-finite numbers are stored as
    null."""
    num_trajectories: int
    committed_at: float
    """Unix time in seconds."""


class TrajectoryFilter(TypedDict, total=False):
    """A filter of trajectories, in the order of writing. An absent key or None matches any
    value."""

    step: int | None
    """The step that the trajectories were sampled for."""
    trained_step: int | None
    """The step that the trajectories are reserved for or committed to."""
    split: Split | None
    status: Status | None
    state: TrajectoryState | None
    task_id: str | None
    group_id: str | None
    limit: int | None
    newest_first: bool


def checked_filters(filters: TrajectoryFilter) -> tuple[dict[str, object], int | None, bool]:
    """The filters as (column -> required value, limit, newest_first). Refuses unknown words, so a
    typo never reads as 'no rows'."""
    properties: dict[str, object] = {
        key: value for key, value in filters.items() if value is not None
    }
    limit = filters.get("limit")
    newest_first = bool(filters.get("newest_first"))
    properties.pop("limit", None)
    properties.pop("newest_first", None)
    words: dict[str, Sequence[str]] = {
        "split": SPLITS,
        "status": get_args(Status),
        "state": TRAJECTORY_STATES,
    }
    for key, word in words.items():
        if key in properties and properties[key] not in word:
            raise StoreError(
                f"trajectories: {key}={properties[key]!r} is unknown: use one of {', '.join(word)}"
            )

    if limit is not None and limit < 0:
        raise StoreError(f"trajectories: limit={limit} is negative: leave it out to get all")

    return properties, limit, newest_first
