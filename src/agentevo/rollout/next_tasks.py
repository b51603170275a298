"""The run's own tasks for agents outside: whoever asks gets the next attempt, of the group that is
being filled, or of the next task in the run's order.

A task that the store knows is somebody's already and is passed over, so gateways that are started
again, and samplers beside them, make no group of it a second time. No more groups are under way
than a trainer may use before they are too old: who asks for more is told to ask again.
"""

from __future__ import annotations

import asyncio
import secrets

from agentevo.config import RunConfig
from agentevo.errors import StoreError, StoreUnavailableError
from agentevo.gateway.refusals import Refusal
from agentevo.retry import STORE_RETRY_S, with_retries
from agentevo.rollout.outside import OutsideSession, OutsideSessions
from agentevo.rollout.task_source import TaskSource
from agentevo.store.store import Store
from agentevo.types import Task


class NextTasks:
    """See the module."""

    def __init__(
        self, config: RunConfig, tasks: TaskSource | None, sessions: OutsideSessions, store: Store
    ) -> None:
        """`tasks`: None where the recipe names none."""
        self._config = config
        self._tasks = tasks
        self._sessions = sessions
        self._store = store
        self._lock = asyncio.Lock()
        self._task: Task | None = None
        self._group = ""
        """The group that is being filled."""
        self._left = 0
        """How many of its attempts are free."""
        self._ahead: list[Task] = []
        self._step = 0

    async def open(self) -> OutsideSession:
        """The next attempt. Raises Refusal where there is none now, or none at all."""
        if self._tasks is None:
            raise Refusal(
                "this run has no tasks of its own to hand out: name files in its recipe (tasks), "
                "or bring the task along",
                param="next",
            )

        async with self._lock:
            if not self._left or not self._sessions.is_under_way(self._group):
                await self._begin(self._tasks)
            assert self._task is not None
            shown = self._tasks.as_given(self._task)
            session = await self._sessions.open(self._task, self._group, None, shown)
            self._left -= 1
            return session

    async def _begin(self, tasks: TaskSource) -> None:
        """Begins the group of the next task that nobody has."""
        config = self._config
        store = self._store
        last = await with_retries(store.last_step, within_s=STORE_RETRY_S, what="last_step")
        done = 0 if last is None else last.step
        if done >= config.trainer.steps:
            raise Refusal("the run has made its last step: no task is left", status=404)

        wanted = (config.rollout.staleness + 1) * config.trainer.groups_per_step
        waiting = await with_retries(
            lambda: store.outstanding("train"), within_s=STORE_RETRY_S, what="outstanding"
        )
        if waiting + self._sessions.num_groups >= wanted:
            raise Refusal(
                f"{wanted} groups are under way or wait for the trainer, which is as many as "
                "rollout.staleness allows: end sessions, or ask again",
                status=503,
                kind="server_error",
            )

        self._step = max(self._step, done)
        while True:
            if not self._ahead:
                await tasks.learn(self._store)
                if not tasks.is_known(self._step + 1):
                    raise Refusal(
                        f"which tasks step {self._step + 1} has follows from steps that are not "
                        "trained yet: ask again",
                        status=503,
                        kind="server_error",
                    )

                self._step += 1
                self._ahead = tasks.queued(self._step)

            task = self._ahead.pop(0)
            if not await self._is_known(task):
                break

        self._task = task
        self._left = config.trainer.group_size
        self._group = f"next-{secrets.token_hex(4)}"

    async def _is_known(self, task: Task) -> bool:
        try:
            await with_retries(
                lambda: self._store.stored_task(task.id), within_s=STORE_RETRY_S, what="task"
            )
        except StoreUnavailableError:
            raise
        except StoreError:
            return False

        return True
