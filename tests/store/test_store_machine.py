"""The ledger against a model of it in a few dictionaries: whatever is done in whatever order, both
say the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentevo.errors import StoreError
from agentevo.store import Lease, RetryPolicy, open_store
from agentevo.types import Task, Trajectory
from examples import examples

RETRIES = RetryPolicy(max_failures=2, max_expiries=3, first_delay_s=4.0, max_delay_s=6.0)
TASKS = [f"t{i}" for i in range(4)]
STEPS = st.integers(1, 3)
REFUSED = "refused"


class Ledger(RuleBasedStateMachine):
    """`model_*` is what must be so; a store that refuses must be refused by the model too."""

    def __init__(self, url: str, clock: Any) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = clock
        self.clock.steady = 1000.0
        self.store = self.loop.run_until_complete(open_store(url, clock=clock, retries=RETRIES))
        self.tasks: dict[str, dict[str, Any]] = {}
        self.order: list[str] = []
        self.trajectories: dict[str, dict[str, Any]] = {}
        self.steps: dict[int, int] = {}
        self.leases: list[Lease] = []
        self.written = 0

    def teardown(self) -> None:
        self.loop.run_until_complete(self.store.close())
        self.loop.close()

    def ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.loop.run_until_complete(call)
        except StoreError:
            return REFUSED

    def task(self, **changes: Any) -> dict[str, Any]:
        return {
            "state": "queued",
            "fence": 0,
            "failures": 0,
            "expiries": 0,
            "until": 0.0,
            "not_before": 0.0,
        } | changes

    @rule(name=st.sampled_from(TASKS), queue=st.sampled_from([True, True, False]))
    def add(self, name: str, queue: bool) -> None:
        assert self.ask(self.store.add_tasks([Task(id=name)], queue=queue)) == (
            name not in self.tasks
        )
        if name not in self.tasks:
            self.tasks[name] = self.task()
            self.order.append(name)

        if not queue and self.tasks[name]["state"] == "queued":
            self.tasks[name] |= {"state": "completed", "not_before": 0.0}

    @rule(seconds=st.sampled_from([1.0, 3.0, 7.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.steady += seconds
        self.clock.wall -= 1e6

    def next_task(self) -> str | None:
        now = self.clock.steady
        expired = sorted(
            (t["until"], name)
            for name, t in self.tasks.items()
            if t["state"] == "leased" and t["until"] < now
        )
        for _, name in expired:
            self.tasks[name]["expiries"] += 1
            if self.tasks[name]["expiries"] < RETRIES.max_expiries:
                return name
            self.tasks[name] |= {"state": "poison", "not_before": 0.0}

        queued = [name for name in self.order if self.tasks[name]["state"] == "queued"]
        due = sorted(
            (self.tasks[name]["not_before"], self.order.index(name), name)
            for name in queued
            if 0 < self.tasks[name]["not_before"] < now
        )
        if due:
            return due[0][2]

        return next((name for name in queued if self.tasks[name]["not_before"] == 0.0), None)

    @rule(lease_s=st.sampled_from([2.5, 8.5, 1000.5]))
    def lease(self, lease_s: float) -> None:
        self.clock.steady += 0.001  # no two leases run out together
        lease = self.ask(self.store.lease_task("w", lease_s=lease_s))
        name = self.next_task()
        assert (lease and lease.task.id) == name

        if name is not None:
            task = self.tasks[name]
            task |= {
                "state": "leased",
                "fence": task["fence"] + 1,
                "until": self.clock.steady + lease_s,
                "not_before": 0.0,
            }
            assert lease.fencing_id == task["fence"]
            self.leases.append(lease)

    def any_lease(self, data: st.DataObject) -> tuple[Lease, dict[str, Any], bool]:
        """A lease that was once given out, its task, and whether it still counts."""
        lease = data.draw(st.sampled_from(self.leases))
        task = self.tasks[lease.task.id]
        return lease, task, task["fence"] == lease.fencing_id

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease, task, holds = self.any_lease(data)
        self.clock.steady += 0.001
        got = self.ask(self.store.renew(lease))
        if holds and task["state"] == "leased":
            task["until"] = self.clock.steady + lease.lease_s
            assert got.expires_at == task["until"]
        else:
            assert got == REFUSED

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), end=st.sampled_from(["completed", "failed"]))
    def finish(self, data: st.DataObject, end: str) -> None:
        lease, task, holds = self.any_lease(data)
        got = self.ask(
            self.store.complete_task(lease)
            if end == "completed"
            else self.store.fail_task(lease, "e")
        )
        allowed = holds and task["state"] in ("leased", end)
        assert (got != REFUSED) == allowed

        if allowed:
            task["state"] = end

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease, task, holds = self.any_lease(data)
        got = self.ask(self.store.return_task(lease))
        allowed = holds and task["state"] in ("leased", "queued")
        assert (got != REFUSED) == allowed
        if allowed and task["state"] == "leased":
            task["state"] = "queued"

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        lease, task, holds = self.any_lease(data)
        got = self.ask(self.store.retry_task(lease, "e"))
        if not holds or task["state"] not in ("leased", "queued", "poison"):
            assert got == REFUSED
            return

        if task["state"] == "leased":
            task["failures"] += 1
            task["state"] = "poison" if task["failures"] >= RETRIES.max_failures else "queued"
            delay = min(4.0 * 2 ** (task["failures"] - 1), 6.0)
            task["not_before"] = self.clock.steady + delay if task["state"] == "queued" else 0.0

        assert got == task["state"]

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        step=STEPS,
        group=st.sampled_from("gh"),
        status=st.sampled_from(["completed", "failed", "cancelled"]),
    )
    def write(self, data: st.DataObject, step: int, group: str, status: Any) -> None:
        lease, task, holds = self.any_lease(data)
        name = f"x{self.written}"
        self.written += 1
        trajectory = Trajectory(id=name, task_id=lease.task.id, group_id=group, status=status)
        got = self.ask(
            self.store.write_trajectories([trajectory], split="train", step=step, lease=lease)
        )
        allowed = holds and task["state"] in ("leased", "completed")
        assert got == (1 if allowed else REFUSED)

        if allowed:
            task["state"] = "completed"
            state = "ready" if status == "completed" else "failed"
            self.trajectories[name] = {
                "state": state,
                "step": step,
                "trained": None,
                "task": lease.task.id,
                "group": group,
                "reason": None,
            }

    def some(self, data: st.DataObject) -> list[str]:
        return data.draw(
            st.lists(st.sampled_from(sorted(self.trajectories)), min_size=1, max_size=3)
        )

    @precondition(lambda self: self.trajectories)
    @rule(data=st.data(), step=STEPS)
    def reserve(self, data: st.DataObject, step: int) -> None:
        names = self.some(data)
        got = self.ask(self.store.reserve(names, step))
        rows = [self.trajectories[name] for name in names]
        if step in self.steps or any(
            row["state"] != "ready" and (row["state"], row["trained"]) != ("reserved", step)
            for row in rows
        ):
            assert got == REFUSED
            return

        assert got == len({name for name in names if self.trajectories[name]["state"] == "ready"})
        for row in rows:
            row |= {"state": "reserved", "trained": step}

    @rule(step=STEPS)
    def commit(self, step: int) -> None:
        got = self.ask(self.store.commit_step(step, {"n": step}))
        here = [row for row in self.trajectories.values() if row["trained"] == step]
        assert got == (0 if step in self.steps else len(here))
        if step not in self.steps:
            self.steps[step] = len(here)
            for row in here:
                row["state"] = "committed"

    @rule(step=st.none() | STEPS)
    def release(self, step: int | None) -> None:
        rows = [
            row
            for row in self.trajectories.values()
            if row["state"] == "reserved" and step in (None, row["trained"])
        ]
        assert self.ask(self.store.release(step)) == len(rows)
        for row in rows:
            row |= {"state": "ready", "trained": None}

    @precondition(lambda self: self.trajectories)
    @rule(data=st.data(), reason=st.sampled_from(["stale", "long"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        names = self.some(data)
        rows = [self.trajectories[name] for name in names]
        got = self.ask(self.store.drop(names, reason))
        if any(
            row["state"] == "committed" or (row["state"] == "dropped" and row["reason"] != reason)
            for row in rows
        ):
            assert got == REFUSED
            return

        moving = {
            name for name in names if self.trajectories[name]["state"] in ("ready", "reserved")
        }
        assert got == len(moving)
        for name in moving:
            self.trajectories[name] |= {"state": "dropped", "trained": None, "reason": reason}

    @rule(step=st.integers(0, 3))
    def rewind_keeping(self, step: int) -> None:
        got = self.ask(self.store.rewind(step, keep=True))
        if step and step not in self.steps:
            assert got == REFUSED
            return

        again = [
            row
            for row in self.trajectories.values()
            if (row["trained"] is not None and row["trained"] > step)
            or (row["state"] == "dropped" and row["step"] > step)
        ]
        assert got == len(again)
        for row in again:
            row |= {"state": "ready", "trained": None, "reason": None}

        self.steps = {number: count for number, count in self.steps.items() if number <= step}

    @rule(step=st.integers(0, 3))
    def rewind(self, step: int) -> None:
        got = self.ask(self.store.rewind(step))
        if step and step not in self.steps:
            assert got == REFUSED
            return

        gone = {name: row for name, row in self.trajectories.items() if row["step"] > step}
        assert got == len(gone)

        self.trajectories = {
            name: row for name, row in self.trajectories.items() if name not in gone
        }
        for row in self.trajectories.values():
            if row["trained"] is not None and row["trained"] > step:
                row |= {"state": "ready", "trained": None}

        self.steps = {number: count for number, count in self.steps.items() if number <= step}
        left = {row["task"] for row in self.trajectories.values()}
        lost = {row["task"] for row in gone.values()} - left
        for name, task in self.tasks.items():
            if task["state"] == "leased" or (
                task["state"] in ("completed", "failed") and name in lost
            ):
                task |= self.task(fence=task["fence"] + 1)

    @invariant()
    def agrees(self) -> None:
        async def read() -> Any:
            summaries = {s.id: s for s in await self.store.summaries()}
            stored = {s.task.id: s async for s in self.store.tasks()}
            groups = [await self.store.ready_groups("train", size=size, limit=9) for size in (1, 2)]
            return (
                summaries,
                stored,
                groups,
                await self.store.steps(),
                await self.store.counts(),
                await self.store.outstanding("train"),
            )

        summaries, stored, groups, steps, counts, outstanding = self.loop.run_until_complete(read())
        assert {
            name: (s.state, s.trained_step, s.drop_reason) for name, s in summaries.items()
        } == {
            name: (row["state"], row["trained"], row["reason"])
            for name, row in self.trajectories.items()
        }
        assert {
            name: (s.state, s.fencing_id, s.num_failures, s.num_expiries)
            for name, s in stored.items()
        } == {
            name: (task["state"], task["fence"], task["failures"], task["expiries"])
            for name, task in self.tasks.items()
        }
        assert {step.step: step.num_trajectories for step in steps} == self.steps
        assert counts["tasks/queued"] == sum(
            task["state"] == "queued" for task in self.tasks.values()
        )
        assert counts["trajectories/train/committed"] == sum(self.steps.values())

        waiting = sum(task["state"] in ("queued", "leased") for task in self.tasks.values())
        assert outstanding == waiting + len(
            {r["task"] for r in self.trajectories.values() if r["state"] in ("ready", "reserved")}
        )
        for size, group in zip((1, 2), groups, strict=True):
            whole = []
            for row in self.trajectories.values():
                states = [
                    trajectory["state"]
                    for trajectory in self.trajectories.values()
                    if trajectory["group"] == row["group"]
                ]
                if (
                    row["state"] == "ready"
                    and row["group"] not in whole
                    and len(states) >= size
                    and not {"reserved", "committed"} & set(states)
                ):
                    whole.append(row["group"])

            assert group == whole


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ledger_does_what_its_model_does(
    new_url: Callable[[], str], clock: Any, request: pytest.FixtureRequest
) -> None:
    fast = "sqlite" in request.node.name
    checks = settings(
        max_examples=examples(40 if fast else 15),
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Ledger(new_url(), clock), settings=checks)
