"""What a trainer learns of attempts that never come: told, counted, and the end of waiting in
vain."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from agentevo.errors import TrainingError
from agentevo.rollout.sampler import group_name
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.orchestration import rollout_sources as attempts
from agentevo.runs.orchestration.lost_attempts import IN_VAIN_STEPS, PAGE, LostAttempts
from agentevo.runs.orchestration.rollout_sources import GroupStream, RolloutRound
from agentevo.store import open_store
from agentevo.store.records import RetryPolicy
from agentevo.types import Task, Trajectory, Turn

ONE_TRY = RetryPolicy(max_failures=1)


def attempt(name, group, status="completed", *, versions=(0, 0)):
    turn = Turn(
        index=0,
        parent=None,
        prompt_ids=[1],
        completion_ids=[2] * len(versions),
        logprobs=[-1.0] * len(versions),
        versions=list(versions),
        finish_reason="stop",
    )
    error = None if status == "completed" else "no such tool"
    return Trajectory(
        id=name,
        task_id=group.partition("/")[0],
        group_id=group,
        turns=[turn],
        reward=0.0,
        status=status,
        error=error,
    )


async def poison(store, names):
    await store.add_tasks([Task(id=name) for name in names])
    for lease in await store.lease_tasks("w", lease_s=60, limit=len(names)):
        assert await store.retry_task(lease, f"CUDA error in {lease.task.id}") == "poison"


@pytest.fixture
def opened(small_config, tmp_path, monkeypatch):
    """`async with opened(*keys) as (config, store, lost, notes, stream)`."""
    monkeypatch.setattr(attempts, "POLL_INTERVAL_S", 0.0)

    @asynccontextmanager
    async def make(*keys):
        config = small_config(tmp_path / "run", "rollout.poll_s=0.01", *keys)
        notes = []
        async with await open_store(
            f"sqlite:///{tmp_path / 'store.sqlite'}", retries=ONE_TRY
        ) as store:
            lost = LostAttempts(config, store, notes.append)
            parts = SimpleNamespace(config=config, store=store, tasks=TaskSource(config, None))
            yield (
                config,
                store,
                lost,
                notes,
                GroupStream(parts, lost, lambda: False, lambda: None, serves_early=True),
            )

    return make


def test_tasks_that_are_set_aside_are_told_once_with_their_error(opened):
    async def work():
        async with opened() as (_, store, lost, notes, _):
            await poison(store, ["old"])
            await lost.look()
            assert lost.stats()["sampler/tasks_set_aside"] == 0, "an earlier life's"

            await poison(store, ["a", "b"])
            for _ in range(3):
                await lost.look()

            assert lost.stats()["sampler/tasks_set_aside"] == 2
            assert notes == [
                "1 task was set aside and will not be trained on, the last 'old' with: CUDA "
                "error in old",
                "2 tasks were set aside and will not be trained on, the last 'b' with: CUDA "
                "error in b",
            ]
            assert await store.queue_again() == 3

            await lost.look()
            for lease in await store.lease_tasks("w", lease_s=60, limit=1):
                assert await store.retry_task(lease, "again") == "poison"

            await lost.look()
            assert len(notes) == 3 and notes[-1].endswith("with: again"), (
                "it was queued again in between"
            )

    asyncio.run(work())


def test_attempts_are_counted_once_however_many_came(opened):
    async def work():
        async with opened() as (_, store, lost, _, _):
            await store.write_trajectories(
                [attempt("old", "t/train@1", "cancelled")], split="train", step=1
            )
            await lost.look()
            many = 3 * PAGE + 5
            await store.write_trajectories(
                [attempt(f"c{i}", "t/train@1", "cancelled") for i in range(many)],
                split="train",
                step=1,
            )
            await store.write_trajectories(
                [attempt("f", "t/train@1", "failed"), attempt("whole", "t/train@1")],
                split="train",
                step=1,
            )
            await store.write_trajectories(
                [attempt("e", "t/eval@1", "failed")], split="eval", step=1
            )

            for _ in range(2):
                await lost.look()

            found = lost.stats()
            assert (found["sampler/attempts_cancelled"], found["sampler/cancelled_tokens"]) == (
                many,
                2 * many,
            )
            assert found["sampler/attempts_failed"] == 1

    asyncio.run(work())


@pytest.mark.slow
def test_a_step_that_waits_while_every_task_is_set_aside_ends_the_run(opened):
    """Samplers queue new tasks for those: without this they would do so for ever."""

    async def work():
        async with opened("rollout.staleness=1", "rollout.policy=mask") as (
            config,
            store,
            lost,
            _,
            stream,
        ):
            await poison(store, [f"old{i}" for i in range(20)])
            await lost.look()
            bound = IN_VAIN_STEPS * config.trainer.groups_per_step
            await poison(store, [f"new{i}" for i in range(bound - 1)])

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stream.round(1, [Task(id="any")] * config.trainer.groups_per_step)

            await poison(store, ["straw"])
            with pytest.raises(
                TrainingError,
                match=rf"{bound} tasks were set aside .* 'straw' with: CUDA .*store RUN retry",
            ):
                async with asyncio.timeout(300):
                    await stream.round(1, [Task(id="any")] * config.trainer.groups_per_step)

    asyncio.run(work())


def test_under_wait_a_step_goes_on_with_the_tasks_that_are_left_in_their_order_and_not_with_none(
    opened,
):
    async def work():
        async with opened("rollout.staleness=1", "rollout.policy=wait") as (
            config,
            store,
            _,
            notes,
            stream,
        ):
            names = [task.id for task in TaskSource(config, None).tasks_to_queue(1)]
            await poison(store, names[:1])
            for name in reversed(names[1:]):
                group = group_name(name, "train", 1)
                await store.write_trajectories(
                    [attempt(f"{group}#{i}", group) for i in range(2)], split="train", step=1
                )

            found = await stream.round(1, [])
            assert [trajectory.task_id for trajectory in found.trajectories] == [
                name for name in names[1:] for _ in range(2)
            ]
            assert len(notes) == 1 and names[0] in notes[0]

            await poison(store, [task.id for task in TaskSource(config, None).tasks_to_queue(2)])
            with pytest.raises(
                TrainingError,
                match=rf"step 2: all of its {len(names)} tasks were set aside, .* with: CUDA error",
            ):
                await stream.round(2, [])

    asyncio.run(work())


@pytest.mark.parametrize(("versions", "repeated"), [((0, 0), False), ((1, 2), True)])
def test_a_step_whose_weights_served_though_it_trained_on_nothing_is_repeated_so(
    versions, repeated, opened
):
    """Step 2 dropped all its groups, its weights served, and its trainer was killed before the
    commit."""

    async def work():
        async with opened("rollout.staleness=1", "rollout.policy=mask") as (
            config,
            store,
            _,
            _,
            stream,
        ):
            size = config.trainer.group_size
            groups = config.trainer.groups_per_step
            for k in range(groups):
                members = [
                    attempt(f"{k}#{i}", f"{k}/train@3", versions=versions) for i in range(size)
                ]
                await store.write_trajectories(members, split="train", step=3)

            found = await stream.round(2, [Task(id="any")] * groups)
            assert (
                found == RolloutRound([], last=True)
                if repeated
                else len(found.trajectories) == size * groups
            )

            again = await stream.round(3, [Task(id="any")] * groups)
            assert len(again.trajectories) == size * groups and not again.last

    asyncio.run(work())


def test_a_greedy_attempt_is_no_group_of_its_own(opened):
    """ReMax with one attempt a task: half of a step would be greedy attempts, which nothing trains
    on."""

    async def work():
        keys = (
            "rollout.staleness=1",
            "rollout.policy=mask",
            "algorithm.name=remax",
            "trainer.group_size=1",
        )
        async with opened(*keys) as (config, store, _, _, stream):
            for k in range(config.trainer.groups_per_step):
                both = [
                    attempt(f"{k}/train@1#0", f"{k}/train@1"),
                    attempt(f"{k}/baseline@1#0", f"{k}/baseline@1"),
                ]
                await store.write_trajectories(both, split="train", step=1)

            found = await stream.round(1, [Task(id="any")] * config.trainer.groups_per_step)
            names = [trajectory.id for trajectory in found.trajectories]
            assert len(names) == len(set(names)) == 2 * config.trainer.groups_per_step
            assert sum("/baseline@" in name for name in names) == config.trainer.groups_per_step

    asyncio.run(work())


def test_attempts_that_failed_in_an_earlier_life_do_not_end_this_one(opened):
    """What was broken may have been mended since."""

    async def work():
        async with opened() as (config, store, lost, _, _):
            limit = IN_VAIN_STEPS * config.trainer.groups_per_step * config.trainer.group_size

            async def fail(life):
                failed = [attempt(f"{life}{n}", f"{life}/train@1", "failed") for n in range(limit)]
                await store.write_trajectories(failed, split="train", step=1)

            await fail("old")
            await lost.check()
            await fail("new")

            with pytest.raises(TrainingError, match=r"have all failed, .* with --resume continues"):
                await lost.check()

    asyncio.run(work())
