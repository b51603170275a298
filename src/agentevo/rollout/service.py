"""The sampler as a service. It queues the tasks of coming steps, leases them, attempts them, and
writes the groups. Any number of services may share a store, and each may end at any time.

Admission. A trainer at version s - 1 trains on a group that is sampled for step s. Under
`rollout.policy: wait` the group starts only while

    s <= engine.version + 1 + rollout.staleness

so none of its tokens is older than the bound. An engine in this process that can keep earlier
weights samples every token from version max(0, s - 1 - rollout.staleness), even if there are newer
versions. If an engine restarts with old weights, a group may have a token that is too old. Such a
group is not written, and its task is tried again. The other policies limit the number of
outstanding tasks (Store.outstanding) to those of staleness + 1 steps, and one step more for each
further round that dynamic sampling may take. `cancel` ends attempts that have become too old.

A group is written whole, in the transaction that completes its task, by the service with the newest
lease. A service that has lost its lease writes nothing. After a failure of the engine, the task is
tried again. While no engine can be reached, groups wait, and the waiting does not count as failures
of their tasks. While the database is unavailable, the service waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from agentevo.config import RunConfig
from agentevo.config.named_agents import by_rank, trained_agents, version_of
from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    StoreError,
    StoreUnavailableError,
)
from agentevo.inference.engine import Engine, VersionedEngine
from agentevo.rollout.attempt_images import put_images_of_tasks
from agentevo.rollout.group import InfrastructureFailure, RolloutGroup, write_group
from agentevo.rollout.sampler import Sampler, group_name
from agentevo.rollout.task_source import TaskSource
from agentevo.rollout.teachers import TeacherUnavailableError
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import Lease
from agentevo.store.store import Store
from agentevo.types import QUEUED_ATTEMPTS, QUEUED_FOR_STEP, Task, Trajectory, group_of_agent

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
"""The time for a clean stop, in seconds: complete groups are written, and other tasks are returned.
Tasks that take longer are queued again when their leases expire."""
MAX_UNREACHED_RETRIES = 20
"""How often a group may start again, without counting as a failure, because no engine could be
reached. Beyond that, the task itself may be the cause."""
COUNTERS = (
    "tasks_added",
    "tasks_retried",
    "tasks_poisoned",
    "tasks_returned",
    "tasks_failed",
    "leases_lost",
    "groups_written",
    "groups_known",
    "unreached",
    "attempts_completed",
    "attempts_failed",
    "attempts_cancelled",
    "cancelled_tokens",
)
"""The counters of `SamplerService.stats`. `unreached` counts groups that started again because no
engine could be reached."""
QUEUE_BATCH = 64
"""The number of tasks that are queued before the loop does its other work."""


@dataclass(eq=False)
class _SampledWork:
    """A leased task."""

    lease: Lease
    """The newest lease of the task."""
    step: int
    """The step that the group is sampled for."""
    running: asyncio.Task[None] | None = None
    group: RolloutGroup | None = None
    writing: bool = False
    is_lost: bool = False
    """Whether another service has the lease."""
    is_returning: bool = False
    """Whether the task goes back to the queue, so that a later lease of it is new work."""


class SamplerService:
    """Samples the groups of a run until it is stopped. `worker` is the name of the service in the
    store. Several services may have the same name. `note` is called once for each task that becomes
    poison, with its last error."""

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        engine: Engine,
        store: Store,
        tasks: TaskSource,
        *,
        worker: str,
        retry_s: float = STORE_RETRY_S,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._engine = engine
        self._store = store
        self._tasks = tasks
        self._worker = worker
        self._retry_s = retry_s
        self._note = note
        self._rollout = config.rollout
        self._waits = self._rollout.policy == "wait"
        self._agents = by_rank(config) or ("",)
        self._trained = trained_agents(config) or ("",)
        self._baseline = "baseline_rewards" in config.algorithm.needs
        attempts = config.trainer.group_size + self._rollout.extra_attempts + self._baseline
        self._groups_per_step = len(tasks.train(1))
        self._capacity = max(1, self._rollout.max_attempts // attempts)
        self._next_step = 0
        """The step whose tasks are queued next."""
        self._tasks_to_queue: deque[Task] = deque()
        self._works: set[_SampledWork] = set()
        self._failures: list[BaseException] = []
        self._group_ended = asyncio.Event()
        self._counts = Counter[str]()
        self._reported_poison = set[str]()
        """Poisoned tasks that were reported. A task that is queued again may become poison
        again."""
        self.stopping = False
        """Whether running groups are being cancelled or written."""

    def stats(self) -> dict[str, float]:
        """The groups and attempts that run, and counters since the start."""
        playing = [a for work in self._works if work.group is not None for a in work.group.attempts]
        running = {
            "sampler/groups_running": float(len(self._works)),
            "sampler/attempts_running": float(len(playing)),
        }
        return running | {f"sampler/{name}": float(self._counts[name]) for name in COUNTERS}

    async def run(self, stop: Callable[[], bool]) -> None:
        """Runs until `stop` is set, or until the first defect. Running groups are then cancelled,
        and their tasks are returned at once. The same happens if this call is cancelled. Raises
        StoreUnavailableError if the database stays unavailable."""
        last = await self._with_retries(self._store.last_step, "last_step")
        self._next_step = 1 + (last.step if last is not None else 0)
        try:
            while not stop():
                if self._failures:
                    raise self._failures[0]

                version = self._engine.version
                if version >= 0:
                    await self._queue_tasks(version)
                    await self._lease(version)
                    self._cancel_old(version)

                await self._pause()
        finally:
            await self._stop()

    async def _pause(self) -> None:
        """Waits until a group ends, at most `rollout.poll_s` seconds."""
        try:
            async with asyncio.timeout(self._rollout.poll_s):
                await self._group_ended.wait()
        except TimeoutError:
            pass
        self._group_ended.clear()

    async def _queue_tasks(self, version: int) -> None:
        """Queues the tasks that may be sampled now. A queued task's id identifies the task and the
        step, so several services don't queue the same task twice."""
        if self._waits:
            while self._next_step <= min(
                version + 1 + self._rollout.staleness, self._config.trainer.steps
            ):
                if not self._tasks.is_known(self._next_step):
                    await self._tasks.learn(self._store)
                    if not self._tasks.is_known(self._next_step):
                        return  # the weights are there before their step is committed
                await self._add(self._tasks.tasks_to_queue(self._next_step))
                self._next_step += 1

            return

        rounds = self._rollout.staleness + max(1, self._config.algorithm.dynamic_sampling)
        for _ in range(QUEUE_BATCH):
            if (
                await self._with_retries(lambda: self._store.outstanding("train"), "outstanding")
                >= rounds * self._groups_per_step
            ):
                return
            while not await self._add([self._next_task()]):
                continue

    def _next_task(self) -> Task:
        if not self._tasks_to_queue:
            self._tasks_to_queue.extend(self._tasks.tasks_to_queue(self._next_step))
            self._next_step += 1
        return self._tasks_to_queue.popleft()

    async def _add(self, tasks: list[Task]) -> int:
        images = self._tasks.images
        await put_images_of_tasks(self._store, tasks, images, within_s=self._retry_s)
        new = await self._with_retries(lambda: self._store.add_tasks(tasks), "add_tasks")
        self._counts["tasks_added"] += new
        return new

    async def _lease(self, version: int) -> None:
        """Leases as many tasks as the service can attempt now."""
        room = self._capacity - len(self._works)
        if room <= 0:
            return

        leases = await self._with_retries(
            lambda: self._store.lease_tasks(
                self._worker, lease_s=self._rollout.lease_s, limit=room
            ),
            "lease_tasks",
        )
        own_works = {
            work.lease.task.id: work
            for work in self._works
            if not work.is_lost and not work.is_returning
        }
        for lease in leases:
            # the lease expired while the database was away, and no other service has the task
            if lease.task.id in own_works:
                own_works[lease.task.id].lease = lease
                continue

            work = _SampledWork(lease, int(lease.task.metadata.get(QUEUED_FOR_STEP, version + 1)))
            self._works.add(work)
            work.running = asyncio.create_task(self._work(work))
            work.running.add_done_callback(partial(self._note_end, work))

    def _note_end(self, work: _SampledWork, task: asyncio.Task[None]) -> None:
        self._works.discard(work)
        self._group_ended.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    def _cancel_old(self, version: int) -> None:
        """`cancel`: ends the attempts that are too old for any trainer."""
        if self._rollout.policy != "cancel":
            return

        bound = self._rollout.staleness
        for attempt in (
            a for work in self._works if work.group is not None for a in work.group.members
        ):
            conversations = attempt.policy.conversations
            versions = [conversations[agent].oldest_version for agent in self._trained]
            oldest = min(
                (candidate for candidate in versions if candidate is not None), default=version
            )
            if oldest < version - bound:
                attempt.cut(
                    f"cancelled: token of version {oldest}, trainer at {version}, "
                    f"rollout.staleness={bound}"
                )

    async def _work(self, work: _SampledWork) -> None:
        """Handles the task from its lease to its end, in success or failure."""
        beats = asyncio.create_task(self._keep_lease(work))
        try:
            if await self._is_stored(work):
                await self._end_lease(
                    work, lambda: self._store.complete_task(work.lease), "groups_known"
                )
                return

            trajectories = await self._play(work)
            work.writing = True
            await self._write(work, trajectories)
        except (asyncio.CancelledError, TeacherUnavailableError):
            if not work.is_lost:
                await self._end_lease(
                    work,
                    lambda: self._store.return_task(work.lease),
                    "tasks_returned",
                    within_s=STOP_TIMEOUT_S / 2,
                )

            raise
        except (InfrastructureFailure, EngineError) as error:
            await self._retry(work, str(error))
        finally:
            work.group = None
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _keep_lease(self, work: _SampledWork) -> None:
        """Renews the lease. Cancels the work if the lease is lost. While the database is
        unavailable, no other service can get the task."""
        while not work.is_lost:
            await asyncio.sleep(self._rollout.lease_s / 3)
            lease = work.lease
            try:
                await self._store.renew(lease)
            except (StoreUnavailableError, DeadlineExceededError):
                continue
            except StoreError:
                if lease is not work.lease:
                    continue
                if not work.writing and work.running is not None:
                    work.is_lost = True
                    self._counts["leases_lost"] += 1
                    work.running.cancel()
                return

    async def _is_stored(self, work: _SampledWork) -> bool:
        """Whether the group is already in the store. Then an earlier service wrote it, and the task
        was queued again later."""
        name = self._group_names(work)[0]
        return bool(
            await self._with_retries(
                lambda: self._store.summaries(group_id=name, split="train", limit=1), "summaries"
            )
        )

    def _group_names(self, work: _SampledWork) -> list[str]:
        """The ids of the task's group for each agent."""
        name = group_name(work.lease.task.id, "train", work.step)
        return [group_of_agent(name, agent) for agent in self._agents]

    async def _play(self, work: _SampledWork) -> list[Trajectory]:
        """The trajectories of the group, if its weights are new enough. Raises
        InfrastructureFailure."""
        unreached = 0
        while True:
            await self._wait_until_admitted(work)
            work.group = self._sampler.group(
                work.lease.task,
                attempts=int(
                    work.lease.task.metadata.get(QUEUED_ATTEMPTS, self._config.trainer.group_size)
                ),
                extra=self._rollout.extra_attempts,
                temperature=self._config.sampling.temperature,
                step=work.step,
                label="train",
                baseline=self._baseline,
                shown=self._tasks.as_agent_task(work.lease.task),
                engines=self._engines_of(work.step),
            )
            try:
                trajectories = await work.group.run()
            except InfrastructureFailure as error:
                unreached += 1
                self._counts["unreached"] += isinstance(error.__cause__, EngineUnavailableError)
                if (
                    not isinstance(error.__cause__, EngineUnavailableError)
                    or unreached > MAX_UNREACHED_RETRIES
                ):
                    raise

                await asyncio.sleep(self._rollout.poll_s)
                continue

            if self._waits:
                self._check_age(work.step, trajectories)

            return trajectories

    def _engines_of(self, step: int) -> dict[str, Engine]:
        """The engines that sample a group for that step, if they are not the run's own engines.
        Under `wait` they all serve one version of the weights, so the tokens do not depend on when
        newer weights arrive."""
        if not self._waits:
            return {}

        version = max(0, step - 1 - self._rollout.staleness)
        return {
            agent: engine.serving(served_version)
            for agent, engine in self._sampler.engines.items()
            if isinstance(engine, VersionedEngine)
            and (served_version := version_of(self._config, agent, version)) is not None
        }

    async def _wait_until_admitted(self, work: _SampledWork) -> None:
        """Waits for an engine. Under `wait`, also waits for weights that the group may be sampled
        from."""
        while self._engine.version < 0 or (
            self._waits and work.step > self._engine.version + 1 + self._rollout.staleness
        ):
            await asyncio.sleep(self._rollout.poll_s)

    def _check_age(self, step: int, trajectories: list[Trajectory]) -> None:
        for trajectory in (
            candidate for candidate in trajectories if candidate.agent in self._trained
        ):
            oldest = min(
                (version for turn in trajectory.turns for version in turn.versions), default=step
            )
            if trajectory.status == "completed" and step - 1 - oldest > self._rollout.staleness:
                raise InfrastructureFailure(
                    f"{trajectory.id}: an engine drew a token under version {oldest}, too old "
                    f"for step {step} with "
                    f"rollout.staleness={self._rollout.staleness}: it restarted with old weights"
                )

    async def _write(self, work: _SampledWork, trajectories: list[Trajectory]) -> None:
        """Completes the task with its trajectories. If the store refuses the trajectories, the task
        fails with the reason. If the lease is lost, nothing is written."""
        if not any(
            trajectory.status == "completed"
            for trajectory in trajectories
            if trajectory.group_id in self._group_names(work)
        ):
            trajectories = [_cancel_baseline(trajectory) for trajectory in trajectories]

        lease = work.lease
        try:
            trajectories = await write_group(
                self._store,
                trajectories,
                split="train",
                step=work.step,
                lease=lease,
                within_s=self._retry_s,
            )
        except StoreUnavailableError:
            raise
        except StoreError as error:
            reason = str(error)
            if lease is work.lease:
                await self._end_lease(
                    work, lambda: self._store.fail_task(lease, reason), "tasks_failed"
                )
            else:
                await self._write(work, trajectories)

            return

        self._counts["groups_written"] += 1
        for trajectory in trajectories:
            self._counts[f"attempts_{trajectory.status}"] += 1
            self._counts["cancelled_tokens"] += (
                trajectory.num_completion_tokens() if trajectory.status == "cancelled" else 0
            )

    async def _retry(self, work: _SampledWork, error: str) -> None:
        async def retry() -> None:
            if await self._store.retry_task(work.lease, error) == "poison":
                self._counts["tasks_poisoned"] += 1
                self._note_poison(work.lease.task.id, error)

        work.is_returning = True
        await self._end_lease(work, retry, "tasks_retried")

    def _note_poison(self, task_id: str, error: str) -> None:
        if task_id not in self._reported_poison:
            self._reported_poison.add(task_id)
            self._note(
                f"{self._worker}: task {task_id} is set aside as poison, so no attempt at it is "
                f"trained on: {error}"
            )

    async def _end_lease(
        self,
        work: _SampledWork,
        call: Callable[[], Awaitable[None]],
        counter: str,
        *,
        within_s: float | None = None,
    ) -> None:
        """Ends the lease with `call`, unless the lease is already lost. If the database stays
        unavailable, the lease expires."""
        try:
            await with_retries(call, within_s=within_s or self._retry_s, what=counter)
        except StoreUnavailableError:
            if within_s is None:
                raise
        except StoreError:
            work.is_lost = True
            self._counts["leases_lost"] += 1
        else:
            self._counts[counter] += 1

    async def _stop(self) -> None:
        """Writes the complete groups, and returns all other tasks."""
        self.stopping = True
        running = [work.running for work in self._works if work.running is not None]
        for work in self._works:
            if not work.writing and work.running is not None:
                work.running.cancel()

        if running:
            _, late = await asyncio.wait(running, timeout=STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _with_retries(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        return await with_retries(call, within_s=self._retry_s, what=what)


def _cancel_baseline(trajectory: Trajectory) -> Trajectory:
    """A completed greedy attempt as a cancelled one, because no attempt of its group was completed
    and there is nothing to compare it with."""
    if trajectory.status != "completed":
        return trajectory
    return msgspec.structs.replace(
        trajectory, status="cancelled", error="cut: no attempt of its group completed"
    )
