"""Several processes on one store, killed at random moments: nothing half-written, no task lost or
done twice, nothing trained twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
from server_fixtures import running_mongodb
from servers import MongoDB, PostgreSQL, unused_name

from agentevo.errors import StoreError, StoreUnavailableError
from agentevo.store import Store, open_store
from agentevo.types import Task, Trajectory

Start = Callable[..., "Popen[str]"]

SAMPLER = """
import asyncio, random, sys
from agentevo.store import RetryPolicy, open_store
from agentevo.types import Trajectory, Turn

async def main(url, seed):
    rng = random.Random(seed)
    retries = RetryPolicy(
        max_failures=10**6, max_expiries=10**6, first_delay_s=0.01, max_delay_s=0.05
    )
    store = await open_store(url, retries=retries)
    print("open", flush=True)
    while True:
        leases = await store.lease_tasks(seed, lease_s=2.0, limit=rng.randrange(1, 4))
        if not leases:
            await asyncio.sleep(0.02)
        for lease in leases:
            name = f"{lease.task.id}#{lease.fencing_id}"
            tokens = dict(
                prompt_ids=[1] * 200, completion_ids=[2] * 50, logprobs=[-0.5] * 50,
                versions=[0] * 50,
            )
            turn = Turn(index=0, finish_reason="stop", **tokens)
            task = lease.task.id
            members = [
                Trajectory(id=f"{name}.{i}", task_id=task, group_id=task, turns=[turn])
                for i in range(2)
            ]
            try:
                if rng.random() < 0.2:
                    await store.retry_task(lease, "unlucky")
                    continue
                lease = await store.renew(lease)
                await store.write_trajectories(members, split="train", step=1, lease=lease)
            except Exception as error:
                if "moved on" not in str(error):
                    raise

asyncio.run(main(*sys.argv[1:]))
"""

TRAINER = """
import asyncio, sys
from agentevo.store import open_store

async def main(url):
    store = await open_store(url)
    await store.release()
    last = await store.last_step()
    step = last.step if last else 0
    print("open", flush=True)
    while True:
        groups = await store.ready_groups("train", size=2, limit=3)
        if not groups:
            await asyncio.sleep(0.02)
            continue
        step += 1
        ids = [
            s.trajectory.id
            for group in groups
            async for s in store.trajectories(group_id=group, state="ready")
        ]
        await store.reserve(ids, step)
        checkpoint = {"path": f"checkpoints/{step}", "sha256": "0"}
        await store.commit_step(step, {"ids": ids, "checkpoint": checkpoint}, ids=ids)

asyncio.run(main(sys.argv[1]))
"""


async def check_whole(store: Store, num_tasks: int) -> None:
    """Every task done by one lease, its two trajectories whole, each in exactly one step, which
    says so."""
    counts = await store.counts()
    assert counts["tasks/completed"] == num_tasks
    assert (
        counts["trajectories/train/committed"]
        == 2 * num_tasks
        == sum(n for key, n in counts.items() if key.startswith("trajectories/"))
    )

    trained = Counter(name for step in await store.steps() for name in step.record["ids"])
    seen: dict[str, set[str]] = {}
    async for stored in store.trajectories():
        trajectory = stored.trajectory
        assert len(trajectory.turns) == 1 and list(trajectory.turns[0].completion_ids) == [2] * 50
        assert trained[trajectory.id] == 1
        seen.setdefault(trajectory.task_id, set()).add(trajectory.id.partition(".")[0])

    assert all(len(leases) == 1 for leases in seen.values()) and len(seen) == num_tasks


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_tasks", "kills"), [(20, 3), pytest.param(100, 20, marks=pytest.mark.soak)]
)
def test_kills_lose_nothing_and_double_nothing(
    num_tasks: int, kills: int, new_url: Callable[[], str], start_script: Start
) -> None:
    """Kills are spread over the work: each waits until its share of the tasks is committed."""
    rng = random.Random(7)

    async def scenario() -> None:
        url = new_url()
        async with await open_store(url) as store:
            await store.add_tasks([Task(id=f"t{i}") for i in range(num_tasks)])

            def start(slot: int) -> Popen[str]:
                return (
                    start_script(TRAINER, url)
                    if slot == 0
                    else start_script(SAMPLER, url, f"w{slot}-{rng.random()}")
                )

            async def until_committed(tasks: int) -> None:
                deadline = time.monotonic() + 900
                while (await store.counts())["trajectories/train/committed"] < 2 * tasks:
                    assert all(process.poll() is None for process in slots), (
                        "a process died by itself"
                    )
                    assert time.monotonic() < deadline, await store.counts()
                    await asyncio.sleep(0.02)

            slots = [start(slot) for slot in range(4)]
            for kill in range(kills):
                victim = kill % len(slots)
                output = slots[victim].stdout
                assert output is not None
                assert await asyncio.to_thread(output.readline) == "open\n"

                await until_committed(num_tasks * kill // (kills + 4))
                await asyncio.sleep(rng.random() * 0.15)
                slots[victim].kill()
                assert slots[victim].wait() == -signal.SIGKILL

                slots[victim] = start(victim)

            await until_committed(num_tasks)
            for process in slots:
                process.kill()
                process.wait()

            await store.release()
            await check_whole(store, num_tasks)

    asyncio.run(scenario())


@pytest.mark.slow
def test_many_processes_lease_different_tasks(
    new_url: Callable[[], str], start_script: Start
) -> None:
    program = """
import asyncio, sys
from agentevo.store import open_store
async def main(url):
    async with await open_store(url) as store:
        while leases := await store.lease_tasks("w", lease_s=600, limit=3):
            print(*(lease.task.id for lease in leases), flush=True)
asyncio.run(main(sys.argv[1]))
"""

    async def scenario() -> None:
        url = new_url()
        async with await open_store(url) as store:
            await store.add_tasks([Task(id=f"t{i}") for i in range(100)])
            processes = [start_script(program, url) for _ in range(3)]
            outputs = [
                await asyncio.to_thread(process.stdout.read)
                for process in processes
                if process.stdout
            ]
            assert [process.wait() for process in processes] == [0, 0, 0]
            assert sorted(" ".join(outputs).split()) == sorted(f"t{i}" for i in range(100))

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_postgresql_server_that_restarts_is_waited_for(
    own_postgresql: PostgreSQL, mode: str
) -> None:
    server = own_postgresql

    async def scenario() -> None:
        async with await open_store(server.url("restart"), timeout_s=300) as store:
            await store.add_tasks([Task(id=f"t{i}") for i in range(60)])

            async def worker(name: str) -> None:
                while (lease := await store.lease_task(name, lease_s=600)) is not None:
                    trajectory = Trajectory(
                        id=lease.task.id, task_id=lease.task.id, group_id=lease.task.id
                    )
                    await store.write_trajectories([trajectory], split="train", step=1, lease=lease)
                    await asyncio.sleep(0.05)

            async def restart() -> None:
                for _ in range(2):
                    await asyncio.sleep(0.4)
                    await asyncio.to_thread(server.stop, mode)
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(server.start)

            await asyncio.gather(worker("a"), worker("b"), restart())
            counts = await store.counts()
            assert counts["tasks/queued"] == 0
            assert counts["trajectories/train/ready"] == counts["tasks/completed"] >= 56, (
                "an answer that got lost leaves its lease to run out"
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_postgresql_server_that_stays_away_is_called_unavailable(
    own_postgresql: PostgreSQL,
) -> None:
    server = own_postgresql

    async def scenario() -> None:
        async with await open_store(server.url("gone"), timeout_s=3) as store:
            await store.add_tasks([Task(id="x")])
            server.stop()
            start = time.monotonic()

            with pytest.raises(
                StoreUnavailableError, match=r"add_tasks: .+: the database can't be used now"
            ):
                await store.add_tasks([Task(id="y")])

            assert time.monotonic() - start < 300

            server.start()
            assert await store.add_tasks([Task(id="x"), Task(id="y")]) == 1

            server.stop()

        with pytest.raises(StoreUnavailableError, match="open: "):
            await open_store(server.url("gone"), timeout_s=3)

        server.start()

    asyncio.run(scenario())


@pytest.mark.slow
def test_postgresql_urls_and_foreign_schemas_are_refused(postgresql: PostgreSQL) -> None:
    async def scenario() -> None:
        for url, message in [
            ("postgresql://", "names no database"),
            (postgresql.url("Not-Good"), "use small letters"),
            (postgresql.url("missing") + "&colour=red", "'colour' is not an option"),
        ]:
            with pytest.raises(StoreError, match=message):
                await open_store(url, create=False, timeout_s=300)

        with pytest.raises(StoreError, match="no store in the schema 'nothing_here'"):
            await open_store(postgresql.url("nothing_here"), create=False)
        with pytest.raises(StoreError, match="has other tables"):
            await open_store(postgresql.url("pg_catalog"))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_mongodb_server_without_transactions_is_refused(tmp_path: Path) -> None:
    async def scenario(server: MongoDB) -> None:
        with pytest.raises(StoreError, match=r"has no transactions.*--replSet"):
            await open_store(server.url(unused_name()), timeout_s=300)

    with running_mongodb(tmp_path, replica_set="") as server:
        asyncio.run(scenario(server))


@pytest.mark.slow
def test_a_mongodb_server_that_goes_away_is_called_unavailable(tmp_path: Path) -> None:
    if "AGENTEVO_TEST_MONGODB" in os.environ:
        pytest.skip("a server that was given is not ours to stop")

    async def scenario(server: MongoDB) -> None:
        async with await open_store(server.url(unused_name()), timeout_s=5) as store:
            await store.add_tasks([Task(id="x")])
            lease = await store.lease_task("w", lease_s=60)
            assert lease is not None

            server.stop()
            for call in (
                store.renew(lease),
                store.add_tasks([Task(id="y")]),
                store.lease_tasks("w", lease_s=1, limit=1),
            ):
                with pytest.raises(StoreUnavailableError, match="can't be used now"):
                    await call

    with running_mongodb(tmp_path) as server:
        asyncio.run(scenario(server))


@pytest.mark.slow
def test_mongodb_urls_and_foreign_databases_are_refused(mongodb: MongoDB) -> None:
    async def scenario() -> None:
        with pytest.raises(StoreError, match="names a database"):
            await open_store("mongodb://localhost/")
        with pytest.raises(StoreError, match="not the URL"):
            await open_store("mongodb://local host:x/y")
        with pytest.raises(StoreError, match="this database has no store"):
            await open_store(mongodb.url(unused_name()), create=False)

    asyncio.run(scenario())
