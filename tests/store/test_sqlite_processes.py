"""One SQLite file in several processes, some of which die in the middle."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from subprocess import Popen

import pytest
from sqlalchemy import text

from agentevo.store import open_store
from agentevo.store.sqlite import SQLiteStore
from agentevo.types import Task

Start = Callable[..., "Popen[str]"]


PROGRAM = """
import asyncio, os, signal, sys
from agentevo.store import open_store
from agentevo.types import Trajectory, Turn

def trajectory(name):
    turn = Turn(
        index=0, prompt_ids=[1] * 200, completion_ids=[2] * 200, logprobs=[-0.5] * 200,
        versions=[0] * 200, finish_reason="stop",
    )
    return Trajectory(id=name, task_id="task", group_id="group", turns=[turn])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

async def main(url):
    store = await open_store(url)
    BODY

asyncio.run(main(sys.argv[1]))
"""


def program(body: str) -> str:
    return PROGRAM.replace("BODY", body.strip().replace("\n", "\n    "))


@pytest.mark.slow
def test_many_processes_may_open_a_new_store_at_once(sqlite_url: str, start_script: Start) -> None:
    body = (
        "await store.write_trajectories([trajectory(sys.argv[2])], split='train', "
        "step=1)\nawait store.close()"
    )
    processes = [start_script(program(body), sqlite_url, f"p{i}") for i in range(4)]
    assert [process.wait(300) for process in processes] == [0] * 4

    async def scenario() -> None:
        async with await open_store(sqlite_url, create=False) as store:
            assert {summary.id for summary in await store.summaries()} == {"p0", "p1", "p2", "p3"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_readers_in_another_process_see_whole_batches_while_one_writes(
    sqlite_url: str, start_script: Start
) -> None:
    body = """
print("open", flush=True)
for batch in range(20):
    many = [trajectory(f"{batch}-{i}") for i in range(50)]
    await store.write_trajectories(many, split="train", step=batch)
print("done", flush=True)
sys.stdin.read()
"""

    async def scenario() -> None:
        writer = start_script(program(body), sqlite_url)
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"

        sizes = set()
        async with await open_store(sqlite_url, timeout_s=300) as store:
            while (count := (await store.counts())["trajectories/train/ready"]) < 1000:
                assert count == len(await store.summaries(limit=count)), (
                    "what was counted can be read"
                )
                sizes.add(count)
                assert (
                    writer.poll() is None
                    or (await store.counts())["trajectories/train/ready"] == 1000
                )

            assert [stored.trajectory.id async for stored in store.trajectories(step=7)] == [
                f"7-{i}" for i in range(50)
            ]

        assert all(size % 50 == 0 for size in sizes), "a transaction is seen whole or not at all"

        writer.kill()
        writer.wait()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_crash_between_reserve_and_commit_can_be_released(
    sqlite_url: str, start_script: Start
) -> None:
    body = """
await store.write_trajectories([trajectory(name) for name in "abc"], split="train", step=1)
await store.reserve(["a"], 1)
await store.commit_step(1, {"loss": 1.0})
await store.reserve(["b", "c"], 2)
die()
"""
    assert start_script(program(body), sqlite_url).wait(300) == -signal.SIGKILL

    async def scenario() -> None:
        async with await open_store(sqlite_url, create=False) as store:
            assert [(s.state, s.trained_step) for s in await store.summaries()] == [
                ("committed", 1),
                ("reserved", 2),
                ("reserved", 2),
            ]
            assert await store.release() == 2
            await store.reserve(["b", "c"], 2)
            assert await store.commit_step(2, {"loss": 0.5}, ids=["b", "c"]) == 2
            assert [step.num_trajectories for step in await store.steps()] == [1, 2]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_crash_inside_the_commit_leaves_no_half_step(
    sqlite_url: str, start_script: Start
) -> None:
    body = """
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection
await store.write_trajectories([trajectory("a")], split="train", step=1)
await store.reserve(["a"], 1)
@event.listens_for(store._engine, "after_cursor_execute")
def strike(connection, cursor, statement, *rest):
    if statement.startswith("INSERT INTO steps"):
        die()
await store.commit_step(1, {})
"""
    assert start_script(program(body), sqlite_url).wait(300) == -signal.SIGKILL

    async def scenario() -> None:
        async with await open_store(sqlite_url) as store:
            assert await store.steps() == []
            assert [(s.state, s.trained_step) for s in await store.summaries()] == [("reserved", 1)]

    asyncio.run(scenario())


@pytest.mark.slow
def test_kills_at_random_moments_never_tear_the_ledger(
    sqlite_url: str, start_script: Start
) -> None:
    body = """
last = await store.last_step()
first = last.step + 1 if last else 1
await store.rewind(first - 1)
print("ready", flush=True)
for step in range(first, 100000):
    names = [f"{step}-{i}" for i in range(20)]
    await store.write_trajectories([trajectory(name) for name in names], split="train", step=step)
    await store.reserve(names, step)
    await store.commit_step(step, {}, ids=names)
    print(step, flush=True)
"""
    rng = random.Random(0)
    for _ in range(4):
        process = start_script(program(body), sqlite_url)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(rng.randrange(1, 6)):
            assert process.stdout.readline()
        time.sleep(rng.uniform(0, 0.03))  # about one step
        process.kill()
        process.wait()

    async def scenario() -> None:
        async with await SQLiteStore.open(sqlite_url) as store:
            steps = await store.steps()
            assert [step.step for step in steps] == list(range(1, len(steps) + 1))
            for step in steps:
                trained = await store.summaries(trained_step=step.step)
                assert [(s.id, s.state) for s in trained] == [
                    (f"{step.step}-{i}", "committed") for i in range(20)
                ]

            assert (await store.counts())["trajectories/train/committed"] == 20 * len(steps) > 0

            check = await store._run(
                "check", lambda rows: rows.connection.scalar(text("PRAGMA integrity_check"))
            )
            assert check == "ok"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_reader_in_another_process_leaves_the_log_of_those_who_write(tmp_path) -> None:
    """A second store of the same process used to give up the first one's lock on the file."""
    url = f"sqlite:///{tmp_path / 's.sqlite'}"
    look = (
        "import asyncio, sys\n"
        "from agentevo.store import open_store\n"
        "async def look():\n"
        "    async with await open_store(sys.argv[1], create=False) as store:\n"
        "        print(len([task async for task in store.tasks()]))\n"
        "asyncio.run(look())\n"
    )

    async def scenario() -> None:
        async with await open_store(url) as first, await open_store(url) as second:
            for store, number in ((first, 1), (second, 2), (first, 3), (second, 4)):
                await store.add_tasks([Task(id=str(number), query="?")])
                command = (sys.executable, "-c", look, url)
                seen = await asyncio.to_thread(subprocess.check_output, command, text=True)
                assert int(seen) == number
                again = await open_store(url)
                await again.close()

    asyncio.run(scenario())
