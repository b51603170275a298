"""Exports are whole, exact, and never half there."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import event

from agentevo.errors import ConfigError, StoreError
from agentevo.store import StoredTrajectory, export_jsonl, export_store, import_store, open_store
from agentevo.store.export import atomic_file
from agentevo.store.mongodb import MongoRows
from agentevo.store.sql import SQLStore
from agentevo.store.store import Store
from agentevo.types import Message, RemoteTurn, Task, Trajectory

Make = Callable[..., Trajectory]


@pytest.fixture
def filled(url: str, make_trajectory: Make) -> list[Trajectory]:
    first = make_trajectory("a")
    said = msgspec.structs.replace(first.turns[1], messages=[Message("user", "línea\n\u2028 二")])
    written = [
        msgspec.structs.replace(
            first,
            turns=[first.turns[0], said],
            remote_turns=[RemoteTurn(index=0, model="teacher", messages=[Message("user", "?")])],
        ),
        make_trajectory("b"),
        make_trajectory("c", num_turns=0),
    ]

    async def fill() -> None:
        async with await open_store(url) as store:
            await store.write_trajectories(written[:2], split="train", step=1)
            await store.write_trajectories(written[2:], split="eval", step=2)
            await store.drop(["b"], "stale")

    asyncio.run(fill())
    return written


async def export(url: str, path: Path, **filters: object) -> int:
    async with await open_store(url, create=False) as store:
        return await export_jsonl(store, path, **filters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["out.jsonl", "deep/er/out.jsonl.gz"])
def test_every_line_is_a_whole_trajectory(
    url: str, filled: list[Trajectory], tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    assert asyncio.run(export(url, path)) == 3

    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    lines = data.splitlines()
    assert [msgspec.json.decode(line, type=Trajectory) for line in lines] == filled

    rows = [json.loads(line) for line in lines]
    assert [(r["split"], r["step"], r["state"], r["drop_reason"]) for r in rows] == [
        ("train", 1, "ready", None),
        ("train", 1, "dropped", "stale"),
        ("eval", 2, "ready", None),
    ]
    assert rows[0]["turns"][0]["logprobs"] == filled[0].turns[0].logprobs.tolist()
    assert [p for p in path.parent.iterdir() if p.name.endswith(".part")] == []


def test_filters_apply_and_the_bytes_repeat(
    url: str, filled: list[Trajectory], tmp_path: Path
) -> None:
    assert asyncio.run(export(url, tmp_path / "1.jsonl.gz", split="train", newest_first=True)) == 2
    assert asyncio.run(export(url, tmp_path / "2.jsonl.gz", split="train", newest_first=True)) == 2
    assert (tmp_path / "1.jsonl.gz").read_bytes() == (tmp_path / "2.jsonl.gz").read_bytes()
    lines = gzip.decompress((tmp_path / "1.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b", "a"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_an_export_that_breaks_leaves_the_old_file(
    url: str, filled: list[Trajectory], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "exports" / name
    asyncio.run(export(url, path))
    before = path.read_bytes()
    whole = Store.trajectories

    async def breaking(self: Store, **filters: object) -> AsyncIterator[StoredTrajectory]:
        async for stored in whole(self, **filters):  # type: ignore[arg-type]
            yield stored
            raise StoreError("the database went away")

    monkeypatch.setattr(Store, "trajectories", breaking)
    with pytest.raises(StoreError, match="went away"):
        asyncio.run(export(url, path))

    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_bad_targets_are_refused(url: str, filled: list[Trajectory], tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path, message in [
        (tmp_path / "out.csv", "must end in .jsonl"),
        (tmp_path / "a file" / "x.jsonl", "can't export to"),
    ]:
        with pytest.raises(StoreError, match=message):
            asyncio.run(export(url, path))

    (tmp_path / "taken.jsonl").mkdir()
    with pytest.raises(StoreError, match="can't export to"):
        asyncio.run(export(url, tmp_path / "taken.jsonl"))

    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.slow
def test_a_whole_store_travels_to_any_backend_and_back(
    new_url: Callable[[], str],
    sqlite_url: str,
    make_trajectory: Make,
    make_task: Callable[..., Task],
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            await store.add_tasks(
                [make_task(name) for name in ("done", "bad", "again", "held", "new")]
            )
            done, bad, again, _held = await store.lease_tasks("w", lease_s=600, limit=4)
            many = [
                make_trajectory(
                    f"a{i}", num_turns=i % 3, task_id="done" if i not in (4, 5) else "spent"
                )
                for i in range(150)
            ]
            await store.write_trajectories(many, split="train", step=1, lease=done)
            await store.write_trajectories(
                [make_trajectory("e", status="failed", error="a\0b\\0")], split="eval", step=1
            )
            await store.fail_task(bad, "no")
            await store.retry_task(again, "engine gone")
            await store.reserve(["a0", "a1"], 1)
            await store.commit_step(
                1,
                {"metrics": {"loss": 0.5}, "checkpoint": {"path": "checkpoints/1", "sha256": "ab"}},
            )
            await store.reserve(["a2"], 2)
            await store.drop(["a4", "a5"], "stale")
            assert (await store.gc(dropped=True))["tokens"] == 2

            lines = await export_store(store, tmp_path / "1.jsonl.gz")
            assert lines == 5 + 151 + 1
            assert await import_store(store, tmp_path / "1.jsonl.gz") == 0, (
                "into itself, what gc has emptied included"
            )

            before = await store.counts()
            summaries = await store.summaries()
            assert [(s.num_turns, s.num_completion_tokens) for s in summaries if s.drop_reason] == [
                (1, 2),
                (2, 4),
            ]

            history = (await store.stored_task("again")).history

        async with await open_store(new_url()) as other:
            assert await import_store(other, tmp_path / "1.jsonl.gz") == lines
            assert await import_store(other, tmp_path / "1.jsonl.gz") == 0, (
                "importing again changes nothing"
            )

            await export_store(other, tmp_path / "2.jsonl.gz")
            after = await other.counts()
            assert (
                after["tasks/leased"] == 0 and after["tasks/queued"] == before["tasks/queued"] + 1
            )
            assert await other.summaries() == summaries and after["turns"] == before["turns"]
            assert (await other.stored_task("again")).history == history != []
            assert (await other.trajectory("a6")) == many[6]
            assert await other.write_trajectories(many[4:7], split="train", step=1) == 0, (
                "the same content, deleted or not"
            )

            with pytest.raises(StoreError, match="'a4' is already stored with other content"):
                await other.write_trajectories(
                    [msgspec.structs.replace(many[4], turns=[])], split="train", step=1
                )

            with pytest.raises(StoreError, match="deleted by `agentevo store RUN gc --dropped`"):
                await other.trajectory("a4")

        first, second = (
            gzip.decompress((tmp_path / f"{n}.jsonl.gz").read_bytes()).splitlines() for n in (1, 2)
        )
        assert [line.replace(b'"state":"leased"', b'"state":"queued"') for line in first] == second
        assert [json.loads(line)["kind"] for line in (first[0], first[5], first[-1])] == [
            "task",
            "trajectory",
            "step",
        ]

    asyncio.run(scenario())


def test_what_is_no_export_is_refused_with_its_line(
    url: str, filled: list[Trajectory], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            await export_store(store, tmp_path / "good.jsonl")
            good = (tmp_path / "good.jsonl").read_bytes().splitlines(keepends=True)
            for text, message in [
                (good[0] + b"{}\n", "line 2 is not a line"),
                (good[0] + b'{"kind": "song"}\n', "unknown kind 'song'"),
                (good[0] + good[1][:40], "line 2"),
                (
                    good[0].replace(b'"reward":1.0', b'"reward":0.5'),
                    "not the one that was exported",
                ),
            ]:
                (tmp_path / "bad.jsonl").write_bytes(text)
                with pytest.raises(StoreError, match=message):
                    await import_store(store, tmp_path / "bad.jsonl")

            (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(good[0] * 100)[:60])
            with pytest.raises(StoreError, match="can't import"):
                await import_store(store, tmp_path / "bad.jsonl.gz")

            assert len(await store.summaries()) == 3

    asyncio.run(scenario())


def test_gc_queues_old_leases_and_keeps_the_record_of_what_was_dropped(
    url: str, clock: Any, make_trajectory: Make, make_task: Any
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("x"), make_task("y")])
            old, kept = await store.lease_tasks("w", lease_s=10, limit=2)
            clock.steady += 3000
            await store.renew(kept)
            clock.steady += 700
            await store.write_trajectories(
                [make_trajectory(name, task_id=name) for name in "abc"], split="train", step=1
            )
            await store.drop(["b"], "stale")
            await store.commit_step(1, {})

            assert {k: v for k, v in (await store.gc()).items() if k != "bytes"} == {
                "leases": 1,
                "orphans": 0,
                "tokens": 0,
                "calls": 0,
                "images": 0,
            }
            assert (await store.trajectory("b")).turns
            with pytest.raises(StoreError, match="moved on"):
                await store.complete_task(old)

            assert (await store.gc(dropped=True))["tokens"] == 1
            assert (await store.gc(dropped=True))["tokens"] == 0

            summary = (await store.summaries(state="dropped"))[0]
            assert (summary.id, summary.drop_reason, summary.num_turns) == ("b", "stale", 2)

            stored = [stored async for stored in store.trajectories()]
            assert [
                (s.trajectory.id, len(s.trajectory.turns), s.tokens_deleted) for s in stored
            ] == [
                ("a", 2, False),
                ("b", 0, True),
                ("c", 2, False),
            ]
            assert await store.size_bytes() > 0

    asyncio.run(scenario())


def test_gc_spares_what_a_resumed_trainer_may_ask_for(url: str, make_trajectory: Make) -> None:
    """One that was killed between a step's drops and its commit."""

    async def scenario() -> None:
        async with await open_store(url) as store:

            async def write(step: int, task: str, *names: str) -> None:
                members = [
                    make_trajectory(name, task_id=task, group_id=f"{task}/{name[0]}")
                    for name in names
                ]
                await store.write_trajectories(members, split="train", step=step)

            async def emptied() -> list[str]:
                await store.gc(dropped=True)
                return [
                    trajectory.trajectory.id
                    async for trajectory in store.trajectories()
                    if trajectory.tokens_deleted
                ]

            await write(1, "first", "a1", "a2")
            await write(1, "old", "b1", "greedy")  # `mask`: an old group goes into a later step
            await write(2, "second", "c1", "c2")
            await write(2, "third", "d1", "d2")
            await store.drop(["a1"], "group-of-one")
            assert await emptied() == [], "no step is committed"

            await store.reserve(["a2"], 1)
            await store.commit_step(1, {})
            await store.drop(["greedy"], "baseline")
            await store.drop(["c1", "c2"], "zero-variance")
            assert await emptied() == ["a1"]

            await store.reserve(["b1", "d1", "d2"], 2)
            assert await emptied() == ["a1"]
            assert await store.drop(["c1", "c2"], "zero-variance") == 0

            await store.commit_step(2, {}, ids=["b1", "d1", "d2"])
            assert await emptied() == ["a1", "greedy", "c1", "c2"]

    asyncio.run(scenario())


@pytest.mark.parametrize("moved", ["a step", "a trajectory", "a lease"])
def test_a_store_in_which_something_moves_is_not_exported(
    url: str,
    make_trajectory: Make,
    make_task: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moved: str,
) -> None:
    whole = Store.trajectories

    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.add_tasks([make_task("x")])
            await store.write_trajectories([make_trajectory("a")], split="train", step=1)
            await store.reserve(["a"], 1)
            assert await export_store(store, tmp_path / "all.jsonl") == 2

            before = (tmp_path / "all.jsonl").read_bytes()

            async def goes_on(self: Store, **filters: object) -> AsyncIterator[StoredTrajectory]:
                async for stored in whole(self, **filters):  # type: ignore[arg-type]
                    yield stored

                match moved:
                    case "a step":
                        await store.commit_step(1, {})
                    case "a trajectory":
                        await store.write_trajectories(
                            [make_trajectory("b")], split="train", step=1
                        )
                    case _:
                        await store.lease_task("w", lease_s=60)

            monkeypatch.setattr(Store, "trajectories", goes_on)
            with pytest.raises(StoreError, match=r"the run is still writing.*stop it first"):
                await export_store(store, tmp_path / "all.jsonl")

            assert (tmp_path / "all.jsonl").read_bytes() == before
            assert [name for name in os.listdir(tmp_path) if "all" in name] == ["all.jsonl"]

            monkeypatch.setattr(Store, "trajectories", whole)
            assert await export_store(store, tmp_path / "all.jsonl") >= 2

    asyncio.run(scenario())


def test_an_import_reads_the_records_of_its_own_steps_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each page would read all that came before it."""

    async def scenario() -> None:
        async with await open_store(url) as store:
            for step in range(1, 6):
                await store.commit_step(step, {"of": step})

            stored = await store.steps()
            read: list[object] = []
            if isinstance(store, SQLStore):
                engine: Any = store._engine  # type: ignore[attr-defined]

                @event.listens_for(getattr(engine, "sync_engine", engine), "before_cursor_execute")
                def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
                    if statement.startswith("SELECT") and "FROM steps" in statement:
                        read.append("WHERE steps.step IN" in statement)

            else:
                find = MongoRows.find

                async def noted(
                    self: MongoRows, table: str, columns: Any = (), where: Any = (), **options: Any
                ) -> Any:
                    if table == "steps":
                        read.append(where == [("step", "in", [2, 9])])
                    return await find(self, table, columns, where, **options)

                monkeypatch.setattr(MongoRows, "find", noted)

            assert (
                await store.put(steps=[stored[1], msgspec.structs.replace(stored[1], step=9)]) == 1
            )
            assert read == [True]
            assert [step.step for step in await store.steps()] == [1, 2, 3, 4, 5, 9]

            with pytest.raises(StoreError, match="already committed with another record"):
                await store.put(
                    steps=[msgspec.structs.replace(stored[2], record={"of": "another"})]
                )

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["there/new/deeper/out.jsonl", "new/out.jsonl.gz", "out.jsonl"])
def test_a_file_that_is_not_made_leaves_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()

    def names() -> set[Path]:
        return set(tmp_path.rglob("*"))

    before = names()

    def refused() -> None:
        with atomic_file(tmp_path / name) as file:
            file.write(b"half")
            raise ConfigError("no row is good")

    with pytest.raises(ConfigError):
        refused()
    assert names() == before
    with atomic_file(tmp_path / name) as file:
        file.write(b"whole")

    assert (tmp_path / name).is_file()
