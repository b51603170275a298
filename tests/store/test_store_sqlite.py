"""One SQLite file: opening it, its settings and indexes, and waiting for it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from agentevo.errors import (
    DeadlineExceededError,
    StoreError,
    StoreUnavailableError,
    UnknownNameError,
)
from agentevo.store import open_store, stores
from agentevo.store.sql import SQLRows
from agentevo.store.sqlite import APPLICATION_ID, SQLiteStore
from agentevo.types import Task, Trajectory

Make = Callable[..., Trajectory]

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"


def test_open_makes_the_folder_and_finds_everything_again(
    tmp_path: Path, make_trajectory: Make
) -> None:
    path = tmp_path / "deep" / "er" / "store.sqlite"

    async def scenario() -> None:
        async with await open_store(f"sqlite:///{path}") as store:
            await store.write_trajectories([make_trajectory("a")], split="train", step=1)
        assert path.is_file() and not path.with_name("store.sqlite-wal").exists(), (
            "closing leaves one file"
        )
        async with await open_store(f"sqlite:///{path}", create=False) as store:
            assert await store.trajectory("a") == make_trajectory("a")

    asyncio.run(scenario())


def test_relative_urls_start_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        await (await open_store("sqlite:///runs/a?b%20#.sqlite")).close()

    asyncio.run(scenario())
    assert (tmp_path / "runs" / "a?b%20#.sqlite").is_file()


def refuses(
    url: str, message: str, error: type[Exception] = StoreError, *, create: bool = True
) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(open_store(url, create=create))


def test_bad_urls_are_refused(tmp_path: Path) -> None:
    refuses("runs/store.sqlite", "write it as sqlite:///PATH")
    refuses("sqlite://", "has no path of an SQLite file")
    refuses("sqlite:///:memory:", "has no path of an SQLite file")
    refuses("sqlight:///x", "did you mean 'sqlite'", UnknownNameError)
    refuses(f"sqlite:///{tmp_path}", "is a folder")
    refuses(f"sqlite:///{tmp_path}/missing/s", "no store at", create=False)
    (tmp_path / "file").write_text("x")
    refuses(f"sqlite:///{tmp_path}/file/s", "can't be opened")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"], "nothing was created"


def test_other_files_are_refused_and_left_as_they_are(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, do not touch them")

    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")

    connection.close()
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    before = {path: path.read_bytes() for path in (text, other, empty)}
    refuses(f"sqlite:///{text}", "is not a SQLite database")
    refuses(f"sqlite:///{other}", "not an AgentEvo store")
    refuses(f"sqlite:///{empty}", "not an AgentEvo store", create=False)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("version", [1, 0, -3])
def test_a_schema_that_never_was_is_refused_and_left_as_it_is(version, tmp_path: Path) -> None:
    path = tmp_path / "odd.sqlite"

    async def create() -> None:
        async with await SQLiteStore.open(f"sqlite:///{path}"):
            pass

    asyncio.run(create())
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=delete")
        connection.execute(f"PRAGMA user_version={version}")

    connection.close()
    before = path.read_bytes()
    refuses(
        f"sqlite:///{path}", f"has the schema {version}, and the oldest .* upgrade is 2: restore"
    )
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "newer.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE trajectories (something, else_)")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute("PRAGMA user_version=999")

    connection.close()
    before = path.read_bytes()
    refuses(f"sqlite:///{path}", "schema 999 of a newer AgentEvo.*upgrade")
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.sqlite"
    path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
    refuses(f"sqlite:///{path}", "torn.sqlite")


def test_the_settings_hold_on_every_connection(sqlite_url: str) -> None:
    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url) as store:
            together = threading.Barrier(3)

            async def settings(rows: SQLRows) -> list[object]:
                together.wait(300)  # so that each call has a connection of its own
                names = ("journal_mode", "synchronous", "foreign_keys")
                return [
                    (await rows.connection.exec_driver_sql(f"PRAGMA {name}")).scalar_one()
                    for name in names
                ]

            assert (
                await asyncio.gather(*(store._run("test", settings) for _ in range(3)))
                == [["wal", 1, 1]] * 3
            )

    asyncio.run(scenario())


FILTERS: list[dict[str, Any]] = [
    {},
    {"step": 1},
    {"step": 1, "split": "eval"},
    {"trained_step": 1},
    {"split": "train"},
    {"state": "ready"},
    {"state": "ready", "split": "train"},
    {"status": "failed"},
    {"task_id": "t"},
    {"group_id": "g"},
    {"group_id": "g", "state": "ready", "split": "train"},
    {"task_id": "t", "state": "ready", "status": "completed"},
    {"step": 1, "state": "ready", "split": "train"},
]


@pytest.mark.slow
def test_every_query_uses_an_index(sqlite_url: str, make_trajectory: Make) -> None:
    """Every call of the protocol, its statements caught and explained by SQLite."""
    seen: list[tuple[str, object]] = []

    async def call_everything(store: SQLiteStore) -> None:
        await store.add_tasks([Task(id=name) for name in "abcd"])
        done, failed, again = await store.lease_tasks("w", lease_s=0.0, limit=3)
        await store.renew(done)
        await store.write_trajectories(
            [make_trajectory("d", task_id="a")], split="train", step=2, lease=done
        )
        await store.fail_task(failed, "e")
        await store.retry_task(again, "e")
        await store.lease_task("w", lease_s=0.0)
        await store.lease_task("w", lease_s=60.0)
        await store.lease_task("w", lease_s=60.0)
        for filters in FILTERS:
            await store.summaries(**filters, newest_first=True)
            [_ async for _ in store.trajectories(**filters)]

        await store.trajectory("a")
        await store.task("a")
        [_ async for _ in store.tasks(state="queued")]
        await store.ready_groups("train", size=2, limit=8)
        await store.reserve(["a"], 1)
        await store.drop(["b"], "stale")
        await store.commit_step(1, {})
        await store.release(2)
        await store.release()
        await store.last_step()
        await store.steps()
        await store.rewind(1)

    async def scenario() -> list[str]:
        async with await SQLiteStore.open(sqlite_url) as store:
            await store.write_trajectories(
                [make_trajectory(name) for name in "abc"], split="train", step=1
            )

            @event.listens_for(store._engine, "before_cursor_execute")
            def note(
                _connection: object,
                _cursor: object,
                statement: str,
                parameters: object,
                _context: object,
                many: bool,
            ) -> None:
                seen.append((statement, parameters[0] if many else parameters))  # type: ignore[index]

            await call_everything(store)

            async def explain(rows: SQLRows) -> list[str]:
                plans = []
                for statement, parameters in list(seen):
                    if statement.startswith(("SELECT", "UPDATE", "DELETE")):
                        plan = (
                            await rows.connection.exec_driver_sql(
                                f"EXPLAIN QUERY PLAN {statement}", parameters
                            )
                        ).all()  # type: ignore[arg-type]
                        plans += [f"{row.detail} <- {statement}" for row in plan]

                return plans

            return await store._run("plans", explain)

    plans = asyncio.run(scenario())
    for name in (
        "tasks_to_lease",
        "tasks_by_expiry",
        "tasks_by_start",
        "trajectories_by_step",
        "trajectories_by_place",
        "trajectories_by_group",
    ):
        assert any(f"INDEX {name}" in plan for plan in plans), name

    for words, name in (
        ("group_id = ?", "group"),
        ("group_id IN", "group"),
        ("task_id = ?", "task"),
        ("step = ? AND", "step"),
    ):
        chosen = [
            plan
            for plan in plans
            if f"trajectories.{words}" in plan and plan.startswith("SEARCH trajectories")
        ]
        assert chosen and all(f"INDEX trajectories_by_{name} " in plan for plan in chosen), (
            "\n".join(chosen)
        )

    allowed = (
        "SCAN trajectories <- ",  # without a filter, in the order of the primary key
        "SCAN steps <- ",  # all steps, in their order
    )
    bad = [
        plan
        for plan in plans
        if ("TEMP B-TREE" in plan or plan.startswith("SCAN")) and not plan.startswith(allowed)
    ]
    bad += [plan for plan in plans if plan.startswith("SCAN") and "WHERE" in plan]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_a_held_write_lock_ends_in_a_deadline_and_the_store_goes_on(
    sqlite_url: str, make_trajectory: Make
) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url, timeout_s=3) as store:
            holder = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
            start = time.monotonic()
            writes = [
                store.write_trajectories([make_trajectory(name)], split="train", step=1)
                for name in "abc"
            ]
            results = await asyncio.gather(*writes, return_exceptions=True)

            assert time.monotonic() - start < 300
            assert [type(result) for result in results] == [DeadlineExceededError] * 3
            assert "write_trajectories: no answer within 3 s" in str(results[0])
            assert await store.summaries() == [], "readers don't wait for the writer"

            holder.execute("ROLLBACK")
            holder.close()
            assert (
                await store.write_trajectories([make_trajectory("a")], split="train", step=1) == 1
            )

    asyncio.run(scenario())


def test_a_file_that_can_not_be_opened_is_unavailable_and_then_back(
    sqlite_url: str, make_trajectory: Make
) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))

    def take_away() -> None:
        path.rename(path.with_suffix(".away"))
        path.mkdir()

    def bring_back() -> None:
        path.rmdir()
        path.with_suffix(".away").rename(path)

    async def scenario() -> None:
        async with await open_store(sqlite_url, timeout_s=3) as store:
            store._engine.dispose()  # type: ignore[attr-defined]
            take_away()
            with pytest.raises(StoreUnavailableError, match="counts: unable to open database file"):
                await store.counts()

            bring_back()
            assert (
                await store.write_trajectories([make_trajectory("a")], split="train", step=1) == 1
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_query_that_runs_too_long_is_given_up(sqlite_url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url, timeout_s=3) as store:
            start = time.monotonic()
            with pytest.raises(DeadlineExceededError, match="endless: no answer"):
                await store._run(
                    "endless", lambda rows: rows.connection.exec_driver_sql(ENDLESS), "worker"
                )

            assert time.monotonic() - start < 300
            assert (
                await store.write_trajectories([make_trajectory("a")], split="train", step=1) == 1
            )

    asyncio.run(scenario())


def test_a_cancelled_write_is_rolled_back(sqlite_url: str, make_trajectory: Make) -> None:
    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url, timeout_s=3600) as store:
            inside = threading.Event()

            async def slow(rows: SQLRows) -> None:
                await rows.connection.exec_driver_sql("INSERT INTO steps VALUES (1, '{}', 0, 0.0)")
                inside.set()
                await rows.connection.exec_driver_sql(ENDLESS)

            task = asyncio.create_task(store._run("slow", slow, "worker"))
            await asyncio.to_thread(inside.wait, 300)
            start = time.monotonic()

            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            assert (
                await store.write_trajectories([make_trajectory("a")], split="train", step=1) == 1
            )
            assert time.monotonic() - start < 300, (
                "nobody waits for the deadline of a call that was cancelled"
            )
            assert await store.steps() == []

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_late_write_is_rolled_back_though_it_succeeds(
    sqlite_url: str, make_trajectory: Make
) -> None:
    """The caller was told that there is no answer: nothing may appear after that."""

    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url, timeout_s=1) as store:
            answered = threading.Event()

            async def slow(rows: SQLRows) -> None:
                await rows.connection.exec_driver_sql("INSERT INTO steps VALUES (1, '{}', 0, 0.0)")
                answered.wait(300)

            with pytest.raises(DeadlineExceededError, match="slow: no answer within 1 s"):
                await store._run("slow", slow, "worker")

            answered.set()

        async with await SQLiteStore.open(sqlite_url) as store:
            assert await store.steps() == []

    asyncio.run(scenario())


def test_a_full_disk_refuses_the_write_and_keeps_the_rest(
    sqlite_url: str, make_trajectory: Make
) -> None:
    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url) as store:
            await store.write_trajectories([make_trajectory("a")], split="train", step=1)

            @event.listens_for(store._engine, "begin")
            def limit(connection: object) -> None:
                connection.exec_driver_sql("PRAGMA max_page_count=1")  # type: ignore[attr-defined]

            big = [make_trajectory(f"big{i}", num_turns=8) for i in range(100)]
            with pytest.raises(StoreError, match="write_trajectories: database or disk is full"):
                await store.write_trajectories(big, split="train", step=1)

            assert [summary.id for summary in await store.summaries()] == ["a"]

    asyncio.run(scenario())


def test_the_registry_knows_the_default() -> None:
    refuses("nosuch:///x", "no store is called 'nosuch'", UnknownNameError)
    assert "sqlite" in stores.names()
