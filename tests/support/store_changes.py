"""Changes to single columns of a SQLite store, one after the other, and the columns that play no
part in what a run computes."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from agentevo.store.records import SPLITS, TASK_STATES, TRAJECTORY_STATES
from agentevo.store.tables import metadata
from agentevo.types import Status

NO_PART = {
    "tasks": {
        "seq",
        "fencing_id",
        "num_leases",
        "num_failures",
        "num_expiries",
        "not_before",
        "worker",
        "lease_started_at",
        "lease_expires_at",
        "error",
        "history",
    },
    "trajectories": {"started_at", "duration_s", "written_at"},
    "tokens": set(),
    "steps": {"committed_at"},
    "calls": {*metadata.tables["calls"].c.keys()},
    "images": {*metadata.tables["images"].c.keys()},
    "image_uses": {*metadata.tables["image_uses"].c.keys()},
}
"""Columns that say how and when something came to be, not what it was, and those of tables that a
run without images leaves empty (tests/runs/audit/test_stored_images.py).
tests/runs/orchestration/test_resume_checks.py changes all of them at once, and the run resumes to
the same weights."""


def other_values(column: str, value: Any) -> Iterator[Any]:
    """What could stand there in its place."""
    words = {
        "state": {*TASK_STATES, *TRAJECTORY_STATES},
        "split": {*SPLITS},
        "status": {*get_args(Status)},
    }
    if column in words:
        yield from words[column] - {value}
    elif column == "metrics":  # another digit may be one of a timing, which has no part
        yield json.dumps(json.loads(value) | {"num_other": 1.0})
    elif value is None:
        yield 1
    elif isinstance(value, bytes):
        yield value[:-1] + bytes([value[-1] ^ 1])
    elif isinstance(value, str):
        yield value.replace("1", "2", 1) if "1" in value else f"{value}x"
    elif value in (0, 1) and isinstance(value, int):
        yield 1 - value
    else:
        yield value + 1000


def changed(run: Path, table: str, where: str, column: str) -> Iterator[tuple[Path, Any]]:
    """Copies of a run's folder beside it, each with one column of one row changed to another value,
    as far as the database takes them; and the value. Each is deleted after its turn."""
    database = sqlite3.connect(run / "store.sqlite")
    (value,) = database.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()

    database.close()
    for other_value in other_values(column, value):
        folder = Path(shutil.copytree(run, run.with_name(f"{run.name}-{uuid.uuid4().hex[:8]}")))
        database = sqlite3.connect(folder / "store.sqlite", isolation_level=None)
        try:
            database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (other_value,))
        except sqlite3.IntegrityError:
            continue
        finally:
            database.close()

        yield folder, other_value
        shutil.rmtree(folder)
