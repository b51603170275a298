"""Heartbeats, retries, poison, and clocks that jump."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentevo.errors import StoreError
from agentevo.store import RetryPolicy, Store, open_store
from agentevo.types import Task, Trajectory


async def leased(store: Store, lease_s: float = 10.0) -> Any:
    lease = await store.lease_task("w", lease_s=lease_s)
    assert lease is not None
    return lease


def test_a_heartbeat_keeps_the_lease_and_a_lost_one_is_refused(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("x")])
            first = await leased(store)
            for _ in range(5):
                clock.steady += 8
                renewed = await store.renew(first)
                assert (
                    renewed.expires_at == clock.steady + 10
                    and renewed.fencing_id == first.fencing_id
                )
                assert await store.lease_task("thief", lease_s=10) is None

            assert (await store.renew(first, lease_s=30)).lease_s == 30

            clock.steady += 31
            assert (await store.renew(first)).expires_at == clock.steady + 10, (
                "nobody has taken it over yet"
            )

            clock.steady += 10
            second = await leased(store)
            for late in (
                store.renew(first),
                store.retry_task(first, "e"),
                store.complete_task(first),
            ):
                with pytest.raises(StoreError, match="ran out and the task has moved on"):
                    await late

            await store.complete_task(second)
            with pytest.raises(StoreError, match=r"'x' is already completed and has no lease$"):
                await store.renew(second)

    asyncio.run(scenario())


def test_retries_back_off_and_end_as_poison(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    retries = RetryPolicy(max_failures=4, first_delay_s=2.0, max_delay_s=5.0)

    async def scenario() -> None:
        async with await open_store(url, clock=clock, retries=retries) as store:
            await store.add_tasks([make_task("x")])
            for number, delay in enumerate([2.0, 4.0, 5.0], start=1):
                lease = await leased(store)
                assert lease.attempt == number
                assert await store.retry_task(lease, f"engine gone {number}") == "queued"
                assert await store.retry_task(lease, f"engine gone {number}") == "queued", (
                    "saying it again counts once"
                )
                clock.steady += delay - 0.01
                assert await store.lease_task("w", lease_s=10) is None
                clock.steady += 0.02

            lease = await leased(store)
            assert await store.retry_task(lease, "engine gone 4") == "poison"
            assert await store.retry_task(lease, "engine gone 4") == "poison"

            clock.steady += 1e6
            assert await store.lease_task("w", lease_s=10) is None

            stored = await store.stored_task("x")
            assert (stored.state, stored.num_failures, stored.error) == (
                "poison",
                4,
                "engine gone 4",
            )
            assert [(e.kind, e.error, e.worker, e.fencing_id) for e in stored.history] == [
                ("retried", f"engine gone {i}", "w", i) for i in range(1, 5)
            ]
            assert (await store.counts())["tasks/poison"] == 1
            assert [s async for s in store.tasks(state="poison")] == [stored]

    asyncio.run(scenario())


def test_tasks_go_on_behind_any_of_them_whatever_its_state(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def names(store: Any, **options: Any) -> list[str]:
        return [task.task.id async for task in store.tasks(**options)]

    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task(name) for name in "cabed"])
            lease = await leased(store)
            await store.complete_task(lease)

            assert await names(store) == list("cabed")
            assert await names(store, after="a") == list("bed")
            assert await names(store, after="c", state="queued") == list("abed")
            assert await names(store, after="a", state="completed") == []
            assert await names(store, after="d") == []

            with pytest.raises(StoreError, match="no task 'nix'"):
                await names(store, after="nix")

    asyncio.run(scenario())


def test_a_task_that_kills_its_workers_is_set_aside(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock, retries=RetryPolicy(max_expiries=3)) as store:
            await store.add_tasks([make_task("bad"), make_task("good")])
            for _ in range(3):
                assert (await leased(store)).task.id == "bad"
                clock.steady += 11
            assert (await leased(store, 1e6)).task.id == "good"

            stored = await store.stored_task("bad")
            assert (
                stored.state == "poison"
                and stored.error is not None
                and "ran out 3 times" in stored.error
            )
            assert [event.kind for event in stored.history] == ["expired"] * 3
            assert await store.lease_task("w", lease_s=10) is None

    asyncio.run(scenario())


def test_leases_that_ran_out_together_are_all_looked_at(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    """Also behind one that is set aside on the way."""

    async def scenario() -> None:
        async with await open_store(url, clock=clock, retries=RetryPolicy(max_expiries=2)) as store:
            await store.add_tasks([make_task(name) for name in ("bad", "a", "b", "c")])
            assert (await leased(store)).task.id == "bad"

            clock.steady += 11
            assert len(await store.lease_tasks("w", lease_s=10, limit=9)) == 4

            clock.steady += 11
            assert sorted(
                lease.task.id for lease in await store.lease_tasks("w", lease_s=10, limit=3)
            ) == ["a", "b", "c"]
            assert (await store.stored_task("bad")).state == "poison"
            assert await store.lease_tasks("w", lease_s=10, limit=3) == []

    asyncio.run(scenario())


def test_a_failed_task_is_not_an_infrastructure_failure(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("x")])
            lease = await leased(store)
            await store.fail_task(lease, "no such tool")
            await store.fail_task(lease, "no such tool")
            stored = await store.stored_task("x")
            assert (stored.state, stored.num_failures, stored.error) == (
                "failed",
                0,
                "no such tool",
            )
            assert [event.kind for event in stored.history] == ["failed"]

            with pytest.raises(StoreError, match="already failed"):
                await store.retry_task(lease, "e")

    asyncio.run(scenario())


def test_a_task_that_is_returned_is_anybodys_at_once(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock, retries=RetryPolicy(max_failures=2)) as store:
            await store.add_tasks([make_task("x"), make_task("y")])
            for _ in range(5):
                lease = await leased(store)
                assert lease.task.id == "x", "in its old place"
                await store.return_task(lease)
                await store.return_task(lease)

            stored = await store.stored_task("x")
            assert (stored.state, stored.num_failures, stored.num_expiries, stored.history) == (
                "queued",
                0,
                0,
                [],
            )

            held = await leased(store)
            with pytest.raises(StoreError, match="has moved on"):
                await store.return_task(lease)

            await store.complete_task(held)
            with pytest.raises(StoreError, match="already completed"):
                await store.return_task(held)

    asyncio.run(scenario())


def test_tasks_without_a_queue_are_never_leased(url: str, make_task: Callable[..., Task]) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            await store.add_tasks([make_task("queued"), make_task("held")])
            held = await leased(store)
            assert held.task.id == "queued"
            assert (
                await store.add_tasks(
                    [make_task(name) for name in ("queued", "held", "new")], queue=False
                )
                == 1
            )
            assert [s.state async for s in store.tasks()] == ["leased", "completed", "completed"]
            assert await store.lease_tasks("w", lease_s=10, limit=9) == []
            assert await store.add_tasks([make_task("new")]) == 0
            assert (await store.stored_task("new")).state == "completed", (
                "known ones stay where they are"
            )

            await store.complete_task(held)
            with pytest.raises(StoreError, match="other content"):
                await store.add_tasks(
                    [make_task("newer"), make_task("new", query="else")], queue=False
                )

            assert (await store.counts())["tasks/completed"] == 3

    asyncio.run(scenario())


def test_outstanding_counts_tasks_and_groups_on_their_way(
    url: str, make_task: Callable[..., Task], make_trajectory: Any
) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:
            assert await store.outstanding("train") == 0

            await store.add_tasks([make_task(f"t{i}") for i in range(5)])
            first, second, _ = await store.lease_tasks("w", lease_s=60, limit=3)
            assert await store.outstanding("train") == 5

            members = [
                make_trajectory(f"a{i}", task_id="t0", group_id="t0/train@1") for i in range(3)
            ]
            members += [make_trajectory("a3", task_id="t0", group_id="t0/baseline@1")]
            await store.write_trajectories(members, split="train", step=1, lease=first)
            await store.write_trajectories(
                [make_trajectory("e", task_id="t9")], split="eval", step=1
            )

            assert await store.outstanding("train") == 5, (
                "a group and the attempt beside it are one"
            )
            assert await store.outstanding("eval") == 5

            broken = [make_trajectory("b0", task_id="t1", group_id="t1", status="failed")]
            broken += [make_trajectory("b1", task_id="t1", group_id="t1", status="cancelled")]
            await store.write_trajectories(broken, split="train", step=1, lease=second)
            assert await store.outstanding("train") == 4, (
                "nobody will ever take a group in which nothing completed"
            )

            await store.drop(["a0", "a3"], "stale")
            await store.reserve(["a1", "a2"], 1)
            assert await store.outstanding("train") == 4

            await store.commit_step(1, {})
            assert await store.outstanding("train") == 3
            with pytest.raises(StoreError, match="split 'training' is unknown"):
                await store.outstanding("training")  # type: ignore[arg-type]

    asyncio.run(scenario())


def test_many_are_leased_at_once_in_order(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task(f"t{i}") for i in range(6)])
            ran_out, again = await store.lease_tasks("w", lease_s=1, limit=2)
            assert await store.retry_task(again, "e") == "queued"

            clock.steady += 60
            leases = await store.lease_tasks("w", lease_s=10, limit=5)
            assert [lease.task.id for lease in leases] == ["t0", "t1", "t2", "t3", "t4"]
            assert [lease.fencing_id for lease in leases] == [2, 2, 1, 1, 1]
            assert [
                lease.task.id for lease in await store.lease_tasks("w", lease_s=10, limit=5)
            ] == ["t5"]
            assert await store.lease_tasks("w", lease_s=10, limit=5) == []

            with pytest.raises(StoreError, match="moved on"):
                await store.complete_task(ran_out)

    asyncio.run(scenario())


def test_leases_survive_a_wall_clock_that_jumps(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("x")])
            lease = await leased(store)
            for jump in (1e8, -2e8):
                clock.wall += jump
                clock.steady += 1
                assert await store.lease_task("thief", lease_s=10) is None
                lease = await store.renew(lease)

            await store.complete_task(lease)

    asyncio.run(scenario())


def test_a_clock_set_back_costs_at_most_a_lease_and_a_delay(
    url: str, clock: Any, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(
            url, clock=clock, retries=RetryPolicy(max_delay_s=5.0)
        ) as store:
            await store.add_tasks([make_task("held"), make_task("waits")])
            await leased(store, 10.0)
            assert await store.retry_task(await leased(store, 10.0), "e") == "queued"

            clock.steady = 1.0
            assert await store.lease_task("w", lease_s=10) is None, "both were begun again"

            clock.steady = 5.9
            assert await store.lease_task("w", lease_s=10) is None

            clock.steady = 6.01
            assert (await leased(store, 100.0)).task.id == "waits"

            clock.steady = 11.0
            assert (await leased(store, 100.0)).task.id == "held"

    asyncio.run(scenario())


def test_the_stores_own_clock_goes_on(url: str, make_task: Callable[..., Task]) -> None:
    async def scenario() -> None:
        async with await open_store(url, retries=RetryPolicy(first_delay_s=0.05)) as store:
            await store.add_tasks([make_task("x"), make_task("y")])
            await leased(store, 0.2)
            assert await store.retry_task(await leased(store, 60.0), "e") == "queued"

            found = set()
            while len(found) < 2:
                if lease := await store.lease_task("w", lease_s=60):
                    found.add(lease.task.id)
                await asyncio.sleep(0.02)

            assert found == {"x", "y"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_whole_groups_are_listed_oldest_first(
    url: str, make_trajectory: Callable[..., Trajectory]
) -> None:
    async def scenario() -> None:
        async with await open_store(url) as store:

            async def write(group: str, *names: str, split: Any = "train", **changes: Any) -> None:
                members = [
                    make_trajectory(f"{group}{n}", group_id=group, num_turns=1, **changes)
                    for n in names
                ]
                await store.write_trajectories(members, split=split, step=1)

            async def ready(size: int = 2, limit: int = 9, split: Any = "train") -> list[str]:
                return await store.ready_groups(split, size=size, limit=limit)

            assert await ready() == []

            await write("half", "0")
            await write("b", "0", "1")
            await write("a", "0", "1")
            await write("broken", "0", "1", status="failed")
            await write("short", "0", status="failed")
            await write("short", "1", status="cancelled")
            await write("short", "2")
            await write("e", "0", "1", split="eval")

            assert await ready() == ["b", "a", "short"]
            assert await ready(limit=1) == ["b"]
            assert await ready(limit=0) == []
            assert await ready(split="eval") == ["e"]

            await write("half", "1")
            assert await ready() == ["half", "b", "a", "short"]
            assert await ready(size=3) == ["short"]
            assert await ready(size=4) == []

            await store.reserve(["b0"], 1)
            await store.drop(["a1"], "stale")
            assert await ready() == ["half", "a", "short"], (
                "a member that was dropped counts, a reserved one says that the group is taken"
            )

            await store.drop(["a0"], "stale")
            assert await ready() == ["half", "short"]

            await store.release()
            assert await ready() == ["half", "b", "short"]

            await store.reserve(["b0", "b1"], 1)
            await store.commit_step(1, {})
            assert await ready() == ["half", "short"]

            with pytest.raises(StoreError, match="at least one member"):
                await ready(size=0)

            for n in range(150):
                await write(f"many{n}", "0")
            for n in reversed(range(150)):
                await write(f"many{n}", "1")

            assert (await ready(limit=100))[2:] == [f"many{n}" for n in range(98)]

    asyncio.run(scenario())


def test_what_was_set_aside_is_queued_again_with_its_history(
    url: str, make_task: Callable[..., Task]
) -> None:
    async def scenario() -> None:
        async with await open_store(url, retries=RetryPolicy(max_failures=1)) as store:
            await store.add_tasks(
                [make_task(name) for name in ("poison", "failed", "done", "held")]
            )
            leases = {
                lease.task.id: lease for lease in await store.lease_tasks("w", lease_s=60, limit=4)
            }
            assert await store.retry_task(leases["poison"], "CUDA error") == "poison"

            await store.fail_task(leases["failed"], "no room")
            await store.complete_task(leases["done"])
            assert await store.queue_again() == 2
            assert await store.queue_again() == 0

            states = {stored.task.id: stored.state async for stored in store.tasks()}
            assert states == {
                "poison": "queued",
                "failed": "queued",
                "done": "completed",
                "held": "leased",
            }

            again = await store.stored_task("poison")
            assert (again.num_failures, again.num_expiries, again.error) == (0, 0, None)
            assert [event.error for event in again.history] == ["CUDA error"]

            with pytest.raises(StoreError, match="has moved on"):
                await store.complete_task(leases["poison"])

            taken = await store.lease_tasks("w", lease_s=60, limit=4)
            assert {lease.task.id for lease in taken} == {"poison", "failed"}

            await store.complete_task(taken[0])

    asyncio.run(scenario())
