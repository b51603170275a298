"""What only a database server can come to: rows that another connection holds, transactions with a
lifetime, schemas of other versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from servers import MongoDB, PostgreSQL, unused_name
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError

from agentevo.errors import DeadlineExceededError, StoreError, StoreUnavailableError
from agentevo.store import cleanup, open_store, sql, tables
from agentevo.store.database_rows import DatabaseRows
from agentevo.store.mongodb import MongoDBStore
from agentevo.store.postgresql import PostgreSQLStore
from agentevo.types import Task, Trajectory

MakeTask = Callable[..., Task]
Make = Callable[..., Trajectory]


@pytest.mark.slow
def test_a_row_that_another_connection_lets_go_is_no_second_lease(
    postgresql: PostgreSQL, clock: Any, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two queries of one call for leases that ran out."""
    mappings = sql.SQLRows._mappings

    async def scenario() -> None:
        async with await PostgreSQLStore.open(postgresql.url(unused_name()), clock=clock) as store:
            await store.add_tasks([make_task("first"), make_task("second")])
            for _ in range(2):
                assert await store.lease_task("dead", lease_s=10) is not None
                clock.steady += 1

            clock.steady += 60
            async with store._engine.connect() as other:
                await other.execute(text("SELECT 1 FROM tasks WHERE id = 'first' FOR UPDATE"))

                async def lets_go(
                    self: sql.SQLRows, query: Any, **values: float
                ) -> list[Mapping[str, Any]]:
                    found = await mappings(self, query, **values)
                    await other.rollback()
                    return found

                monkeypatch.setattr(sql.SQLRows, "_mappings", lets_go)
                taken = await store.lease_tasks("w", lease_s=10, limit=2)

            assert [lease.task.id for lease in taken] == ["second"]
            assert [
                (lease.task.id, lease.fencing_id)
                for lease in await store.lease_tasks("w", lease_s=10, limit=2)
            ] == [("first", 2)]

            await store.complete_task(taken[0])

    asyncio.run(scenario())


@pytest.mark.slow
def test_groups_are_found_without_a_walk_over_their_split(
    postgresql: PostgreSQL, make_trajectory: Make
) -> None:
    """A table that PostgreSQL has not analyzed yet, as in the first minutes of a run."""
    seen: list[tuple[str, Any]] = []

    async def scenario() -> list[str]:
        async with await PostgreSQLStore.open(postgresql.url(unused_name())) as store:
            off = text("ALTER TABLE trajectories SET (autovacuum_enabled = false)")
            await store._run("test", lambda rows: rows.connection.execute(off), "worker")
            many = [
                make_trajectory(f"{k}", group_id=f"g{k // 8}", num_turns=0) for k in range(2000)
            ]
            await store.write_trajectories(many, split="train", step=1)

            @event.listens_for(store._engine.sync_engine, "before_cursor_execute")
            def note(
                _connection: object,
                _cursor: object,
                statement: str,
                parameters: Any,
                _context: object,
                many: bool,
            ) -> None:
                if statement.startswith("SELECT trajectories"):
                    seen.append((statement, parameters))

            await store.ready_groups("train", size=8, limit=1)
            await store.summaries(group_id="g5", split="train")
            event.remove(store._engine.sync_engine, "before_cursor_execute", note)

            async with store._engine.connect() as connection:
                await connection.execute(
                    text("SET enable_seqscan = off")
                )  # as if there were a hundred times as many
                plans = [
                    await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)
                    for statement, parameters in seen
                ]
                return ["\n".join(row[0] for row in plan) for plan in plans]

    plans = asyncio.run(scenario())
    of_groups = [
        plan
        for (query, _), plan in zip(seen, plans, strict=True)
        if "group_id =" in query or "group_id IN" in query
    ]  # beside them the walk over what is ready, for which several indexes are equally cheap
    assert len(of_groups) == 2 < len(plans), seen
    assert all(
        "trajectories_by_group" in plan and "trajectories_by_split" not in plan
        for plan in of_groups
    ), "\n\n".join(of_groups)


@pytest.mark.slow
def test_a_postgresql_schema_of_a_newer_version_is_refused(postgresql: PostgreSQL) -> None:
    async def scenario() -> None:
        url = postgresql.url(unused_name())
        async with await PostgreSQLStore.open(url) as store:
            change = text("UPDATE agentevo_store SET version = 99")
            await store._run("test", lambda rows: rows.connection.execute(change), "worker")

        with pytest.raises(
            StoreError,
            match=f"has version 99, this AgentEvo knows {tables.SCHEMA_VERSION}: upgrade with",
        ):
            await open_store(url)

    asyncio.run(scenario())


def test_a_connection_that_a_dying_server_left_half_open_is_a_database_that_is_away(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg says only that its own state is impossible; calling again is right."""
    asyncpg = pytest.importorskip("asyncpg")

    async def scenario() -> None:
        async with await open_store(postgresql.url(unused_name())) as store:

            async def broken(*arguments: Any) -> None:
                error = asyncpg.exceptions.InternalClientError("cannot switch to state 11")
                raise DBAPIError("SELECT 1", (), Exception("translated")) from error

            monkeypatch.setattr(PostgreSQLStore, "_lock", broken)
            monkeypatch.setattr(store, "_away_s", 0.0)
            with pytest.raises(StoreUnavailableError, match="the database can't be used now"):
                await store.add_tasks([Task(id="a")])

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_mongodb_schema_of_a_newer_version_is_refused(mongodb: MongoDB) -> None:
    async def scenario() -> None:
        url = mongodb.url(unused_name())
        async with await MongoDBStore.open(url) as store:
            await store._database["meta"].update_one({"_id": "schema"}, {"$set": {"version": 99}})
        with pytest.raises(StoreError, match=r"its schema 99 is of a newer AgentEvo.*pip install"):
            await open_store(url)

    asyncio.run(scenario())


@pytest.mark.slow
def test_gc_on_mongodb_is_many_transactions(
    mongodb: MongoDB, make_trajectory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that breaks off has done a part, and again does the rest."""
    monkeypatch.setattr(cleanup, "CHUNK", 2)
    delete = DatabaseRows.delete_tokens
    calls: list[list[str]] = []

    async def breaks(self: DatabaseRows, ids: list[str]) -> int:
        calls.append(ids)
        if len(calls) == 2:
            raise StoreError("the connection is gone")
        return await delete(self, ids)

    async def scenario() -> None:
        async with await MongoDBStore.open(mongodb.url(unused_name())) as store:
            names = [f"t{i}" for i in range(5)]
            await store.write_trajectories(
                [make_trajectory(name, task_id=name) for name in names], split="train", step=1
            )
            await store.drop(names, "stale")
            await store.commit_step(1, {})
            await store._database["tokens"].insert_many(
                [{"_id": f"{name}+", "data": b""} for name in names]
            )
            monkeypatch.setattr(DatabaseRows, "delete_tokens", breaks)

            with pytest.raises(StoreError, match="the connection is gone"):
                await store.gc(dropped=True)

            assert calls == [["t0+"], ["t1+"]]
            assert (await store.gc(dropped=True)).items() >= {
                "leases": 0,
                "orphans": 4,
                "tokens": 5,
            }.items()
            assert [trajectory.tokens_deleted async for trajectory in store.trajectories()] == [
                True
            ] * 5
            assert await store._database["tokens"].count_documents({}) == 0

    asyncio.run(scenario())


def test_clear_on_mongodb_is_no_transaction(
    mongodb: MongoDB, make_trajectory: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object, **__: object) -> None:
        raise AssertionError("a transaction")

    async def scenario() -> None:
        async with await MongoDBStore.open(mongodb.url(unused_name())) as store:
            await store.write_trajectories(
                [make_trajectory("a"), make_trajectory("b")], split="train", step=1
            )
            with monkeypatch.context() as patch:
                patch.setattr(store, "_run", refuses)
                assert await store.clear() == 2

            assert not any((await store.counts()).values())
            assert await store._database["tokens"].count_documents({}) == 0

    asyncio.run(scenario())


def test_closing_a_mongodb_store_has_a_deadline(
    mongodb: MongoDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs() -> None:
        await asyncio.sleep(600)

    async def scenario() -> None:
        store = await MongoDBStore.open(mongodb.url(unused_name()))
        with monkeypatch.context() as patch:
            patch.setattr(store._client, "close", hangs)
            patch.setattr(store, "_timeout_s", 0.1)
            with pytest.raises(DeadlineExceededError, match="close: no answer"):
                await store.close()
        await store.close()

    asyncio.run(scenario())
