"""Migrations from one version of the schema to the next. All steps run in the transaction that
opens the store, so either all of them take effect or none does. A step is plain SQL with the
formats of its time. It never uses `tables.metadata`, which always has the newest schema. MongoDB
has its own migrations (mongodb.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from agentevo.errors import UnusableStoreError
from agentevo.store.tables import SCHEMA_VERSION

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


_IMAGES_4 = (
    """CREATE TABLE images (id TEXT NOT NULL, media_type TEXT NOT NULL, put_at {double} NOT NULL,
    data {blob} NOT NULL, PRIMARY KEY (id))""",
    """CREATE TABLE image_uses (kind TEXT NOT NULL, owner TEXT NOT NULL, image TEXT NOT NULL,
    PRIMARY KEY (kind, owner, image))""",
    "CREATE INDEX image_uses_by_image ON image_uses (image)",
)


async def _from_3_to_4(connection: AsyncConnection, *, double: str, blob: str) -> None:
    """Adds tables for images."""
    for statement in _IMAGES_4:
        await connection.exec_driver_sql(statement.format(double=double, blob=blob))


Migration = Callable[[AsyncConnection], Awaitable[None]]

MIGRATIONS: dict[str, dict[int, Migration]] = {
    "sqlite": {
        2: partial(_from_2_to_3, serial="INTEGER NOT NULL", double="DOUBLE"),
        3: partial(_from_3_to_4, double="DOUBLE", blob="BLOB"),
    },
    "postgresql": {
        2: partial(_from_2_to_3, serial="BIGSERIAL", double="DOUBLE PRECISION"),
        3: partial(_from_3_to_4, double="DOUBLE PRECISION", blob="BYTEA"),
    },
}
"""Maps a database to a mapping from a schema version to the step to the next version."""


def migrations(database: str, version: int, where: str) -> list[Migration]:
    """The steps from that version of the schema to the current one. Raises UnusableStoreError for a
    version without a step."""
    available = MIGRATIONS[database]
    missing = [old for old in range(version, SCHEMA_VERSION) if old not in available]
    if missing:
        raise UnusableStoreError(
            f"{where} has the schema {version}, and the oldest that this AgentEvo can "
            f"upgrade is {min(available)}: restore it from a copy if it is damaged; it was not "
            "changed"
        )

    return [available[old] for old in range(version, SCHEMA_VERSION)]
