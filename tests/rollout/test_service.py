"""The sampler's service: what is admitted when, whose group is written, and how it ends."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from services import counted, num_begun, num_groups, num_running, serving, tasks_of, until

from agentevo.errors import (
    StoreUnavailableError,
)
from agentevo.runs.processes import sample as sample_module
from agentevo.store import RetryPolicy, open_store
from agentevo.types import QUEUED_FOR_STEP, Task, Trajectory


def oldest(trajectory: Trajectory) -> int:
    return min(version for turn in trajectory.turns for version in turn.versions)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_waiting_never_admits_a_token_beyond_the_bound(seed, url, make_service, moving_engine):
    """Two services whose engines learn of new weights at different times, a trainer that takes its
    time: at every step every token is within the bound, every step gets the groups of its own
    tasks, each once, and some are sampled ahead."""
    rng = random.Random(seed)
    eta = rng.choice([0, 1, 2, 4])
    steps = 5
    ages: list[int] = []

    async def follow(engine, versions, stop):
        while not stop:
            await asyncio.sleep(rng.random() * 0.03)
            engine.version = versions[-1]

    async def scenario():
        engines = [moving_engine(seed=seed + i, pause_s=0.01) for i in range(2)]
        async with await open_store(url) as store, await open_store(url) as other:
            services = [
                make_service(engine, one, {"staleness": eta}, steps=steps, worker=f"w{i}")
                for i, (engine, one) in enumerate(zip(engines, (store, other), strict=True))
            ]
            versions = [0]
            over = []
            following = [asyncio.create_task(follow(engine, versions, over)) for engine in engines]

            async with serving(*services):
                for step in range(1, steps + 1):

                    async def whole(step=step):
                        return len(await store.summaries(step=step, split="train")) == 4

                    await until(whole)
                    await asyncio.sleep(rng.random() * 0.05)
                    trained = [
                        trajectory.trajectory
                        async for trajectory in store.trajectories(step=step, state="ready")
                    ]
                    assert len(trained) == 4

                    ages.extend(step - 1 - oldest(one) for one in trained)
                    await store.reserve([one.id for one in trained], step)
                    await store.commit_step(step, {})
                    versions.append(step)

            over.append(True)
            await asyncio.gather(*following)
            for engine in engines:
                for session, version in engine.begun:
                    step = int(session.rpartition("@")[2].partition("#")[0])
                    assert step <= min(version + 1 + eta, steps), "started too early"

            counts = await store.counts()
            assert (
                counts["tasks/completed"]
                == 2 * steps
                == sum(n for key, n in counts.items() if key.startswith("tasks/"))
            )
            assert (
                counts["trajectories/train/committed"]
                == 4 * steps
                == sum(n for key, n in counts.items() if "train/" in key)
            )

            sampled = Counter(session for engine in engines for session, _ in engine.begun)
            assert set(sampled.values()) == {2}, "each attempt was made once, in two turns"
            assert [
                task.task.metadata[QUEUED_FOR_STEP] for task in await tasks_of(store)
            ] == sorted(list(range(1, steps + 1)) * 2)

    asyncio.run(scenario())
    assert max(ages) <= eta and min(ages) >= 0
    assert eta == 0 or max(ages) > 0, "nothing was sampled ahead"


@pytest.mark.slow
def test_weights_that_are_too_old_after_all_are_not_written(url, make_service, moving_engine):
    """An engine that says 3 and draws under 0, as one that comes back may."""

    class Liar(moving_engine):
        async def generate(self, *arguments, **more):
            completion = await super().generate(*arguments, **more)
            if len(self.begun) <= 8:
                completion.versions[:] = [0] * 3
            return completion

    async def scenario():
        engine = Liar(version=3)
        async with await open_store(url, retries=RetryPolicy(first_delay_s=0.02)) as store:
            for step in (1, 2, 3):
                await store.commit_step(step, {})

            async with serving(make_service(engine, store, {"staleness": 1}, steps=4)):
                await until(num_groups(store, 2))
            assert {oldest(trajectory.trajectory) async for trajectory in store.trajectories()} == {
                3
            }

            stored = await tasks_of(store)
            assert {one.task.metadata[QUEUED_FOR_STEP] for one in stored} == {4}

            errors = [
                event.error for one in stored for event in one.history if event.kind == "retried"
            ]  # a lease may have run out besides
            assert errors and all(
                "drew a token under version 0, too old for step 4 with rollout.staleness=1" in e
                for e in errors
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_others_keep_so_many_tasks_on_their_way(url, make_service, moving_engine):
    """Of two services that look at the same time both may add one: 4, or 5."""

    async def scenario():
        async with await open_store(url) as store:
            rollout = {"staleness": 1, "policy": "mask"}
            async with serving(
                *(
                    make_service(moving_engine(seed=i), store, rollout, worker=str(i))
                    for i in range(2)
                )
            ):

                async def resolved():
                    async def there():
                        return (await store.counts())["trajectories/train/ready"] in (8, 10)

                    await until(there)
                    await asyncio.sleep(0.1)
                    assert await there() and await store.outstanding("train") in (4, 5)

                await resolved()
                for step in range(1, 5):
                    groups = await store.ready_groups("train", size=2, limit=2)
                    ids = [
                        trajectory.trajectory.id
                        for name in groups
                        async for trajectory in store.trajectories(group_id=name)
                    ]
                    await store.reserve(ids, step)
                    await asyncio.sleep(0.05)
                    assert await store.outstanding("train") in (4, 5), (
                        "reserved is not yet trained on"
                    )

                    await store.commit_step(step, {})
                    await resolved()

            names = [task.task.id async for task in store.tasks()]
            assert len(names) == len(set(names)) and len(names) in (12, 13)
            assert sum("~1" in name for name in names) == 6, "the second round of the six tasks"

    asyncio.run(scenario())


@pytest.mark.slow
def test_room_for_dynamic_sampling(url, make_service, moving_engine):
    """Three rounds may take three steps' worth of groups before any is let go of."""

    async def scenario():
        tree = {"algorithm": {"name": "dapo", "dynamic_sampling": 3}}
        async with (
            await open_store(url) as store,
            serving(make_service(moving_engine(), store, {"policy": "mask"}, tree=tree)),
        ):
            await until(num_groups(store, 6))
            await asyncio.sleep(0.1)
            assert await store.outstanding("train") == 6

    asyncio.run(scenario())


@pytest.mark.slow
def test_no_more_attempts_than_there_is_room_for(url, make_service, moving_engine):
    async def scenario():
        together = asyncio.Barrier(4)

        class Full(moving_engine):
            """The first four requests begin together."""

            async def generate(self, *arguments, **more):
                if not self.begun:
                    await together.wait()
                return await super().generate(*arguments, **more)

        engine = Full(pause_s=0.01)
        rollout = {"staleness": 4, "max_attempts": 5, "extra_attempts": 0}
        async with await open_store(url) as store:
            service = make_service(engine, store, rollout)
            async with serving(service):
                await until(num_groups(store, 10))
            assert engine.most_running == 4, "two groups of two fit into five"
            assert service.stats()["sampler/groups_written"] == 10

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_agent_sees_the_task_as_it_was_given(url, make_service, moving_engine, two_turns):
    async def scenario():
        agent = two_turns()
        async with await open_store(url) as store:
            async with serving(
                make_service(moving_engine(version=9), store, {"staleness": 1}, agent=agent)
            ):
                await until(num_groups(store, 12))
            assert {task.id for task in agent.seen} == {f"t{i}" for i in range(6)}
            assert all(task == Task(id=task.id, query=f"q{task.id[1:]}") for task in agent.seen)
            assert {s.task_id.partition("~")[2] for s in await store.summaries()} == {"", "1"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_lost_lease_ends_the_work_and_the_late_writer_writes_nothing(
    url, make_service, moving_engine, two_turns
):
    """The first service hangs in its tool and its heartbeats don't come through; another takes over
    and writes; then the first wakes up."""

    async def scenario():
        hold = asyncio.Event()
        slow = moving_engine()
        async with await open_store(url) as store, await open_store(url) as other:
            lates = two_turns(lambda task, policy: hold.wait())
            first = make_service(
                slow, store, {"lease_s": 0.15}, agent=lates, steps=1, worker="first"
            )
            renew = store.renew
            lease_tasks = store.lease_tasks

            async def away(*arguments, **more):
                raise StoreUnavailableError("the network is gone")

            async def once(*arguments, **more):
                store.lease_tasks = away
                return await lease_tasks(*arguments, **more)

            store.renew = away
            store.lease_tasks = once
            second = make_service(
                moving_engine(), other, {"lease_s": 600}, steps=1, worker="second"
            )
            async with serving(first):
                await until(num_begun(slow, 4))
                async with serving(second):
                    await until(num_groups(other, 2))

                written = [trajectory async for trajectory in other.trajectories()]
                hold.set()
                await until(num_running(first, 0))
                store.renew = renew
                store.lease_tasks = lease_tasks

            assert (
                first.stats()["sampler/leases_lost"] == 2
                and first.stats()["sampler/groups_written"] == 0
            )
            assert [trajectory async for trajectory in other.trajectories()] == written and len(
                written
            ) == 4
            assert {one.fencing_id for one in await tasks_of(other)} == {2}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_lease_that_ran_out_and_that_nobody_took_goes_on(
    url, make_service, moving_engine, two_turns
):
    """The database is away for longer than the leases; then the service itself is the one that
    takes them over."""

    async def scenario():
        hold = asyncio.Event()
        engine = moving_engine()
        async with await open_store(url, retries=RetryPolicy(max_expiries=10**6)) as store:
            service = make_service(
                engine, store, {"lease_s": 0.15}, agent=two_turns(lambda *_: hold.wait()), steps=1
            )

            async def away(lease):
                raise StoreUnavailableError("the network is gone")

            store.renew = away
            async with serving(service):

                async def leased_again():
                    leases = [one.fencing_id for one in await tasks_of(store)]
                    return len(leases) == 2 and min(leases) >= 3

                await until(leased_again)
                hold.set()
                await until(num_groups(store, 2))

            assert len(engine.begun) == 8, "nothing was begun again"
            assert (
                service.stats()["sampler/leases_lost"] == 0
                and service.stats()["sampler/groups_written"] == 2
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_heartbeats_keep_a_slow_group_and_end_one_whose_lease_is_lost(
    url, make_service, moving_engine, two_turns
):
    async def scenario():
        hold = asyncio.Event()
        async with await open_store(url) as store:
            agent = two_turns(lambda task, policy: hold.wait())
            service = make_service(moving_engine(), store, {"lease_s": 3.0}, agent=agent, steps=1)
            async with serving(service):
                await asyncio.sleep(4.0)
                assert await store.lease_task("thief", lease_s=60) is None, (
                    "renewed every third of its length"
                )
                async with await open_store(url) as other:
                    clock = type("Ahead", (), {"now": lambda self: _later(other_now())})()
                    other_now = other._local_clock.now
                    other._local_clock = clock
                    stolen = await other.lease_tasks("thief", lease_s=60, limit=1)

                assert len(stolen) == 1

                await until(num_running(service, 1))
                assert service.stats()["sampler/leases_lost"] == 1

                hold.set()
                await until(num_groups(store, 1))

            assert {s.task_id for s in await store.summaries()}.isdisjoint({stolen[0].task.id})

    asyncio.run(scenario())


def _later(now):
    return now._replace(steady=now.steady + 3600)


@pytest.mark.slow
def test_cancelled_by_age_and_recorded(url, make_service, moving_engine, two_turns):
    """Attempt 0 hangs after its first turn, at version 0; the trainer goes on to version 2, with a
    bound of 1."""

    async def scenario():
        hold = asyncio.Event()
        engine = moving_engine()
        agent = two_turns(
            lambda task, policy: (
                hold.wait() if policy.name.endswith("#0") and "@1" in policy.name else None
            )
        )
        async with await open_store(url) as store:
            service = make_service(engine, store, {"policy": "cancel", "staleness": 1}, agent=agent)
            async with serving(service):
                await until(num_groups(store, 2))
                engine.version = 1
                await asyncio.sleep(0.1)
                assert await store.summaries(status="cancelled") == [], (
                    "one version behind is within the bound"
                )
                engine.version = 2
                await until(num_groups(store, 4))

            broken = [trajectory async for trajectory in store.trajectories(status="cancelled")]
            assert {one.trajectory.attempt for one in broken} == {0} and len(broken) == 2
            for one in broken:
                assert (
                    one.trajectory.error
                    == "cancelled: token of version 0, trainer at 2, rollout.staleness=1"
                )
                assert (one.state, len(one.trajectory.turns), one.trajectory.reward) == (
                    "failed",
                    1,
                    0.0,
                )

            assert service.stats()["sampler/attempts_cancelled"] == 2
            assert service.stats()["sampler/cancelled_tokens"] == 6
            assert len(await store.ready_groups("train", size=2, limit=9)) == 4, (
                "what they began with is whole all the same"
            )

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "mask", "correct"])
def test_only_cancel_cancels_by_age(policy, url, make_service, moving_engine, two_turns):
    async def scenario():
        hold = asyncio.Event()
        engine = moving_engine()
        tree = (
            {"algorithm": {"importance": "token_tis", "old_logprobs": "recomputed"}}
            if policy == "correct"
            else {}
        )
        async with await open_store(url) as store:
            rollout = {"policy": policy, "staleness": 1}
            async with serving(
                make_service(
                    engine,
                    store,
                    rollout,
                    agent=two_turns(lambda *_: hold.wait()),
                    steps=2,
                    tree=tree,
                )
            ):
                await until(num_begun(engine, 8))
                await asyncio.sleep(0.05)
                engine.version = 9
                await asyncio.sleep(0.1)
                hold.set()
                await until(num_groups(store, 4))

            assert {s.status for s in await store.summaries()} == {"completed"}

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stop_gives_the_tasks_back_at_once(url, make_service, moving_engine, two_turns):
    async def scenario():
        hold = asyncio.Event()
        engine = moving_engine()
        async with await open_store(url) as store:
            service = make_service(engine, store, agent=two_turns(lambda *_: hold.wait()), steps=1)
            async with serving(service):
                await until(num_begun(engine, 4))

            stored = await tasks_of(store)
            assert [
                (one.state, one.num_failures, one.num_expiries, one.history) for one in stored
            ] == [("queued", 0, 0, [])] * 2
            assert (
                service.stats()["sampler/tasks_returned"] == 2
                and service.stats()["sampler/groups_running"] == 0
            )
            assert await store.summaries() == []

            async with serving(make_service(moving_engine(), store, steps=1)):
                await until(num_groups(store, 2))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_stop_waits_for_what_is_being_written(url, make_service, moving_engine, monkeypatch):
    """Longer than it waits for a service that does not stop, as `agentevo sample` does it."""
    monkeypatch.setattr(sample_module, "GRACE_S", 0.5)

    class Found(moving_engine):
        async def refresh(self):
            return

    async def scenario():
        writing = asyncio.Event()
        async with await open_store(url) as store:
            write = store.write_trajectories

            async def slow(*arguments, **more):
                writing.set()
                await asyncio.sleep(1.5)
                return await write(*arguments, **more)

            store.write_trajectories = slow
            engine = Found()
            service = make_service(engine, store, steps=1)
            await asyncio.wait_for(
                sample_module._serve(
                    service, engine, store, 1, writing.is_set, ends_with_run=False
                ),
                300,
            )

            written = service.stats()["sampler/groups_written"]
            counts = await store.counts()
            assert written >= 1 and (counts["tasks/completed"], counts["tasks/leased"]) == (
                written,
                0,
            )
            assert len(await store.summaries()) == 2 * written

    asyncio.run(scenario())


def test_a_service_that_is_cancelled_stops_as_cleanly(url, make_service, moving_engine, two_turns):
    async def scenario():
        hold = asyncio.Event()
        engine = moving_engine()
        async with await open_store(url) as store:
            service = make_service(engine, store, agent=two_turns(lambda *_: hold.wait()), steps=1)
            running = asyncio.create_task(service.run(lambda: False))
            await until(num_begun(engine, 4))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await store.counts())["tasks/queued"] == 2

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_group_that_is_in_the_store_is_not_sampled_again(url, make_service, moving_engine):
    async def scenario():
        async with await open_store(url) as store:
            async with serving(make_service(moving_engine(), store, steps=1)):
                await until(num_groups(store, 2))
            again = [
                Task(id=f"{one.task.id}", metadata=one.task.metadata, query=one.task.query)
                for one in await tasks_of(store)
            ]
            written = [trajectory async for trajectory in store.trajectories()]

        second = url.replace("store.sqlite", "second.sqlite")
        async with await open_store(second) as store:
            await store.add_tasks(again)
            await store.write_trajectories(
                [one.trajectory for one in written], split="train", step=1
            )
            engine = moving_engine()
            service = make_service(engine, store, steps=1)
            async with serving(service):
                await until(counted(store, "tasks/completed", 2))

            assert engine.begun == [] and service.stats()["sampler/groups_known"] == 2

    asyncio.run(scenario())
