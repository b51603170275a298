"""Migrations from one version of the schema to the next. All steps run in the transaction that
opens the store, so either all of them take effect or none does. A step is plain SQL with the
formats of its time. It never uses `tables.metadata`, which always has the newest schema. Only
SQLite had a version 1. MongoDB has its own migrations (mongodb.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import UnusableStoreError
from agentevo.store.blobs import pack_turns
from agentevo.store.tables import SCHEMA_VERSION

PAGE = 500
"""The number of trajectories that are rewritten at a time."""

_TASKS_2 = """CREATE TABLE tasks (
    seq INTEGER NOT NULL PRIMARY KEY, id TEXT NOT NULL UNIQUE, task TEXT NOT NULL,
    digest BLOB NOT NULL, state TEXT NOT NULL, fencing_id INTEGER NOT NULL,
    num_leases INTEGER NOT NULL, num_failures INTEGER NOT NULL, num_expiries INTEGER NOT NULL,
    not_before DOUBLE NOT NULL, worker TEXT, lease_started_at DOUBLE, lease_expires_at DOUBLE,
    error TEXT, history TEXT NOT NULL,
    CHECK (state IN ('queued', 'leased', 'completed', 'failed', 'poison')))"""

# Leases of version 1 have times of another clock. Here they begin and expire at 0 of the steady
# clock. So they have expired, and the next worker leases the task.
_COPY_TASKS = """INSERT INTO tasks
    SELECT seq, id, task, digest, state, fencing_id, num_leases, 0, 0, 0.0, worker,
    CASE WHEN state = 'leased' THEN 0.0 END, CASE WHEN state = 'leased' THEN 0.0 END, error, '[]'
    FROM tasks_1"""

_TO_2 = (
    "DROP INDEX tasks_by_state",
    "DROP INDEX tasks_by_expiry",
    "ALTER TABLE tasks RENAME TO tasks_1",
    _TASKS_2,
    _COPY_TASKS,
    "DROP TABLE tasks_1",
    "CREATE INDEX tasks_to_lease ON tasks (state, not_before, seq)",
    "CREATE INDEX tasks_by_state ON tasks (state, seq)",
    "CREATE INDEX tasks_by_expiry ON tasks (state, lease_expires_at)",
    "CREATE INDEX tasks_by_start ON tasks (state, lease_started_at)",
    *(
        f"DROP INDEX trajectories_by_{name}"
        for name in (
            "step",
            "trained_step",
            "split",
            "state",
            "state_and_split",
            "status",
            "task",
            "group",
        )
    ),
    *(
        f"CREATE INDEX trajectories_by_{name} ON trajectories ({name}, seq)"
        for name in ("step", "trained_step", "split", "state", "status")
    ),
    "CREATE INDEX trajectories_by_task ON trajectories (task_id, seq)",
    "CREATE INDEX trajectories_by_group ON trajectories (group_id, seq)",
    "CREATE INDEX trajectories_by_place ON trajectories (state, split, seq, num_turns)",
    "CREATE TABLE tokens (trajectory_seq INTEGER NOT NULL PRIMARY KEY REFERENCES trajectories "
    "(seq) ON DELETE CASCADE, data BLOB NOT NULL)",
)


async def _from_1_to_2(connection: AsyncConnection) -> None:
    """Adds retries, back-off and poison for tasks. A trajectory's turns become one compressed blob
    instead of a row with four blobs for each turn."""
    for statement in _TO_2:
        await connection.exec_driver_sql(statement)

    last = 0
    while True:
        page = await connection.exec_driver_sql(
            "SELECT seq FROM trajectories WHERE seq > ? ORDER BY seq LIMIT ?", (last, PAGE)
        )
        seqs = list(page.scalars())
        if not seqs:
            break

        turns: dict[int, list[dict[str, object]]] = {seq: [] for seq in seqs}
        query = (
            "SELECT * FROM turns WHERE trajectory_seq BETWEEN ? AND ? ORDER BY "
            "trajectory_seq, turn_index"
        )
        for row in await connection.exec_driver_sql(query, (seqs[0], seqs[-1])):
            turns[row.trajectory_seq].append(dict(row._mapping))

        await connection.exec_driver_sql(
            "INSERT INTO tokens VALUES (?, ?)",
            [(seq, pack_turns(of_it)) for seq, of_it in turns.items()],
        )
        last = seqs[-1]

    await connection.exec_driver_sql("DROP TABLE turns")


_CALLS_3 = """CREATE TABLE calls (
    seq {serial} PRIMARY KEY, trajectory_id TEXT NOT NULL, id TEXT NOT NULL, parent TEXT,
    kind TEXT NOT NULL, name TEXT NOT NULL, started_at {double} NOT NULL, ended_at {double},
    status TEXT, error TEXT, attributes TEXT NOT NULL, seen_at {double},
    UNIQUE (trajectory_id, id))"""
_CALLS_BY_SEEN_3 = "CREATE INDEX calls_by_seen ON calls (seen_at) WHERE seen_at IS NOT NULL"


async def _from_2_to_3(connection: AsyncConnection, *, serial: str, double: str) -> None:
    """Adds a table for the calls of every attempt."""
    await connection.exec_driver_sql(_CALLS_3.format(serial=serial, double=double))
    await connection.exec_driver_sql(_CALLS_BY_SEEN_3)


Migration = Callable[[AsyncConnection], Awaitable[None]]

MIGRATIONS: dict[str, dict[int, Migration]] = {
    "sqlite": {
        1: _from_1_to_2,
        2: partial(_from_2_to_3, serial="INTEGER NOT NULL", double="DOUBLE"),
    },
    "postgresql": {2: partial(_from_2_to_3, serial="BIGSERIAL", double="DOUBLE PRECISION")},
}
"""Maps a database to a mapping from a schema version to the step to the next version."""


def migrations(database: str, version: int, where: str) -> list[Migration]:
    """The steps from that version of the schema to the current one. Raises UnusableStoreError for a
    version that never existed."""
    available = MIGRATIONS[database]
    missing = [old for old in range(version, SCHEMA_VERSION) if old not in available]
    if missing:
        raise UnusableStoreError(
            f"{where} has the schema {version}, which no AgentEvo version used (the "
            f"oldest is {min(available)}): it is damaged; restore it from a copy; it was not "
            "changed"
        )

    return [available[old] for old in range(version, SCHEMA_VERSION)]
