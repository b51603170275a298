"""The tables, shared by the SQL backends. `SCHEMA_VERSION` grows with each change, and
`migrations.py` has the steps between versions.

`seq` is the order of writing. `tokens.data` is a trajectory's turns (blobs.py). `metrics`,
`record`, `task` and `history` are JSON text. `metrics` includes the parts of the reward as
`reward_parts/NAME`. Times of leases are on the store's steady clock (clock.py). All other times are
Unix times. `not_before` is 0 for a task that does not wait. It is never NULL, so an index can
distinguish such tasks and keep their order.

A call names its trajectory without a foreign key, because it is written before the trajectory.
`calls.seen_at` is the time on the steady clock when its recorder last reported the call as running.
It is NULL after the call has ended. image_rows.py describes `images` and `image_uses`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator

from agentevo.store.records import SPLITS, TASK_STATES, TRAJECTORY_STATES

SCHEMA_VERSION = 4

metadata = MetaData()

BIG = BigInteger().with_variant(Integer(), "sqlite")
"""64 bits. SQLite's own integers have 64 bits, and only they count as a primary key there."""


class ExactText(TypeDecorator[str]):
    """Text that may contain NUL, which tools print and PostgreSQL refuses. On PostgreSQL alone, a
    backslash is doubled, and NUL becomes backslash and 0."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\\", "\\\\").replace("\0", "\\0")

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or dialect.name != "postgresql" or "\\" not in value:
            return value
        return "\\".join(part.replace("\\0", "\0") for part in value.split("\\\\"))


def _one_of(column: str, words: Sequence[str]) -> CheckConstraint:
    return CheckConstraint(f"{column} IN ({', '.join(repr(word) for word in words)})")


tasks = Table(
    "tasks",
    metadata,
    Column("seq", BIG, primary_key=True),
    Column("id", ExactText, nullable=False, unique=True),
    Column("task", ExactText, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("fencing_id", BIG, nullable=False),
    Column("num_leases", BIG, nullable=False),
    Column("num_failures", BIG, nullable=False),
    Column("num_expiries", BIG, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("worker", ExactText),
    Column("lease_started_at", Double),
    Column("lease_expires_at", Double),
    Column("error", ExactText),
    Column("history", ExactText, nullable=False),
    _one_of("state", TASK_STATES),
    Index("tasks_to_lease", "state", "not_before", "seq"),
    Index("tasks_by_state", "state", "seq"),
    Index("tasks_by_expiry", "state", "lease_expires_at"),
    Index("tasks_by_start", "state", "lease_started_at"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("seq", BIG, primary_key=True),
    Column("id", ExactText, nullable=False, unique=True),
    Column("task_id", ExactText, nullable=False),
    Column("group_id", ExactText, nullable=False),
    Column("attempt", BIG, nullable=False),
    Column("split", Text, nullable=False),
    Column("step", BIG, nullable=False),
    Column("status", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("trained_step", BIG),
    Column("drop_reason", ExactText),
    Column("reward", Double, nullable=False),
    Column("success", Boolean, nullable=False),
    Column("error", ExactText),
    Column("truncated", Boolean, nullable=False),
    Column("metrics", ExactText, nullable=False),
    Column("num_turns", BIG, nullable=False),
    Column("num_completion_tokens", BIG, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("duration_s", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    _one_of("split", SPLITS),
    _one_of("state", TRAJECTORY_STATES),
    CheckConstraint("(state IN ('reserved', 'committed')) = (trained_step IS NOT NULL)"),
    Index("trajectories_by_step", "step", "seq"),
    Index("trajectories_by_trained_step", "trained_step", "seq"),
    Index("trajectories_by_split", "split", "seq"),
    Index("trajectories_by_state", "state", "seq"),
    Index(
        "trajectories_by_place", "state", "split", "seq", "num_turns"
    ),  # for counts, and for the walk over ready rows
    Index("trajectories_by_status", "status", "seq"),
    Index("trajectories_by_task", "task_id", "seq"),
    Index("trajectories_by_group", "group_id", "seq"),
)

tokens = Table(
    "tokens",
    metadata,
    Column(
        "trajectory_seq",
        ForeignKey("trajectories.seq", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("data", LargeBinary, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("step", BIG, primary_key=True, autoincrement=False),
    Column("record", ExactText, nullable=False),
    Column("num_trajectories", BIG, nullable=False),
    Column("committed_at", Double, nullable=False),
)

calls = Table(
    "calls",
    metadata,
    Column("seq", BIG, primary_key=True),
    Column("trajectory_id", ExactText, nullable=False),
    Column("id", ExactText, nullable=False),
    Column("parent", ExactText),
    Column("kind", ExactText, nullable=False),
    Column("name", ExactText, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("status", Text),
    Column("error", ExactText),
    Column("attributes", ExactText, nullable=False),
    Column("seen_at", Double),
    UniqueConstraint("trajectory_id", "id"),
)
Index(
    "calls_by_seen",
    calls.c.seen_at,
    sqlite_where=calls.c.seen_at.is_not(None),
    postgresql_where=calls.c.seen_at.is_not(None),
)

images = Table(
    "images",
    metadata,
    Column("id", Text, primary_key=True),
    Column("media_type", ExactText, nullable=False),
    Column("put_at", Double, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

image_uses = Table(
    "image_uses",
    metadata,
    Column("kind", Text, primary_key=True),
    Column("owner", ExactText, primary_key=True),
    Column("image", Text, primary_key=True),
    Index("image_uses_by_image", "image"),
)
