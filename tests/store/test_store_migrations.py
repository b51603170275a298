"""A file of every schema that was ever released opens, with everything in it."""

from __future__ import annotations

import asyncio
import gzip
import re
import sqlite3
from pathlib import Path

import pytest

from agentevo.store import export_jsonl, open_store
from agentevo.store.sqlite import SQLiteStore
from agentevo.store.tables import SCHEMA_VERSION, metadata

DATA = Path(__file__).parent / "data"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Made by the last AgentEvo with schema 1: every state of tasks and trajectories.
    version1.jsonl is what that exported of it."""
    path = tmp_path / "old.sqlite"
    path.write_bytes(gzip.decompress((DATA / "version1.sqlite.gz").read_bytes()))
    return path


def test_a_store_of_version_1_keeps_everything(old: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with await open_store(f"sqlite:///{old}", create=False) as store:
            await export_jsonl(store, tmp_path / "new.jsonl")
            exported = (tmp_path / "new.jsonl").read_text()
            later = ("overrides", "constraint", "penalties", "routed_experts")
            nothing = [f'"{name}":null,' for name in later]
            newer = (
                *nothing,
                ',"tools":""',
                '"remote_turns":[],',
                '"files":{},',
                '"texts":{},',
                '"timings":{},',
            )
            for field in newer:
                exported = exported.replace(field, "")

            exported, digests = re.subn(r',"digest":"[\w+/]{22}=="}\n', "}\n", exported)
            assert exported == (DATA / "version1.jsonl").read_text().replace(
                "}\n", ',"tokens_deleted":false,"emptied":null}\n'
            )
            assert digests == exported.count("\n"), "of what the migration found"

            states = {
                stored.task.id: (stored.state, stored.fencing_id, stored.error)
                async for stored in store.tasks()
            }
            assert states == {
                "done": ("completed", 1, None),
                "failed": ("failed", 1, "the answer is not a number"),
                "held": ("leased", 1, None),
                "queued": ("queued", 0, None),
            }
            assert [step.record for step in await store.steps()] == [{"metrics": {"loss": 0.5}}]

            again = [stored async for stored in store.trajectories(split="train", step=1)]
            assert (
                await store.write_trajectories(
                    [stored.trajectory for stored in again], split="train", step=1
                )
                == 0
            ), "the same content"

            leases = [await store.lease_task("w", lease_s=60) for _ in range(3)]
            assert [lease and (lease.task.id, lease.fencing_id) for lease in leases] == [
                ("held", 2),
                ("queued", 1),
                None,
            ]

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

    def breaks(turns: object) -> bytes:
        raise RuntimeError("no")

    monkeypatch.setattr("agentevo.store.migrations.pack_turns", breaks)
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(open_store(f"sqlite:///{old}"))

    assert old.read_bytes() == before
