"""Every arrow of the ledger, and the refusal of every move that is not an arrow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentevo.errors import StoreError
from agentevo.store import Store, TrajectoryState, open_store
from agentevo.types import Task, Trajectory

Make = Callable[..., Trajectory]


async def state(store: Store, name: str) -> tuple[TrajectoryState, int | None]:
    return {
        summary.id: (summary.state, summary.trained_step) for summary in await store.summaries()
    }[name]


@pytest.fixture
def play(url: str, make_trajectory: Make) -> Callable[[Callable[[Store], Awaitable[None]]], None]:
    """Runs a scenario on a store with the ready trajectories a, b, c, the failed one f and the
    evaluation e, all of step 1."""

    def run(scenario: Callable[[Store], Awaitable[None]]) -> None:
        async def main() -> None:
            async with await open_store(url) as store:
                ready = [make_trajectory(name) for name in "abc"]
                await store.write_trajectories(
                    [*ready, make_trajectory("f", status="failed", error="boom")],
                    split="train",
                    step=1,
                )
                await store.write_trajectories([make_trajectory("e")], split="eval", step=1)
                await scenario(store)

        asyncio.run(main())

    return run


def test_ready_reserved_committed(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        assert await store.reserve(["a", "b"], 5) == 2
        assert await state(store, "a") == ("reserved", 5)
        assert await store.reserve(["b", "a", "a"], 5) == 0, "asking again is harmless"
        assert await store.last_step() is None

        record = {
            "metrics": {"reward": 0.5, "nothing": float("nan")},
            "checkpoint": "checkpoints/5",
        }
        assert await store.commit_step(5, record, ids=["a", "b"]) == 2
        assert await state(store, "a") == ("committed", 5)
        assert await state(store, "c") == ("ready", None)
        assert await store.commit_step(5, record, ids=["a", "b"]) == 0, (
            "committing again is harmless"
        )

        last = await store.last_step()
        assert last is not None and (last.step, last.num_trajectories) == (5, 2)
        assert last.record == {
            "metrics": {"reward": 0.5, "nothing": None},
            "checkpoint": "checkpoints/5",
        }

        await store.commit_step(4, {})
        assert [step.step for step in await store.steps()] == [4, 5]

        stored = [stored async for stored in store.trajectories(trained_step=5)]
        assert [(s.trajectory.id, s.state, s.trained_step, s.step) for s in stored] == [
            ("a", "committed", 5, 1),
            ("b", "committed", 5, 1),
        ]

    play(scenario)


def test_steps_after_a_number(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        assert await store.steps(after=0) == []
        for step in (3, 1, 12, 2):
            await store.commit_step(step, {"of": step})

        found = {
            after: [(one.step, one.record["of"]) for one in await store.steps(after=after)]
            for after in (None, 0, 2, 3, 11, 12, 99)
        }
        numbers = [1, 2, 3, 12]
        assert found == {
            after: [(number, number) for number in numbers if number > (after or 0)]
            for after in found
        }

        last = await store.last_step()
        assert last is not None and last.step == 12

    play(scenario)


def test_reserve_refuses_all_or_takes_all(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        await store.reserve(["b"], 1)
        for name, message in [
            ("b", r"'b' can't be reserved for step 2: it is reserved\(1\)"),
            ("f", "it is failed"),
            ("e", "its split is 'eval'"),
            ("nobody", "not in the store"),
        ]:
            with pytest.raises(StoreError, match=message):
                await store.reserve(["a", name], 2)

        assert await state(store, "a") == ("ready", None)

        await store.commit_step(1, {})
        with pytest.raises(StoreError, match="step 1 is already committed"):
            await store.reserve(["a"], 1)
        with pytest.raises(StoreError, match=r"it is committed\(1\)"):
            await store.reserve(["b"], 2)

    play(scenario)


def test_commit_refuses_a_set_that_is_not_the_reserved_one(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        await store.reserve(["a", "b"], 1)
        with pytest.raises(StoreError, match="'c' is not reserved for it"):
            await store.commit_step(1, {}, ids=["a", "b", "c"])
        with pytest.raises(StoreError, match="'b' is reserved for it but not part of it"):
            await store.commit_step(1, {}, ids=["a"])
        with pytest.raises(StoreError, match="plain JSON"):
            await store.commit_step(1, {"model": object()})
        assert await store.steps() == [] and await state(store, "a") == ("reserved", 1)

        await store.commit_step(1, {"loss": 1.0})
        with pytest.raises(
            StoreError, match="already committed with another record: rewind to step 0"
        ):
            await store.commit_step(1, {"loss": 2.0})

        with pytest.raises(StoreError, match="'b' is reserved for it but not part"):
            await store.commit_step(1, {"loss": 1.0}, ids=["a"])

    play(scenario)


def test_release_gives_back_the_reserved_only(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        await store.reserve(["a"], 1)
        await store.reserve(["b"], 2)
        await store.reserve(["c"], 3)
        await store.commit_step(1, {})

        assert await store.release(1) == 0
        assert await store.release(2) == 1
        assert await state(store, "a") == ("committed", 1)
        assert await state(store, "b") == ("ready", None)
        assert await state(store, "c") == ("reserved", 3)
        assert await store.release() == 1
        assert await state(store, "c") == ("ready", None)

    play(scenario)


def test_drop_keeps_the_reason(play: Callable[..., None]) -> None:
    async def scenario(store: Store) -> None:
        await store.reserve(["a", "b"], 1)
        assert await store.drop(["b", "c", "f"], "no spread in the group") == 2
        assert await store.drop(["b"], "no spread in the group") == 0

        dropped = await store.summaries(state="dropped")
        assert [(s.id, s.drop_reason, s.trained_step) for s in dropped] == [
            ("b", "no spread in the group", None),
            ("c", "no spread in the group", None),
        ]
        assert await state(store, "f") == ("failed", None)
        assert await store.commit_step(1, {}, ids=["a"]) == 1

        for name, message in [
            ("a", "step 1 was trained on it"),
            ("nobody", "not in the store"),
            ("b", "was dropped before"),
        ]:
            with pytest.raises(StoreError, match=message):
                await store.drop([name], "stale")

        with pytest.raises(StoreError, match="it is dropped, not ready"):
            await store.reserve(["b"], 2)

    play(scenario)


def test_what_a_step_drops_is_dropped_with_its_commit_or_not_at_all(
    play: Callable[..., None],
) -> None:
    async def scenario(store: Store) -> None:
        await store.reserve(["a"], 1)
        dropped = {"no-spread": ["b"], "failed": ["f"]}
        with pytest.raises(StoreError, match="'c' is not reserved for it"):
            await store.commit_step(1, {}, ids=["a", "c"], dropped=dropped)
        assert await state(store, "b") == ("ready", None), "a refusal leaves all as it was"

        for _ in range(2):
            await store.commit_step(1, {}, ids=["a"], dropped=dropped)

        reasons = {s.id: (s.state, s.drop_reason) for s in await store.summaries()}
        assert reasons["b"] == ("dropped", "no-spread") and reasons["f"] == ("failed", None)

        await store.reserve(["c"], 2)
        with pytest.raises(StoreError, match="step 1 was trained on it"):
            await store.commit_step(2, {}, ids=["c"], dropped={"no-spread": ["a"]})

        await store.commit_step(2, {}, ids=[], dropped={"late": ["c"]})

    play(scenario)


def test_rewind_restores_the_moment_of_a_commit(
    play: Callable[..., None], make_trajectory: Make, make_task: Callable[..., Task]
) -> None:
    async def scenario(store: Store) -> None:
        await store.add_tasks([make_task("lost"), make_task("task"), make_task("held")])
        await store.reserve(["a"], 1)
        await store.commit_step(1, {})
        before = await store.summaries()
        lease = await store.lease_task("w", lease_s=60)
        assert lease is not None and lease.task.id == "lost"

        await store.write_trajectories(
            [make_trajectory("later", task_id="lost")], split="train", step=2, lease=lease
        )
        await store.reserve(["b", "later"], 2)
        await store.commit_step(2, {})
        await store.reserve(["c"], 3)
        with pytest.raises(StoreError, match="never committed"):
            await store.rewind(4)

        done = await store.lease_task("w", lease_s=60)
        assert done is not None and done.task.id == "task"

        await store.complete_task(done)
        held = await store.lease_task("w", lease_s=60)
        assert held is not None and held.task.id == "held"

        assert await store.rewind(1) == 1
        assert await store.summaries() == before
        assert [step.step for step in await store.steps()] == [1]
        assert (await store.counts())["turns"] == 10

        for late in (lease, held):
            with pytest.raises(StoreError, match="has moved on"):
                await store.complete_task(late)

        again = [
            lease and lease.task.id
            for lease in [await store.lease_task("w", lease_s=60) for _ in range(3)]
        ]
        assert again == ["lost", "held", None], "'task' still has the trajectory that completed it"

        other = make_trajectory("later", task_id="lost", reward=0.0)
        assert await store.write_trajectories([other], split="train", step=2) == 1, (
            "the id is free again"
        )
        assert await store.rewind(0) == 6
        assert await store.summaries() == [] and await store.steps() == []

    play(scenario)


def test_rewind_queues_no_task_that_was_only_evaluated(
    play: Callable[..., None], make_trajectory: Make, make_task: Callable[..., Task]
) -> None:
    """A sampler would take it and train on it."""

    async def scenario(store: Store) -> None:
        await store.add_tasks([make_task("held-out"), make_task("trained")], queue=False)
        for task, split in (("held-out", "eval"), ("trained", "train")):
            own = make_trajectory(f"of-{task}", task_id=task)
            await store.write_trajectories([own], split=split, step=5)
        assert await store.rewind(0) >= 2
        states = {s.task.id: s.state async for s in store.tasks()}
        assert (states["held-out"], states["trained"]) == ("completed", "queued")
        assert await store.rewind(-1) == 0, "back to before anything was evaluated"

    play(scenario)


def test_rewind_that_keeps_everything(
    play: Callable[..., None], make_trajectory: Make, make_task: Callable[..., Task]
) -> None:
    async def scenario(store: Store) -> None:
        await store.add_tasks([make_task("held")])
        held = await store.lease_task("w", lease_s=60)
        assert held is not None

        later = [make_trajectory(name) for name in ("early", "late", "unfit")] + [
            make_trajectory("gone", task_id="other")
        ]
        await store.write_trajectories(later, split="train", step=2)

        broken = [
            make_trajectory("broken", status="failed"),
            make_trajectory("cut", status="cancelled", error="cut: enough"),
        ]
        await store.write_trajectories(broken, split="train", step=2)
        await store.drop(["gone"], "stale")
        await store.drop(["c"], "of step 1")
        await store.reserve(["a"], 1)
        await store.commit_step(1, {})
        await store.drop(["unfit"], "zero-variance")
        await store.reserve(["b", "early"], 2)
        await store.commit_step(2, {})
        await store.reserve(["late"], 3)
        assert (await store.gc(dropped=True))["tokens"] == 1

        with pytest.raises(StoreError, match="never committed"):
            await store.rewind(4, keep=True)

        assert await store.rewind(1, keep=True) == 4
        assert [step.step for step in await store.steps()] == [1]
        assert await state(store, "a") == ("committed", 1)

        for name in ("b", "early", "late", "unfit"):
            assert await state(store, name) == ("ready", None)

        places = {s.id: (s.state, s.drop_reason) for s in await store.summaries()}
        assert places["unfit"] == ("ready", None)
        assert (places["c"], places["gone"]) == (("dropped", "of step 1"), ("dropped", "stale")), (
            "of earlier steps, or without tokens"
        )
        assert (places["broken"], places["cut"]) == (("failed", None), ("failed", None))
        assert len((await store.trajectory("early")).turns) == 2

        await store.complete_task(held)
        assert await store.rewind(1, keep=True) == 0, "again is harmless"

    play(scenario)


def test_leases_fence_late_writers(
    url: str, clock: Any, make_task: Callable[..., Task], make_trajectory: Make
) -> None:
    async def scenario() -> None:
        async with await open_store(url, clock=clock) as store:
            await store.add_tasks([make_task("x"), make_task("y")])
            slow = await store.lease_task("slow", lease_s=10)
            other = await store.lease_task("other", lease_s=100)
            assert slow is not None and other is not None
            assert (slow.task, other.task) == (make_task("x"), make_task("y"))
            assert await store.lease_task("third", lease_s=10) is None

            clock.steady = 1010.0
            fast = await store.lease_task("fast", lease_s=10)
            assert fast is not None and (fast.task.id, fast.attempt, fast.expires_at) == (
                "x",
                2,
                1020.0,
            )
            assert fast.fencing_id > slow.fencing_id

            for late in (
                store.complete_task(slow),
                store.fail_task(slow, "boom"),
                store.write_trajectories(
                    [make_trajectory("late")], split="train", step=1, lease=slow
                ),
            ):
                with pytest.raises(StoreError, match="lease 1 of 'slow' ran out"):
                    await late

            assert await store.summaries() == []

            assert (
                await store.write_trajectories(
                    [make_trajectory("good")], split="train", step=1, lease=fast
                )
                == 1
            )
            assert (
                await store.write_trajectories(
                    [make_trajectory("good")], split="train", step=1, lease=fast
                )
                == 0
            )

            await store.complete_task(fast)
            with pytest.raises(StoreError, match="already completed"):
                await store.fail_task(fast, "boom")

            await store.fail_task(other, "boom")
            counts = await store.counts()
            assert (counts["tasks/completed"], counts["tasks/failed"]) == (1, 1)

            clock.steady = 1e9
            assert await store.lease_task("third", lease_s=10) is None

    asyncio.run(scenario())


def test_two_stores_never_lease_the_same_task(url: str, make_task: Callable[..., Task]) -> None:
    async def scenario() -> None:
        async with await open_store(url) as one, await open_store(url) as two:
            await one.add_tasks([make_task(f"t{i}") for i in range(40)])
            leases = await asyncio.gather(
                *((one, two)[i % 2].lease_task(str(i), lease_s=60) for i in range(50))
            )
            names = [lease.task.id for lease in leases if lease is not None]
            assert len(names) == 40 == len(set(names))

    asyncio.run(scenario())
