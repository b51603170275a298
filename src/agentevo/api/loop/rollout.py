"""`@agentevo.rollout`: a function that makes one attempt, and the groups of such attempts in a
program's own loop.

    @agentevo.rollout
    async def answer(task, policy): ...

    groups = await agentevo.gather(answer.group(model, task) for task in tasks)
    await model.train(groups)

A failed attempt is part of its group, with the reason, and is not trained on. An error in the
engine is not the attempt's failure: the attempt is repeated, a limited number of times.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from agentevo.agents.agent import FunctionAgent
from agentevo.api.loop.conversation import RemoteAttempt, RemotePolicy
from agentevo.api.loop.group import Group, baseline_name
from agentevo.api.loop.model import TrainableModel
from agentevo.api.loop.records import NewAttempt
from agentevo.config.agents import is_async
from agentevo.config.tasks import TaskFields
from agentevo.data import RowError
from agentevo.data.message_images import ImageCollector
from agentevo.errors import AttemptsFailedError, ConfigError, EngineError
from agentevo.rollout.failures import FirstFailures, summarize_failures
from agentevo.rollout.given_tasks import task_of
from agentevo.rollout.group import GroupAttempt, InfrastructureFailure
from agentevo.rollout.scoring import Scoring
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import gather_all
from agentevo.store.records import RETRIES
from agentevo.types import Task, Trajectory
from agentevo.types.copies import copy_of_task
from agentevo.types.images import ImageFile, file_of, images_of_messages


class Rollout:
    """See the module. Called, it is the function itself, so `agentevo.train` takes it too."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._agent = FunctionAgent(function)
        self._function = function
        self._failures = FirstFailures(to_stderr)
        self._scorings = WeakKeyDictionary[TrainableModel, Scoring]()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    async def group(
        self,
        model: TrainableModel,
        task: Task | Mapping[str, Any],
        *,
        size: int | None = None,
        greedy: bool = False,
    ) -> Group:
        """Several attempts at a task: `size` of them, or `trainer.group_size`. With `greedy` each
        token is the likeliest one: for evaluation, with a size of 1, and never trained on."""
        images = ImageCollector()
        given_task = task if isinstance(task, Task) else _task_of(task, images)
        size = (1 if greedy else model.state.group_size) if size is None else size
        if size < 1:
            raise ConfigError(f"size is {size}: a group has at least one attempt")

        self._scoring(model).check([given_task], needed=False)
        name = await model.connection.group(given_task.id, greedy=greedy)
        baselines = (
            [] if greedy or not model.state.has_baseline else [baseline_name(name, given_task.id)]
        )
        attempts = await gather_all(
            [self._made(model, given_task, images, name, number, greedy) for number in range(size)]
            + [self._made(model, given_task, images, baseline, 0, True) for baseline in baselines]
        )
        members = attempts[:size]
        greedy_ones = attempts[size:]
        for attempt in attempts:
            for image in attempt.images_of_remote_models():
                images.add(image)

        return Group(
            id=name,
            task=given_task,
            trajectories=await self._score(model, given_task, members),
            baseline=next(iter(await self._score(model, given_task, greedy_ones)), None),
            seals={name: seal for attempt in attempts for name, seal in attempt.seals.items()},
            images=list(images.files.values()),
        )

    def _scoring(self, model: TrainableModel) -> Scoring:
        if model not in self._scorings:
            self._scorings[model] = Scoring(model.rewards, show=self._failures.show)
        return self._scorings[model]

    async def _score(
        self, model: TrainableModel, task: Task, attempts: Sequence[_MadeAttempt]
    ) -> list[Trajectory]:
        """The trajectories of these attempts, those of each agent in turn. An agent that is not
        trained is not judged."""
        trained = model.state.trained_agents
        scored = list[Trajectory]()
        unrewarded = set[str]().union(*(attempt.unrewarded for attempt in attempts))
        images = {name: image for made in attempts for name, image in made.images.items()}
        for of_agent in zip(*(attempt.trajectories for attempt in attempts), strict=True):
            judged = list(of_agent)
            if not trained or judged[0].agent in trained:
                without = [trajectory.id in unrewarded for trajectory in judged]
                scoring = self._scoring(model)
                judged = await scoring.score(judged, without, {}, task=task, images=images)
            scored += judged

        return scored

    async def _made(
        self,
        model: TrainableModel,
        task: Task,
        images: ImageCollector,
        group: str,
        number: int,
        greedy: bool,
    ) -> _MadeAttempt:
        """Makes one attempt, and repeats it if the engine fails."""
        failures = 0
        while True:
            async with model.slot():
                try:
                    return await self._attempt(model, task, images, group, number, greedy)
                except InfrastructureFailure as error:
                    failures += 1
                    if failures == RETRIES.max_failures:
                        raise EngineError(f"failed {failures} times, last with: {error}") from error

            await asyncio.sleep(RETRIES.delay_s(failures))

    async def _attempt(
        self,
        model: TrainableModel,
        task: Task,
        images: ImageCollector,
        group: str,
        number: int,
        greedy: bool,
    ) -> _MadeAttempt:
        new = NewAttempt(task_id=task.id, group_id=group, number=number, greedy=greedy)
        opened = await model.connection.open(new)
        under_way = RemoteAttempt(model.connection, opened)
        for image in images.files.values():
            under_way.images.add(image)

        attempt = GroupAttempt(
            self._agent,
            copy_of_task(task),
            RemotePolicy(under_way, await model.connection.remote(opened, under_way.images)),
            name=f"{group}#{number}",
            limit_s=model.state.attempt_timeout_s,
            show=self._failures.show,
        )
        trajectories = await attempt.run(task_id=task.id, group_id=group, number=number)
        agent_ends = (await under_way.end()).agents
        seals = {opened.names[agent]: agent_ends[agent].seal for agent in agent_ends}
        return _MadeAttempt(trajectories, seals, attempt.unrewarded, under_way.images.files)

    def trace_of(self, error: str | None) -> str:
        """The traceback of the first attempt with this failure."""
        return self._failures.trace_of(error)


class AsyncRollout(Rollout):
    """The same of an async function."""

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        return await self._function(*arguments, **options)


class _MadeAttempt:
    def __init__(
        self,
        trajectories: list[Trajectory],
        seals: Mapping[str, str],
        unrewarded: set[str],
        images: Mapping[str, ImageFile],
    ) -> None:
        """One trajectory for each agent; `unrewarded`: those whose reward is left to a scorer;
        `images`: those that they may name, by digest."""
        self.trajectories = trajectories
        self.seals = seals
        self.unrewarded = unrewarded
        self.images = images

    def images_of_remote_models(self) -> list[ImageFile]:
        """The images that remote models were shown."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory.remote_turns]
        parts = images_of_messages(message for turn in turns for message in turn.messages)
        return [file_of(part.sha256, self.images) for part in parts]


def rollout(function: Callable[..., Any]) -> Rollout:
    """Decorator that turns an agent function, `run(task, policy)` or `run(task)`, into a `Rollout`.
    Raises ConfigError for any other object."""
    return AsyncRollout(function) if is_async(function) else Rollout(function)


async def gather(groups: Iterable[Coroutine[Any, Any, Group]]) -> list[Group]:
    """Runs groups concurrently and returns them in order. Raises AttemptsFailedError if every
    attempt failed, which means that the agent function or a service that it uses is broken."""
    finished = await gather_all(list(groups))
    attempts = [trajectory for group in finished for trajectory in group.trajectories]
    if attempts and all(attempt.status != "completed" for attempt in attempts):
        errors = [attempt.error for attempt in attempts]
        raise AttemptsFailedError(summarize_failures(errors, len(attempts)))
    return finished


def _task_of(row: Mapping[str, Any], images: ImageCollector) -> Task:
    """The task of a row, whose images are added to `images`."""
    try:
        return task_of(dict(row), TaskFields(), images=images)
    except RowError as error:
        raise ConfigError(f"group: the task: {error}") from error
