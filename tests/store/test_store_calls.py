"""The calls of attempts in the store: what runs, what is lost, and what they are kept with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import MongoDB, PostgreSQL, unused_name
from sqlalchemy import text

from agentevo.errors import StoreError
from agentevo.store import StoredCall, export_store, import_store, open_store
from agentevo.store.calls import LOST_S
from agentevo.store.mongodb import MongoDBStore
from agentevo.store.postgresql import PostgreSQLStore
from agentevo.store.sql import SQLRows
from agentevo.store.tables import SCHEMA_VERSION
from agentevo.types import Call, Task, Trajectory

Make = Callable[..., Trajectory]


def call(number: int, trajectory: str = "t", **changes: Any) -> Call:
    fields: dict[str, Any] = {
        "id": f"ab-{number}",
        "trajectory_id": trajectory,
        "parent": "ab-1" if number > 1 else None,
        "kind": "policy",
        "name": "generate\0\\0",
        "started_at": 1.7e9 + number / 3,
        "attributes": {"turn": number, "text": "é", "share": 0.1, "whole": 2.0, "yes": True},
    }
    return Call(**(fields | changes))


def ended(one: Call, **changes: Any) -> Call:
    fields = {name: getattr(one, name) for name in one.__struct_fields__}
    end = {"ended_at": one.started_at + 0.1, "status": "completed"}
    return Call(**(fields | end | changes))


async def states(store: Any, **filters: Any) -> list[tuple[str, str]]:
    return [(stored.call.id, stored.state) async for stored in store.calls(**filters)]


def test_a_call_is_running_then_ended_or_lost(url: str, clock: Any) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.write_calls([])
            await store.write_calls([call(1), call(2), call(3, "u")])
            failed = ended(call(2), status="failed", error="no\0", attributes={"turn": 7})
            for _ in range(2):  # again is harmless
                await store.write_calls([failed])

            stored = [one async for one in store.calls(trajectory_id="t")]
            assert stored == [
                StoredCall(call=call(1), state="running"),
                StoredCall(call=failed, state="ended"),
            ]
            assert await states(store) == [
                ("ab-1", "running"), ("ab-2", "ended"), ("ab-3", "running"),
            ]  # fmt: skip

            clock.steady += LOST_S - 1
            await store.renew_calls("cd")  # another recorder
            assert await states(store, state="running") == [
                ("ab-1", "running"),
                ("ab-3", "running"),
            ]

            clock.steady += 2
            assert await states(store, state="running") == []
            assert await states(store, state="lost") == [("ab-1", "lost"), ("ab-3", "lost")]

            await store.renew_calls("ab")
            assert await states(store, state="running", trajectory_id="u") == [("ab-3", "running")]
            assert await states(store, state="ended") == [("ab-2", "ended")]
            assert await states(store, newest_first=True, limit=2) == [
                ("ab-3", "running"), ("ab-2", "ended"),
            ]  # fmt: skip

            clock.steady -= 1000  # the machine was started again
            assert await states(store, state="running") == []
            assert len(await states(store, state="lost")) == 2
            assert await store.num_calls() == 3

    asyncio.run(scenario())


@pytest.mark.slow
def test_many_calls_are_read_page_by_page(url: str) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            many = [ended(call(number)) for number in range(1, 1203)]
            await store.write_calls([call(1), *many])  # the first starts and ends in one write
            assert [one.call async for one in store.calls()] == many
            assert [one.call async for one in store.calls(newest_first=True)] == many[::-1]
            assert [one.call async for one in store.calls(limit=501)] == many[:501]

            with pytest.raises(StoreError, match="state='done' is unknown: use one of running"):
                _ = [one async for one in store.calls(state="done")]  # type: ignore[arg-type]
            with pytest.raises(StoreError, match="limit=-1 is negative"):
                _ = [one async for one in store.calls(limit=-1)]
            with pytest.raises(StoreError, match="is not a recorder"):
                await store.renew_calls("%")
            with pytest.raises(StoreError, match="attributes must be texts, numbers"):
                await store.write_calls([call(1, attributes={"a": object()})])

    asyncio.run(scenario())


def test_calls_are_kept_as_long_as_their_trajectory(
    url: str, clock: Any, make_trajectory: Make, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("task"), make_task("other")])
            for name, step in (("a", 1), ("b", 1), ("c", 2)):
                one = make_trajectory(name, task_id="task" if name == "a" else "other")
                await store.write_trajectories([one], split="train", step=step)

            names = ("a", "b", "c", "young", "old", "running")
            young = clock.wall - 10
            calls = {
                name: ended(
                    call(n, name, started_at=young if name == "young" else clock.wall - 9000.0)
                )
                for n, name in enumerate(names)
                if name != "running"
            }
            await store.write_calls(
                [*calls.values(), call(5, "running", started_at=clock.wall - 9000.0)]
            )
            assert (await store.gc())["calls"] == 1

            left = {one.call.trajectory_id async for one in store.calls()}
            assert left == {"a", "b", "c", "young", "running"}

            await store.reserve(["a"], 1)
            await store.commit_step(1, {})
            await store.drop(["b"], "spent")
            await store.rewind(1)
            assert {one.call.trajectory_id async for one in store.calls()} == left - {"c"}

            clock.steady += LOST_S + 1
            done = await store.gc(dropped=True)
            assert (done["tokens"], done["calls"]) == (1, 2)
            assert {one.call.trajectory_id async for one in store.calls()} == {"a", "young"}
            assert await store.clear() == 2 + 2 + 1
            assert await store.num_calls() == 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_calls_travel_between_stores(
    new_url: Callable[[], str], sqlite_url: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            await store.write_calls([ended(call(n)) for n in range(1, 1003)])
            await store.write_calls([call(2000, parent=None)])
            assert await export_store(store, tmp_path / "1.jsonl") == 1003
            assert await import_store(store, tmp_path / "1.jsonl") == 0

        async with await open_store(new_url()) as other:
            assert await import_store(other, tmp_path / "1.jsonl") == 1003
            assert await import_store(other, tmp_path / "1.jsonl") == 0
            assert await states(other, state="lost") == [("ab-2000", "lost")], "nobody runs it here"
            await export_store(other, tmp_path / "2.jsonl")

        assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_postgresql_store_of_version_2_gets_its_calls(
    postgresql: PostgreSQL, make_trajectory: Make
) -> None:
    shape = """SELECT table_name, column_name, data_type, is_nullable, column_default IS NULL
        FROM information_schema.columns WHERE table_schema = current_schema() ORDER BY 1, 2"""
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema() ORDER BY 1"

    async def look(store: PostgreSQLStore) -> list[Any]:
        async def work(rows: SQLRows) -> list[Any]:
            connection = rows.connection
            definitions = [row[0] for row in await connection.execute(text(indexes))]
            columns = [tuple(row) for row in await connection.execute(text(shape))]
            return [
                *columns,
                *(definition.replace(store.schema, "X") for definition in definitions),
            ]

        return await store._run("test", work)

    async def read_version(rows: SQLRows) -> int:
        return int(await rows.connection.scalar(text("SELECT version FROM agentevo_store")))

    async def scenario() -> None:
        url = postgresql.url(unused_name())
        async with await PostgreSQLStore.open(url) as store:
            new = await look(store)
            await store.write_trajectories([make_trajectory("a")], split="train", step=1)

            async def older(rows: SQLRows) -> None:
                await rows.connection.execute(text("DROP TABLE calls, images, image_uses"))
                await rows.connection.execute(text("UPDATE agentevo_store SET version = 2"))

            await store._run("test", older, "alone")

        both = await asyncio.gather(*(PostgreSQLStore.open(url) for _ in range(2)))
        for store in both:
            assert await look(store) == new
            await store.write_calls([call(1)])
            assert (await store.trajectory("a")) == make_trajectory("a")
            assert await states(store) == [("ab-1", "running")]
            assert await store._run("test", read_version) == SCHEMA_VERSION
            await store.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_mongodb_store_of_version_1_gets_its_calls(
    mongodb: MongoDB, make_trajectory: Make
) -> None:
    async def scenario() -> None:
        url = mongodb.url(unused_name())
        async with await MongoDBStore.open(url) as store:
            new = set(await store._database["calls"].index_information())
            await store.write_trajectories([make_trajectory("a")], split="train", step=1)
            await store._database.drop_collection("calls")
            await store._database["meta"].delete_one({"_id": "calls"})
            await store._database["meta"].update_one({"_id": "schema"}, {"$set": {"version": 1}})

        both = await asyncio.gather(*(MongoDBStore.open(url) for _ in range(2)))
        for number, store in enumerate(both):
            assert set(await store._database["calls"].index_information()) == new
            await store.write_calls([call(number)])
            assert (await store.trajectory("a")) == make_trajectory("a")
            assert len(await states(store)) == number + 1
            await store.close()

    asyncio.run(scenario())
