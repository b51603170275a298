"""Serves the run's own tasks to outside agents. A client gets the next attempt of the group that is
being filled, or of the next task in the run's order.

The gateway leases a group's task as a sampler does, so no other process makes a group of that task
at the same time. If the gateway ends, the lease expires, and the task becomes available to the next
client. Only as many groups run as a trainer can use before they are too old. A client that asks for
more must try again later.
"""

from __future__ import annotations

import asyncio
import secrets

from agentevo.agents.gateway.refusals import Refusal
from agentevo.config import RunConfig
from agentevo.rollout.attempt_images import put_images_of_tasks
from agentevo.rollout.external_attempts import OutsideSession, OutsideSessions
from agentevo.rollout.task_source import TaskSource
from agentevo.runtime.retry import with_retries
from agentevo.store.records import Lease
from agentevo.store.store import Store
from agentevo.types import Task


class NextTasks:
    """The queue of the run's tasks for outside agents."""

    def __init__(
        self, config: RunConfig, tasks: TaskSource | None, sessions: OutsideSessions, store: Store
    ) -> None:
        """`tasks`: None if the recipe names none."""
        self._config = config
        self._tasks = tasks
        self._sessions = sessions
        self._store = store
        self._worker = f"next-{secrets.token_hex(4)}"
        self._lock = asyncio.Lock()
        self._task: Task | None = None
        self._group = ""
        """The group that is being filled."""
        self._num_unopened = 0
        """The number of the group's attempts that no client has opened."""
        self._upcoming_tasks: list[Task] = []
        self._step = 0

    async def open(self) -> OutsideSession:
        """Opens the next attempt. Raises Refusal if there is none now, or if the run has no
        tasks."""
        if self._tasks is None:
            raise Refusal(
                "this run has no tasks of its own to hand out: name files in its recipe (tasks), "
                "or send a task with the request",
                param="next",
            )

        async with self._lock:
            lease = None
            if not self._num_unopened or not self._sessions.is_under_way(self._group):
                lease = await self._lease(self._tasks)
                self._task = lease.task
                self._num_unopened = self._config.trainer.group_size
                self._group = f"next-{secrets.token_hex(4)}"

            assert self._task is not None
            shown = self._tasks.as_agent_task(self._task)
            try:
                session = await self._sessions.open(
                    self._task, self._group, None, shown, lease=lease
                )
            except BaseException:
                self._num_unopened = 0
                if lease is not None and not self._sessions.is_under_way(self._group):
                    await self._store.return_task(lease)
                raise

            self._num_unopened -= 1
            return session

    async def _lease(self, tasks: TaskSource) -> Lease:
        """Leases a task of the run. A task of a gateway or sampler that is gone comes first, then
        the next task in order."""
        while True:
            lease = await with_retries(
                lambda: self._store.lease_task(self._worker, lease_s=self._config.rollout.lease_s),
                what="lease_task",
            )
            if lease is not None:
                return lease

            await self._check_room()
            task = await self._next(tasks)
            await put_images_of_tasks(self._store, [task], tasks.images)
            await with_retries(
                lambda: self._store.add_tasks([task]),  # noqa: B023 (awaited before the next)
                what="add_tasks",
            )

    async def _check_room(self) -> None:
        """Raises Refusal while no further group may start."""
        config = self._config
        store = self._store
        last = await with_retries(store.last_step, what="last_step")
        done = 0 if last is None else last.step
        if done >= config.trainer.steps:
            raise Refusal("the run has made its last step: no task is left", status=404)

        self._step = max(self._step, done)
        max_groups = (config.rollout.staleness + 1) * config.trainer.groups_per_step
        waiting = await with_retries(lambda: store.outstanding("train"), what="outstanding")
        if waiting + self._sessions.num_named >= max_groups:
            raise Refusal(
                f"{max_groups} groups are under way or wait for the trainer, which is as many as "
                "rollout.staleness allows: end sessions, or ask again",
                status=503,
                kind="server_error",
            )

    async def _next(self, tasks: TaskSource) -> Task:
        """The next task in the run's order. Raises Refusal while that task is not known."""
        if not self._upcoming_tasks:
            await tasks.learn(self._store)
            if not tasks.is_known(self._step + 1):
                raise Refusal(
                    f"which tasks step {self._step + 1} has depends on steps that are not "
                    f"trained yet: ask again",
                    status=503,
                    kind="server_error",
                )

            self._step += 1
            self._upcoming_tasks = tasks.tasks_to_queue(self._step)

        return self._upcoming_tasks.pop(0)
