"""A file of every schema that was ever released opens, with everything in it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentevo.store import open_store
from agentevo.store.sqlite import SQLiteStore
from agentevo.store.tables import SCHEMA_VERSION, metadata
from agentevo.types import Task

BEFORE = {
    2: "DROP TABLE calls; DROP TABLE images; DROP TABLE image_uses; PRAGMA user_version = 2",
    3: "DROP TABLE images; DROP TABLE image_uses; PRAGMA user_version = 3",
}
"""What turns a new store into one of an older schema: 2 had no calls, 3 had no images."""


@pytest.fixture(params=BEFORE)
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A store with one task in an older schema."""
    path = tmp_path / "old.sqlite"

    async def make() -> None:
        async with await open_store(f"sqlite:///{path}") as store:
            await store.add_tasks([Task(id="t", query="1 + 1?")])

    asyncio.run(make())
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(BEFORE[request.param])
    return path


def test_an_older_store_keeps_everything(old: Path) -> None:
    async def scenario() -> None:
        async with await open_store(f"sqlite:///{old}", create=False) as store:
            assert (await store.task("t")).query == "1 + 1?"
            assert await store.num_calls() == 0
            assert await store.image_digests() == []

    asyncio.run(scenario())


def test_a_migrated_store_has_the_schema_of_a_new_one(old: Path, tmp_path: Path) -> None:
    def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)

            tables = {
                table: [row[1:4] for row in connection.execute(f"PRAGMA table_info({table})")]
                for table in metadata.tables
            }
            indexes = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
            ).fetchall()
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
            found = {
                name: [row[1:] for row in connection.execute(f"PRAGMA index_info({name})")]
                for (name,) in indexes
            }
            return (
                {"tables": sorted(names)}
                | {
                    k: sorted((n, t.split("(")[0].replace("VARCHAR", "TEXT"), x) for n, t, x in v)
                    for k, v in tables.items()
                }
                | found
            )

    async def open_both() -> None:
        for path in (old, tmp_path / "new.sqlite"):
            await (await SQLiteStore.open(f"sqlite:///{path}")).close()

    asyncio.run(open_both())
    assert shape(old) == shape(tmp_path / "new.sqlite")


def test_a_migration_that_breaks_leaves_the_old_file(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = old.read_bytes()

    monkeypatch.setattr("agentevo.store.migrations._IMAGES_4", ["CREATE INDEX nonsense"])
    with pytest.raises(Exception, match=r"syntax error|incomplete input"):
        asyncio.run(open_store(f"sqlite:///{old}"))

    assert old.read_bytes() == before
