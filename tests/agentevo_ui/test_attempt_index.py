"""The index of attempts says what the store says, whatever happened to it."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from slow import soak

from agentevo.store import open_store
from agentevo.store.records import TrajectorySummary
from agentevo.store.store import Store
from agentevo.types import Message, Trajectory, Turn
from agentevo_ui.index import database
from agentevo_ui.index import indexer as indexer_module
from agentevo_ui.index.follow import StoreFollower
from agentevo_ui.index.indexer import Indexer
from agentevo_ui.index.reader import IndexReader, IndexUnavailableError, Listing
from agentevo_ui.index.selection import Selection


def attempt(name: str, *, text: str = "look", **changes: Any) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1, 2],
        completion_ids=[7, 8],
        logprobs=[-0.5, -2.0],
        versions=[3, 4],
        finish_reason="stop",
        messages=[Message("user", text), Message("assistant", "go")],
    )
    fields: dict[str, Any] = {"task_id": "t", "group_id": name.partition("#")[0], "turns": [turn]}
    return Trajectory(id=name, **(fields | changes))


class Bench:
    """An index beside a store, without a thread."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.path = folder / "index.sqlite"
        database.make(self.path)
        self.connection = database.connect(self.path)
        self.follower = StoreFollower(store, self.connection)
        self.follower._rewards = {"judge": (2.0, True), "rule": (1.0, False)}
        self.reader = IndexReader(self.path)

    async def refresh(self, *, compare: bool = True) -> None:
        await self.follower.refresh(compare=compare)
        while await self.follower.read_some():
            pass

    def listing(self, selection: Selection | None = None, **options: Any) -> Listing:
        return listed(self.reader, selection or Selection(), **options)


def listed(reader: IndexReader, selection: Selection, **options: Any) -> Listing:
    with reader.open() as index:
        return index.listing(selection, **options)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.sqlite'}"


def shown(summary: Any) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in TrajectorySummary.__struct_fields__}


async def check_equal(store: Store, bench: Bench) -> None:
    """All that the store has, in its order, and nothing else."""
    wanted = [shown(one) for one in await store.summaries()]
    listing = bench.listing(Selection(order="oldest"), size=10_000)
    assert [shown(row) for row in listing.rows] == wanted
    assert listing.total == len(wanted)

    found = bench.listing(Selection(text="unicorn"), size=10_000)
    texts = [
        stored.trajectory.id
        async for stored in store.trajectories()
        if stored.trajectory.turns and "unicorn" in stored.trajectory.turns[0].messages[0].text
    ]
    assert {row.id for row in found.rows} == set(texts)


async def happen(store: Store, dice: random.Random, life: int) -> None:
    """One thing that a run does."""
    records = await store.steps()
    last = records[-1].step if records else 0
    rows = await store.summaries(split="train")
    ready = [row.id for row in rows if row.state == "ready"]
    what = dice.choice(
        ["write"] * 4 + ["commit"] * 3 + ["drop", "release", "rewind", "keep", "clear"]
    )
    if what == "write":
        step = last + dice.randint(1, 2)
        split = dice.choice(["train", "train", "eval"])
        made = []
        for _ in range(dice.randint(1, 5)):
            name = f"{split}-{step}/t@{dice.randint(0, 3)}#{dice.randint(0, 9)}"
            if any(row.id == name for row in await store.summaries()):
                continue

            failed = dice.random() < 0.2
            text = dice.choice(["a unicorn", "a horse"]) + f" of {life}"
            made.append(
                attempt(
                    name,
                    text=text,
                    reward=dice.random(),
                    status="failed" if failed else "completed",
                    error="ValueError: no" if failed else None,
                    started_at=dice.random(),
                )
            )

        named = {one.id: one for one in made}
        await store.write_trajectories(named.values(), split=split, step=step)
    elif what == "commit":
        taken = dice.sample(ready, dice.randint(0, len(ready)))
        left = [name for name in ready if name not in taken]
        dropped = dice.sample(left, dice.randint(0, len(left)))
        await store.reserve(taken, last + 1)
        if dice.random() < 0.9:
            record = {"chain": f"{life} {dice.random()}"}
            await store.commit_step(last + 1, record, dropped={"no-spread": dropped})
    elif what == "drop" and ready:
        await store.drop([dice.choice(ready)], "by hand")
    elif what == "release":
        await store.release()
    elif what in ("rewind", "keep") and records:
        await store.rewind(dice.choice(records).step, keep=what == "keep")
    elif what == "clear" and dice.random() < 0.3:
        await store.clear()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *soak(*range(1, 6))])
def test_after_any_history_the_index_is_the_store(
    tmp_path: Path, new_url: Callable[[], str], seed: int
) -> None:
    """Of every kind of store."""

    async def scenario() -> None:
        dice = random.Random(seed)
        async with await open_store(new_url()) as store:
            bench = Bench(tmp_path, store)
            for life in range(40):
                await happen(store, dice, life)
                if dice.random() < 0.4:
                    await bench.refresh()
                    await check_equal(store, bench)

    asyncio.run(scenario())


def test_a_commit_is_seen_without_comparing(tmp_path: Path, sqlite_url: str) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            bench = Bench(tmp_path, store)
            made = [attempt(f"train-1/t@{i}#0") for i in range(6)]
            await store.write_trajectories(made, split="train", step=1)
            await bench.refresh(compare=False)
            await store.reserve([one.id for one in made[:3]], 1)
            await store.commit_step(1, {"chain": "a"}, dropped={"no-spread": [made[4].id]})
            await bench.refresh(compare=False)
            await check_equal(store, bench)
            await store.rewind(1)
            await store.write_trajectories([attempt("eval-2/t@0#0")], split="eval", step=2)
            await bench.refresh(compare=False)
            await store.rewind(1)  # deletes what no step knows
            await bench.refresh(compare=False)
            await check_equal(store, bench)

    asyncio.run(scenario())


def test_numbers_that_were_skipped_are_looked_at_again(tmp_path: Path, sqlite_url: str) -> None:
    """A transaction of PostgreSQL takes its numbers before it commits."""

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            bench = Bench(tmp_path, store)
            made = [attempt(f"train-1/t@{i}#0") for i in range(6)]
            await store.write_trajectories(made, split="eval", step=1)
            hidden = {2, 3}
            read = store.written_summaries

            async def without_hidden(seqs: range, *, limit: int) -> Any:
                return [(n, row) for n, row in await read(seqs, limit=limit) if n not in hidden]

            store.written_summaries = without_hidden  # type: ignore[method-assign]
            await bench.refresh(compare=False)
            assert bench.listing().total == 4

            hidden.clear()
            await bench.refresh(compare=False)
            await check_equal(store, bench)

    asyncio.run(scenario())


@pytest.mark.parametrize("order", ["newest", "best", "unlikely", "judge"])
def test_pages_of_a_list_hold_every_row_once(tmp_path: Path, sqlite_url: str, order: str) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            bench = Bench(tmp_path, store)
            dice = random.Random(1)
            made = [
                attempt(
                    f"train-1/t@{i}#0",
                    reward=float(score := dice.randint(0, 3)),
                    reward_parts={"judge": 2.0 * (score > 1), "rule": score - 2.0 * (score > 1)},
                )
                for i in range(57)
            ]
            await store.write_trajectories(made, split="train", step=1)

            await bench.refresh()
            seen: list[str] = []
            after = None
            while True:
                page = bench.listing(Selection(order=order, after=after), size=10)
                seen += [row.id for row in page.rows]
                if page.next is None:
                    break
                after = Selection.of({"after": page.next}).after

            assert sorted(seen) == sorted(one.id for one in made)
            if order == "best":
                rewards = {one.id: one.reward for one in made}
                assert [rewards[name] for name in seen] == sorted(rewards.values(), reverse=True)

            with bench.reader.open() as index:
                bars = index.histogram(Selection(), "reward")
            assert sum(bar.size for bar in bars) == len(made)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("look", 1),
        ('"look"', 1),
        ("lo*", 1),
        ("LOOK", 1),
        ("lóok", 1),
        ("^look", 1),
        ("look -horse", 1),
        ("look -go", 0),
        ("look horse", 0),
        ("-look", 0),
        ('"', 0),
        ("*", 0),
        ("\x00", 0),
        ("a' OR 1=1 --", 0),
        ("NEAR(look go)", 0),
        ("look NOT", 0),
        ("text:look", 0),
        ("{a b}:look", 0),
        ('"look""', 1),
        ("x" * 10_000, 0),
    ],
)
def test_whatever_is_typed_is_searched_and_never_syntax(
    tmp_path: Path, sqlite_url: str, typed: str, found: int
) -> None:
    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            bench = Bench(tmp_path, store)
            await store.write_trajectories([attempt("a@0#0")], split="train", step=1)
            await bench.refresh()
            assert bench.listing(Selection(text=typed)).total == found

    asyncio.run(scenario())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTEVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def until(condition: Any, within_s: float = 300.0) -> None:
    async def wait() -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.02)

    asyncio.run(wait())


def total(reader: IndexReader) -> int:
    try:
        return listed(reader, Selection(text="look")).total
    except IndexUnavailableError:
        return -1


def write(url: str, names: list[str]) -> None:
    async def work() -> None:
        async with await open_store(url) as store:
            await store.write_trajectories([attempt(n) for n in names], split="train", step=1)

    asyncio.run(work())


@pytest.mark.slow
def test_a_damaged_index_is_made_again_and_one_of_two_writes(
    tmp_path: Path, sqlite_url: str, cache: Path
) -> None:
    write(sqlite_url, ["a@0#0", "a@0#1"])
    before = (tmp_path / "store.sqlite").read_bytes()
    path = database.cache_file(sqlite_url)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all" * 1000)
    first, second = (Indexer(sqlite_url, every_s=0.05) for _ in range(2))
    reader = IndexReader(path)

    first.start()
    try:
        until(lambda: total(reader) == 2)
        second.start()
        write(sqlite_url, ["a@0#2"])
        until(lambda: total(reader) == 3)
        first.stop()
        write(sqlite_url, ["a@0#3"])  # the other one goes on
        until(lambda: total(reader) == 4)
    finally:
        first.stop()
        second.stop()

    assert len(before) <= (tmp_path / "store.sqlite").stat().st_size


def test_the_index_has_the_priority_of_the_pages(sqlite_url: str, cache: Path) -> None:
    """With a lower one, its thread would hold Python's lock while it waits for a CPU."""
    write(sqlite_url, ["a@0#0"])
    indexer = Indexer(sqlite_url, every_s=0.05)
    indexer.start()
    try:
        until(lambda: total(indexer.reader) == 1)
        assert indexer._thread.native_id is not None
        priority = os.getpriority(os.PRIO_PROCESS, indexer._thread.native_id)
        assert priority == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    finally:
        indexer.stop()


@pytest.mark.slow
def test_a_long_first_look_does_not_hide_what_is_written_after_it(
    sqlite_url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    refresh = StoreFollower.refresh

    async def slow(self: StoreFollower, *, compare: bool = False) -> None:
        await refresh(self, compare=compare)
        looks.append(time.monotonic())
        await asyncio.sleep(2.0 if len(looks) == 1 else 0.0)

    monkeypatch.setattr(StoreFollower, "refresh", slow)
    monkeypatch.setattr(indexer_module, "REST_S", 0.1)
    write(sqlite_url, ["a@0#0"])
    indexer = Indexer(sqlite_url, every_s=0.05)
    indexer.start()
    try:
        until(lambda: len(looks) > 1)
    finally:
        indexer.stop()

    assert looks[1] - looks[0] < 15, "ten times as long as the first look would be 20"


@pytest.mark.slow
def test_a_run_that_was_made_anew_is_read_anew(
    tmp_path: Path, sqlite_url: str, cache: Path
) -> None:
    write(sqlite_url, ["a@0#0", "a@0#1"])
    indexer = Indexer(sqlite_url, every_s=0.05)
    reader = IndexReader(indexer.path)

    indexer.start()
    try:
        until(lambda: total(reader) == 2)
        for file in tmp_path.glob("store.sqlite*"):
            file.unlink()
        write(sqlite_url, ["b@0#0"])
        until(lambda: total(reader) == 1)
        assert [row.id for row in listed(reader, Selection()).rows] == ["b@0#0"]
    finally:
        indexer.stop()


def test_an_attempt_that_is_removed_while_a_page_is_made_is_not_on_it(
    tmp_path: Path, sqlite_url: str, cache: Path
) -> None:
    write(sqlite_url, ["a@0#0", "a@0#1"])
    indexer = Indexer(sqlite_url, every_s=0.05)
    indexer.start()
    try:
        until(lambda: total(indexer.reader) == 2)
    finally:
        indexer.stop()

    with indexer.reader.open() as index:
        assert len(index.columns["reward"]) > 1
        with closing(sqlite3.connect(indexer.path)) as connection, connection:
            query = "SELECT seq FROM attempts ORDER BY id"
            first, second = [row[0] for row in connection.execute(query)]
            connection.execute(
                "REPLACE INTO attempts (seq, alive, change) VALUES (?, 0, 999)", (first,)
            )
        assert [row.id for row in index.rows([first, second])] == ["a@0#1"]
        groups, _, _ = index.step_groups(Selection())
        assert [row.id for group in groups for row in group] == ["a@0#1"]


def test_an_index_that_breaks_while_it_is_used_says_so(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    reader = IndexReader(path)
    with pytest.raises(IndexUnavailableError):
        listed(reader, Selection())

    database.make(path)
    assert listed(reader, Selection()).total == 0
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE attempts")
    with pytest.raises(IndexUnavailableError):
        listed(reader, Selection())

    database.make(path)
    assert listed(reader, Selection()).total == 0
