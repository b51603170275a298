"""The tables, shared by the SQL backends. `SCHEMA_VERSION` grows with every change of them.

`seq` is the order of writing. Blobs are little-endian 4-byte numbers without a header: int32 token ids and versions, float32 log-probs
(`numpy.frombuffer(blob, "<i4")` or `"<f4"`). `messages`, `metrics`, `record` and `task` are JSON text;
`metrics` holds the reward's parts too, as `reward_parts/NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

from agentevo.store.store import SPLITS, TASK_STATES, TRAJECTORY_STATES

SCHEMA_VERSION = 1

metadata = MetaData()


def _one_of(column: str, words: Sequence[str]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(word) for word in words)})")


tasks = Table(
    "tasks",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("task", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("state", String, nullable=False),
    Column("fencing_id", Integer, nullable=False),
    Column("num_leases", Integer, nullable=False),
    Column("worker", String),
    Column("lease_expires_at", Double),
    Column("error", Text),
    _one_of("state", TASK_STATES),
    Index("tasks_by_state", "state"),
    Index("tasks_by_expiry", "state", "lease_expires_at"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("id", String, nullable=False, unique=True),
    Column("task_id", String, nullable=False),
    Column("group_id", String, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("split", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("status", String, nullable=False),
    Column("state", String, nullable=False),
    Column("trained_step", Integer),
    Column("drop_reason", Text),
    Column("reward", Double, nullable=False),
    Column("success", Boolean, nullable=False),
    Column("error", Text),
    Column("truncated", Boolean, nullable=False),
    Column("metrics", Text, nullable=False),
    Column("num_turns", Integer, nullable=False),
    Column("num_completion_tokens", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    _one_of("split", SPLITS),
    _one_of("state", TRAJECTORY_STATES),
    CheckConstraint("(state IN ('reserved', 'committed')) = (trained_step IS NOT NULL)"),
    Index("trajectories_by_step", "step"),
    Index("trajectories_by_trained_step", "trained_step"),
    Index("trajectories_by_split", "split"),
    Index("trajectories_by_state", "state"),
    Index("trajectories_by_state_and_split", "state", "split"),  # with the one above: counts, and each in the order of writing
    Index("trajectories_by_status", "status"),
    Index("trajectories_by_task", "task_id"),
    Index("trajectories_by_group", "group_id"),
)

turns = Table(
    "turns",
    metadata,
    Column("trajectory_seq", ForeignKey("trajectories.seq", ondelete="CASCADE"), primary_key=True),
    Column("turn_index", Integer, primary_key=True),
    Column("parent", Integer),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("completion_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("finish_reason", String, nullable=False),
    Column("temperature", Double, nullable=False),
    Column("seed", String, nullable=False),  # decimal: engines draw 64-bit unsigned seeds, SQL integers are signed
    Column("reward", Double, nullable=False),
    Column("messages", Text, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("record", Text, nullable=False),
    Column("num_trajectories", Integer, nullable=False),
    Column("committed_at", Double, nullable=False),
)
