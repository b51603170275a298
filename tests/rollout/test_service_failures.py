"""The sampler's service: what becomes of everything that breaks: engines, agents, databases."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from services import counted, num_groups, num_poisoned, serving, tasks_of, until

from agentevo.agents import Outcome
from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    RequestTooLongError,
    StoreUnavailableError,
)
from agentevo.rollout import service as service_module
from agentevo.store.opening import open_store
from agentevo.store.records import RetryPolicy
from agentevo.types import Message

ASKED = [Message("user", "left")]


@pytest.mark.slow
def test_infrastructure_is_retried_and_set_aside_at_the_bound(url, make_service, moving_engine):
    async def scenario():
        retries = RetryPolicy(max_failures=3, first_delay_s=0.01)
        engine = moving_engine(fails=[DeadlineExceededError("late"), EngineError("a step failed")])
        async with await open_store(url, retries=retries) as store:
            service = make_service(engine, store, steps=1)
            async with serving(service):
                await until(num_groups(store, 2))

            assert service.stats()["sampler/tasks_retried"] in (1, 2), (
                "two failures, of one group or of two"
            )
            assert {s.status for s in await store.summaries()} == {"completed"}, (
                "an engine's failure is nobody's failed attempt"
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_task_whose_engine_always_fails_becomes_poison(
    url, make_service, moving_engine, two_turns
):
    async def scenario():
        async with await open_store(
            url, retries=RetryPolicy(max_failures=3, first_delay_s=0.01)
        ) as store:
            engine = moving_engine(fails=[EngineError("the engine's step failed: boom")] * 1000)
            service = make_service(engine, store, steps=1)
            async with serving(service):
                await until(num_poisoned(service, 2))

            assert await store.summaries() == []
            assert service.stats()["sampler/tasks_poisoned"] == 2

            stored = await tasks_of(store)
            assert all(
                "EngineError: the engine's step failed: boom" in str(one.error)
                and one.num_failures == 3
                for one in stored
            )

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_task_that_is_leased_again_before_its_last_attempt_is_over_is_played(
    url, make_service, moving_engine
):
    """Quick. The answer of the database to `retry_task` comes late, after the task is leased."""

    async def scenario():
        async with await open_store(
            url, retries=RetryPolicy(max_failures=2, first_delay_s=0.001)
        ) as store:
            retry_task = store.retry_task

            async def retry_late(lease, error):
                state = await retry_task(lease, error)
                while state == "queued" and (await store.counts())["tasks/queued"] > 0:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.1)
                return state

            store.retry_task = retry_late
            engine = moving_engine(fails=[EngineError("boom")] * 1000)
            service = make_service(engine, store, steps=1)
            async with serving(service):
                await until(counted(store, "tasks/poison", 2), within_s=60)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_task_that_becomes_poison_is_told_of_once(url, make_service, moving_engine):
    told: list[str] = []

    async def scenario():
        async with await open_store(
            url, retries=RetryPolicy(max_failures=2, first_delay_s=0.01)
        ) as store:
            engine = moving_engine(fails=[EngineError("the engine's step failed: boom")] * 1000)
            service = make_service(engine, store, steps=1, note=told.append)
            async with serving(service):
                await until(num_poisoned(service, 2))
            assert [one.partition(": ")[0] for one in told] == ["w"] * 2

            for task_id in ("t0", "t1", "t2", "t3", "t4", "t5"):
                assert sum(f"task {task_id} is set aside as poison" in one for one in told) <= 1
            assert all(
                re.search(r"t\d/train@1#\d: EngineError: the engine's step failed: boom$", one)
                for one in told
            )

            service._note_poison(told[0].split()[2], "again")
            assert len(told) == 2

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_an_agent_swallows_is_still_the_engines_failure(url, make_service, moving_engine):
    class Swallower:
        async def run(self, task, policy):
            try:
                await policy.generate(ASKED)
            except EngineError:
                return Outcome(reward=0.0, success=False)
            return Outcome(reward=1.0, success=True)

    async def scenario():
        async with await open_store(url, retries=RetryPolicy(first_delay_s=0.01)) as store:
            engine = moving_engine(fails=[EngineError("gone"), RequestTooLongError("too long")])
            async with serving(make_service(engine, store, steps=1, agent=Swallower())):
                await until(num_groups(store, 2))

            rewards = sorted(s.reward for s in await store.summaries())
            assert rewards in ([0.0, 1.0, 1.0, 1.0], [1.0] * 4), (
                "a request that is too long is the agent's own, and may be cut with its group"
            )
            assert {s.status for s in await store.summaries()} == {"completed"}
            assert sum(one.num_failures for one in await tasks_of(store)) == 1

    asyncio.run(scenario())


@pytest.mark.slow
def test_engines_that_are_away_cost_their_tasks_nothing(url, make_service, moving_engine):
    async def scenario():
        engine = moving_engine(fails=[EngineUnavailableError("none left")] * 3)
        async with await open_store(url) as store:
            service = make_service(engine, store, {"staleness": 1}, steps=2)
            engine.version = -1
            async with serving(service):
                await asyncio.sleep(0.1)
                assert engine.begun == [] and (await store.counts())["tasks/queued"] == 0, (
                    "nothing is known of the weights"
                )
                engine.version = 0
                await until(num_groups(store, 4))

            assert service.stats()["sampler/unreached"] >= 1
            assert [one.num_failures for one in await tasks_of(store)] == [0] * 4

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_task_that_makes_engines_unreachable_is_counted_in_the_end(
    url, make_service, moving_engine, monkeypatch
):
    monkeypatch.setattr(service_module, "MAX_UNREACHED_RETRIES", 2)

    async def scenario():
        async with await open_store(
            url, retries=RetryPolicy(max_failures=2, first_delay_s=0.01)
        ) as store:
            engine = moving_engine(fails=[EngineUnavailableError("none left")] * 1000)
            async with serving(make_service(engine, store, steps=1)):
                await until(counted(store, "tasks/poison", 2))

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_failing_agent_is_data(url, make_service, moving_engine, two_turns):
    def between(task, policy):
        if policy.name.endswith("#1"):
            raise ValueError("no such move")

    async def scenario():
        async with await open_store(url) as store:
            async with serving(
                make_service(moving_engine(), store, steps=1, agent=two_turns(between))
            ):
                await until(num_groups(store, 2))

            found = await store.summaries()
            assert sorted((s.attempt, s.status, s.state, s.error) for s in found) == [
                *[(0, "completed", "ready", None)] * 2,
                *[(1, "failed", "failed", "ValueError: no such move")] * 2,
            ]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_database_that_goes_away_is_waited_for(url, make_service, moving_engine):
    """Every other call of the store fails, before or after it has happened: all groups are written
    once."""

    async def scenario():
        rng = random.Random(3)
        async with await open_store(url) as store:

            def shaky(name):
                call = getattr(store, name)

                async def tried(*arguments, **more):
                    if rng.random() < 0.25:
                        raise StoreUnavailableError("connection refused")
                    done = await call(*arguments, **more)
                    if rng.random() < 0.25 and name != "lease_tasks":
                        raise DeadlineExceededError("the answer was lost")
                    return done

                setattr(store, name, tried)

            names = (
                "add_tasks",
                "outstanding",
                "lease_tasks",
                "renew",
                "write_trajectories",
                "summaries",
                "last_step",
            )
            for name in names:
                shaky(name)

            service = make_service(moving_engine(version=9), store, {"staleness": 1}, steps=6)
            async with serving(service), await open_store(url) as other:
                await until(num_groups(other, 12))

            async with await open_store(url) as other:
                assert (await other.counts())["trajectories/train/ready"] == 24
                assert (await other.counts())["tasks/completed"] == 12

            assert (
                service.stats()["sampler/groups_written"] == 12
                and service.stats()["sampler/leases_lost"] == 0
            )

    asyncio.run(scenario())


def test_a_database_that_stays_away_ends_the_service(url, make_service, moving_engine):
    async def scenario():
        async with await open_store(url) as store:
            service = make_service(moving_engine(), store, {"policy": "mask"}, retry_s=0.2)

            async def away(split):
                raise StoreUnavailableError("connection refused")

            store.outstanding = away
            with pytest.raises(
                StoreUnavailableError,
                match=r"outstanding: stopped trying after 0.2 s: connection refused",
            ):
                await service.run(lambda: False)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_greedy_attempt_beside_a_group_in_which_nothing_completed_is_put_aside(
    url, make_service, moving_engine, two_turns
):
    def between(task, policy):
        if "/train@" in policy.name and task.id in ("t0", "t1", "t2"):
            raise ValueError("no")

    async def scenario():
        tree = {"algorithm": {"name": "remax"}}
        async with await open_store(url) as store:
            async with serving(
                make_service(
                    moving_engine(version=2), store, steps=3, agent=two_turns(between), tree=tree
                )
            ):
                await until(num_groups(store, 12))

            beside = {s.task_id: s for s in await store.summaries() if "/baseline@" in s.group_id}
            for name, summary in beside.items():
                useless = name in ("t0", "t1", "t2")
                assert summary.state == ("failed" if useless else "ready")
                assert summary.error == (
                    "cut: no attempt of its group completed" if useless else None
                )

            assert await store.outstanding("train") == 3, "of the three whose attempts completed"

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_reward_that_is_no_number_fails_its_attempt(url, make_service, moving_engine):
    class NaN:
        async def run(self, task, policy):
            await policy.generate(ASKED)
            return Outcome(
                reward=float("nan") if policy.name.endswith("#0") else 1.0, success=False
            )

    async def scenario():
        async with await open_store(url) as store:
            async with serving(make_service(moving_engine(), store, steps=1, agent=NaN())):
                await until(num_groups(store, 2))
            assert {(s.attempt, s.status, s.error) for s in await store.summaries()} == {
                (0, "failed", "ValueError: the agent's reward is nan"),
                (1, "completed", None),
            }

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_the_store_refuses_fails_its_attempt_with_the_reason(
    url, make_service, moving_engine, monkeypatch
):
    class Partial:
        async def run(self, task, policy):
            await policy.generate(ASKED)
            metrics = {"reward_parts/odd": 1.0} if policy.name.endswith("#0") else {}
            return Outcome(reward=1.0, success=True, metrics=metrics)

    monkeypatch.setattr("agentevo.agents.agent.REWARD_PARTS", "no such prefix")
    monkeypatch.setattr("agentevo.rollout.group.outcome_of", lambda outcome, agents: outcome)

    async def scenario():
        async with await open_store(url) as store:
            service = make_service(moving_engine(), store, steps=1, agent=Partial())
            async with serving(service):
                await until(counted(store, "tasks/completed", 2))

            groups = {one.task.id: one for one in await tasks_of(store)}
            for name in groups:
                odd = (await store.trajectory(f"{name}/train@1#0")).status
                assert odd == "failed"
                assert (await store.trajectory(f"{name}/train@1#1")).status == "completed"

    asyncio.run(scenario())
