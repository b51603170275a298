"""The sources of a trainer's attempts and the destinations of its weights. The loop
(run.py) is the same for all sources:

    SynchronousRollouts    staleness 0 in one process: sample, train, publish, one after the other
    SelfPlayRollouts       the same, of tasks that the run generates
    ColocatedRollouts      a SamplerService on the same event loop. With `sharing: turns` there is
                           one set of weights, and the engine sleeps while the trainer computes in
                           a thread; with `overlap` the engine has a copy of the weights and
                           continues
    DisaggregatedRollouts  engines and samplers are other processes: groups come through the store,
                           weights go through the run's folder

Under `rollout.policy: wait` a step trains on the groups of its own tasks, else on the first groups
that are ready.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar, Unpack

from agentevo.config import RunConfig
from agentevo.config.named_agents import by_rank, version_of
from agentevo.data.question_overlap import question_key
from agentevo.errors import AgentEvoError, ConfigError, EngineError
from agentevo.inference.engine import SleepingEngine, VersionedEngine
from agentevo.inference.weights.transports import remote_sender
from agentevo.models.compute.thread_settings import own_torch_state
from agentevo.rollout.sampler import BASELINE, group_name, group_of_all
from agentevo.rollout.self_play import read_proposals, reward_proposals
from agentevo.rollout.service import SamplerService
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.lost_attempts import LostAttempts, in_vain
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.progress import bar
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import StoredTask, StoredTrajectory, TrajectoryFilter
from agentevo.types import Task, Trajectory, group_of_agent

T = TypeVar("T")

POLL_INTERVAL_S = 5.0
"""How often a waiting trainer looks for the outcome of attempts."""
ALONE_S = 60.0
"""After this time without first attempts the trainer reports that perhaps no process makes any."""


class StopAskedError(AgentEvoError):
    """The user asked the run to stop while it waited for attempts, evaluated, or read its data."""


class RolloutRound(NamedTuple):
    """The result of a round of collecting."""

    trajectories: list[Trajectory]
    """Whole groups, with their greedy baselines where the recipe has any."""
    last: bool = False
    """The step gets no further round: these are the attempts on which it was trained when its
    trainer was killed."""
    dropped: Mapping[str, str] = MappingProxyType({})
    """Trajectory id -> why it is not trained on, if the source has a reason."""
    metrics: Mapping[str, float] = MappingProxyType({})


class RolloutSource(ABC):
    """The source of the loop's attempts and the destination of its weights, by default those of
    this process's own engine."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    async def begin(self, step: int) -> None:
        """The model's weights as they are now, loaded or taught before the first step, are version
        `step`."""
        await self._parts.weights.begin(step)

    def running(self) -> AbstractAsyncContextManager[object]:
        """A context around all steps, in which everything runs that samples at the same time."""
        return nullcontext()

    @abstractmethod
    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        """The attempts of as many groups as there are tasks."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """A context around what the trainer computes and `swap`."""
        return nullcontext()

    async def compute(self, work: Callable[[], T]) -> T:
        """Runs what the trainer computes."""
        return await in_thread(_compute, work)

    async def swap(self, step: int) -> None:
        """The weights of version `step` now serve on this process's engine. Called within
        `training`."""
        await self._parts.weights.publish(step)

    async def announce(self, step: int) -> None:
        """Version `step` is committed, so other processes may have it."""
        return

    def stats(self) -> dict[str, float]:
        """The sampler's counters, for the step's metrics."""
        return {}


class SynchronousRollouts(RolloutSource):
    """See the module."""

    def __init__(self, parts: Components) -> None:
        super().__init__(parts)
        self._baseline = "baseline_rewards" in parts.config.algorithm.needs

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        config = self._parts.config
        # A previous evaluation must not change which tokens are computed together.
        for engine in self._parts.engines:
            await engine.forget_cache()

        trajectories = await self._parts.sampler.sample(
            tasks,
            attempts=config.trainer.group_size,
            attempts_by_task=self._parts.tasks.attempts_of_step(step),
            temperature=config.sampling.temperature,
            split="train",
            step=step,
            label="train",
            baseline=self._baseline,
        )
        return RolloutRound(trajectories)

    async def compute(self, work: Callable[[], T]) -> T:
        return _compute(work)  # on this thread, which a profiler observes


class SelfPlayRollouts(SynchronousRollouts):
    """A step of self-play: the proposer asks, the solver answers, the proposer is rewarded.

        prompts ──► proposals ──► questions ──► the solver's groups, written
                        └────────────── rewards ◄──┘ then the proposals' groups, written

    A proposal is written with its reward, and therefore after the solver's attempts. After a kill
    in between, the resumed step proposes again from the same seeds. It does not sample again the
    groups that it finds in the store, and a proposal that is rewarded twice gets the same reward.
    """

    def __init__(self, parts: Components) -> None:
        super().__init__(parts)
        section = parts.config.tasks.self_play
        proposals = parts.tasks.proposals
        assert section is not None and proposals is not None

        self._section = section
        self._group_size = proposals.group_size
        keys = (question_key(task.query or "") for task in parts.tasks.never_trained())
        self._held_out = {key for key in keys if key is not None}

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        """The solver's groups, then the proposer's. `tasks`: the step's prompts."""
        sampler = self._parts.sampler
        config = self._parts.config
        for engine in self._parts.engines:
            await engine.forget_cache()

        sample = partial(
            sampler.sample,
            temperature=config.sampling.temperature,
            split="train",
            step=step,
            label="train",
        )
        proposer_attempts = await sample(tasks, attempts=self._group_size, write=False)
        proposals = read_proposals(proposer_attempts, step, self._held_out)
        attempts = await sample(proposals.tasks, attempts=config.trainer.group_size)
        paid = reward_proposals(proposals, attempts, self._section)
        earned = await sampler.write(paid.trajectories, split="train", step=step)
        return RolloutRound([*attempts, *earned], dropped=paid.dropped, metrics=paid.metrics)


class GroupStream:
    """Groups from the store, as samplers finish them.

    A step that was reserved and not committed when its trainer was killed gets the same groups
    again: its weights may already have served, and sampled tokens under its number. If they have
    (`serves_early`) and nothing is reserved, the step trained on nothing, and does so again.
    """

    def __init__(
        self,
        parts: Components,
        lost_attempts: LostAttempts,
        stop: Callable[[], bool],
        check: Callable[[], None],
        *,
        serves_early: bool,
        repair: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`serves_early`: the engine has a step's weights before the step is committed."""
        config = parts.config
        self._config = config
        self._store = parts.store
        self._tasks = parts.tasks
        self._lost_attempts = lost_attempts
        self._stop = stop
        self._check = check
        self._serves_early = serves_early
        self._repair = repair
        """Called every POLL_INTERVAL_S of a wait."""
        self._baseline = "baseline_rewards" in config.algorithm.needs
        self._agents = by_rank(config) or ("",)
        self._step = 0
        self._taken = set[str]()
        """Groups that an earlier round of the step has got; they are ready until the step is
        reserved."""

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        """See RolloutSource.round. Raises StopAskedError, and TrainingError if waiting is
        useless."""
        attempts = await (
            self._own_groups(step)
            if self._config.rollout.policy == "wait"
            else self._ready(step, len(tasks))
        )
        await self._lost_attempts.look()
        self._lost_attempts.round_ended()
        return attempts

    async def _own_groups(self, step: int) -> RolloutRound:
        """`wait`: the groups of the step's own tasks, in their order."""
        groups = {
            task.id: group_name(task.id, "train", step) for task in self._tasks.tasks_to_queue(step)
        }
        aside: list[StoredTask] = []

        async def is_finished() -> bool:
            """Whether every task has its group, or will never have it."""
            summaries = await self._store.summaries(split="train", step=step)
            written = {group_of_all(summary.group_id) for summary in summaries}
            missing = [task for task, group in groups.items() if group not in written]
            aside[:] = await self._lost_attempts.set_aside(missing) if missing else []
            progress.to(len(groups) - len(missing) + len(aside))
            return len(aside) == len(missing)

        with bar("waiting for attempts", len(groups), "groups") as progress:
            await self._until(is_finished)

        if len(aside) == len(groups):
            raise in_vain(step, aside)

        trajectories = [row.trajectory for row in await self._read(step=step, split="train")]
        order = {group: place for place, group in enumerate(groups.values())}
        agents = {agent: place for place, agent in enumerate(self._agents)}

        def place(trajectory: Trajectory) -> tuple[int, int, str, int]:
            name = group_of_all(trajectory.group_id)
            return order.get(name, len(order)), agents[trajectory.agent], name, trajectory.attempt

        return RolloutRound(sorted(trajectories, key=place))

    async def _ready(self, step: int, num_groups: int) -> RolloutRound:
        """The first groups that are ready, of any tasks."""
        if step != self._step:
            first = self._step == 0
            self._step = step
            self._taken = set()

            reserved = (
                dict.fromkeys(
                    group_of_all(row.trajectory.group_id)
                    for row in await self._read(trained_step=step)
                )
                if first
                else {}
            )
            if reserved:
                return RolloutRound(await self._groups(reserved), last=True)
            if first and self._serves_early and await self._has_served(step):
                return RolloutRound([], last=True)

        size = self._config.trainer.group_size
        limit = len(self._taken) + num_groups

        async def fresh() -> list[str]:
            ids_per_group = len(self._agents) + self._baseline
            listed = await self._store.ready_groups("train", size=size, limit=ids_per_group * limit)
            groups = [
                name
                for name in dict.fromkeys(map(group_of_all, listed))
                if name not in self._taken and f"/{BASELINE}@" not in name
            ]
            progress.to(min(len(groups), num_groups))
            return groups if len(groups) >= num_groups else []

        with bar("waiting for attempts", num_groups, "groups") as progress:
            groups = (await self._until(fresh))[:num_groups]

        self._taken.update(groups)
        return RolloutRound(await self._groups(groups))

    async def _has_served(self, step: int) -> bool:
        """Whether weights of this uncommitted step have sampled tokens."""
        ready = await self._read(state="ready", split="train")
        return any(step in turn.versions for row in ready for turn in row.trajectory.turns)

    async def _groups(self, names: Iterable[str]) -> list[Trajectory]:
        """The members of the groups, of each agent in turn, and the greedy attempts of the same
        tasks."""
        trajectories = []
        for name in names:
            for agent in self._agents:
                of_agent = group_of_agent(name, agent)
                trajectories += [row.trajectory for row in await self._read(group_id=of_agent)]

            if self._baseline:
                trajectories += [
                    row.trajectory
                    for row in await self._read(group_id=name.replace("/train@", f"/{BASELINE}@"))
                ]

        return trajectories

    async def _read(self, **filters: Unpack[TrajectoryFilter]) -> list[StoredTrajectory]:
        async def read() -> list[StoredTrajectory]:
            return [row async for row in self._store.trajectories(**filters)]

        return await with_retries(read, within_s=STORE_RETRY_S, what="reading attempts")

    async def _until(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Calls the function every `rollout.poll_s` until the answer is not empty or false."""
        looked = time.monotonic()
        while not (
            answer := await with_retries(ask, within_s=STORE_RETRY_S, what="waiting for attempts")
        ):
            self._check()
            if time.monotonic() - looked > POLL_INTERVAL_S:
                await self._lost_attempts.check()
                if self._repair is not None:
                    await self._repair()
                looked = time.monotonic()

            if self._stop():
                raise StopAskedError("stopped while waiting for attempts")

            await asyncio.sleep(self._config.rollout.poll_s)

        return answer


class ColocatedRollouts(RolloutSource):
    """See the module."""

    def __init__(
        self, parts: Components, stop: Callable[[], bool], note: Callable[[str], None]
    ) -> None:
        super().__init__(parts)
        self._config = parts.config
        self._sleepers = _sleepers(parts) if parts.config.rollout.sharing == "turns" else []
        """The engines, where they have to sleep while the trainer computes."""
        self._service = SamplerService(
            parts.config, parts.sampler, parts.engine, parts.store, parts.tasks, worker="train"
        )
        self._has_ended = False
        self._lost_attempts = LostAttempts(parts.config, parts.store, note)
        self._stream = GroupStream(parts, self._lost_attempts, stop, self._check, serves_early=True)
        self._task: asyncio.Task[None] | None = None
        self._slept_s = 0.0

    async def begin(self, step: int) -> None:
        await self._lost_attempts.look()
        await super().begin(step)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ColocatedRollouts]:
        """On exit, the sampler has returned its tasks."""
        self._task = asyncio.create_task(self._service.run(lambda: self._has_ended))
        try:
            yield self
        finally:
            self._has_ended = True
            for engine in self._sleepers:
                await engine.wake()
            with suppress(asyncio.CancelledError):
                await self._task

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        return await self._stream.round(step, tasks)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        started = time.perf_counter()
        try:
            async with asleep(self._sleepers, self._config):
                self._keep_version()
                yield
        finally:
            if self._sleepers:
                self._slept_s += time.perf_counter() - started

    def _keep_version(self) -> None:
        """Under `wait`, groups in progress are sampled from the present weights until they end."""
        rollout = self._config.rollout
        changing = self._parts.sampler.engines
        for engine in dict.fromkeys(
            candidate
            for agent, candidate in changing.items()
            if version_of(self._config, agent, 0) is not None
        ):
            if rollout.policy == "wait" and isinstance(engine, VersionedEngine):
                engine.keep(rollout.staleness)

    def stats(self) -> dict[str, float]:
        return self._service.stats() | {"engine/slept_s": self._slept_s}

    def _check(self) -> None:
        """Raises the sampler's failure as the run's."""
        if self._task is not None and self._task.done():
            self._task.result()
            raise EngineError(
                "the sampler ended while the trainer was waiting for attempts: this is a bug, "
                "please report it"
            )


@asynccontextmanager
async def asleep(engines: Sequence[SleepingEngine], config: RunConfig) -> AsyncIterator[None]:
    """A block in which none of these engines computes."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.sleep(
                in_flight=config.rollout.in_flight, deadline_s=config.engine.timeout_s
            )
            stack.push_async_callback(engine.wake)
        yield


def _compute(work: Callable[[], T]) -> T:
    with own_torch_state():
        return work()


def _sleepers(parts: Components) -> list[SleepingEngine]:
    engines: list[SleepingEngine] = [
        engine for engine in parts.engines if isinstance(engine, SleepingEngine)
    ]
    if len(engines) < len(parts.engines):
        raise ConfigError(
            f"rollout.sharing=turns: the engine {parts.config.engine.type!r} can't sleep while the "
            "trainer computes: set rollout.sharing=overlap"
        )

    return engines


class DisaggregatedRollouts(RolloutSource):
    """See the module."""

    def __init__(
        self,
        parts: Components,
        stop: Callable[[], bool],
        check: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(parts)
        self._stop = stop
        self._note = note
        self._run_engines = parts.run_engines
        """The engines that evaluate, where this process has no engine of its own. They get a step's
        weights before the step is committed."""

        self._published = remote_sender(parts.model, parts.engine, parts.config, note)
        if self._run_engines is not None:
            self._run_engines.repair_with(self._published.look_after)

        self._lost_attempts = LostAttempts(parts.config, parts.store, note)
        self._stream = GroupStream(
            parts,
            self._lost_attempts,
            stop,
            check,
            serves_early=self._run_engines is not None,
            repair=self._repair,
        )
        self._waiting_since = math.inf if parts.config.rollout.samplers else None
        """When the wait for the first attempts began; inf once some have arrived or the wait was
        reported, and where the run has samplers of its own."""

    async def begin(self, step: int) -> None:
        await super().begin(step)
        await self._lost_attempts.look()
        await self._published.begin(step)
        if self._run_engines is not None:
            await self._run_engines.reach(step, self._stop, self._note)

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        rollout_round = await self._stream.round(step, tasks)
        self._waiting_since = math.inf
        return rollout_round

    async def _repair(self) -> None:
        await self._published.look_after()
        if self._waiting_since is not None and time.monotonic() - self._waiting_since > ALONE_S:
            self._waiting_since = math.inf
            self._note(
                f"no attempts after {ALONE_S:g} s: start `agentevo sample` and `agentevo serve` "
                f"with this recipe"
            )

    async def swap(self, step: int) -> None:
        await super().swap(step)  # this process's own engine evaluates
        if self._run_engines is not None:
            await self._published.publish(step)

    async def announce(self, step: int) -> None:
        if self._run_engines is None:
            await self._published.publish(step)

    def stats(self) -> dict[str, float]:
        return self._lost_attempts.stats()
