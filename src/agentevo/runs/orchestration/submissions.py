"""Steps that a program's own loop requests: it makes groups of attempts, and submits some of them
as a step. The trainer's loop (run.py) is the same; it waits for submissions instead of
sampling.

    submit(submission) -> queue -> collect -> prepare -> reserve -> update -> commit -> finished

A step's record names its submission. A submission that arrives again, after a lost answer or a
kill, is therefore recognised and not trained again. The rows of a submission whose step was not
committed are deleted when the run is resumed: the submitting program still has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from agentevo.config import RunConfig
from agentevo.errors import ConfigError, TrainingError, describe_error
from agentevo.inference.engine import SleepingEngine
from agentevo.inference.weights.transports import shares
from agentevo.rollout.group import write_group
from agentevo.runs.orchestration.batch_sources import RolloutBatches
from agentevo.runs.orchestration.collect import Collected, StepTasks
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.rollout_sources import (
    RolloutRound,
    RolloutSource,
    StopAskedError,
    asleep,
)
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.store import Store
from agentevo.training.learner import RolloutTrainer
from agentevo.types import Task, Trajectory

KEY = "submission"
"""Key of a submission's id in the record of its step, under `source`."""


@dataclass(frozen=True)
class Submission:
    """The attempts that one step is trained on."""

    id: str
    """Derived from what is submitted."""
    tasks: list[Task]
    """One task for each group, in order."""
    trajectories: list[Trajectory]


class Host(Protocol):
    """Lets programs attempt tasks while the run takes submissions, on the run's event loop."""

    async def note_open(self, parts: Components) -> None: ...

    def note_commit(self, submission: str, step: int) -> None:
        """The submission has become this step."""

    async def closing(self, failure: BaseException | None) -> None:
        """No step follows; the cause is that failure, if there is one."""


class Submissions(StepTasks):
    """The submissions that wait for the trainer of a run. Everything happens on the trainer's event
    loop."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._waiting: asyncio.Queue[Submission | Callable[[], None] | None] = asyncio.Queue()
        self._ends: dict[str, asyncio.Future[int]] = {}
        self._under_way: dict[str, Submission] = {}
        self._current: Submission | None = None
        self._over: str | None = None
        self.save: Callable[[], None] = lambda: None
        """Saves a checkpoint of the committed weights."""

    def submit(self, submission: Submission) -> asyncio.Future[int]:
        """The step that the submission becomes, once that is committed. A submission that is in
        progress is not started again. Raises TrainingError if no step follows any more, and
        ConfigError for attempts or tasks that another submission in progress has too."""
        if self._over is not None:
            raise TrainingError(self._over)

        if submission.id not in self._ends:
            self._check_apart(submission)
            self._under_way[submission.id] = submission
            self._ends[submission.id] = asyncio.get_running_loop().create_future()
            self._waiting.put_nowait(submission)

        return self._ends[submission.id]

    def _check_apart(self, submission: Submission) -> None:
        """See `submit`. The store does not yet know the submissions in progress."""
        ids = {trajectory.id for trajectory in submission.trajectories}
        tasks = {task.id: task for task in submission.tasks}
        for pending in self._under_way.values():
            if shared := ids & {trajectory.id for trajectory in pending.trajectories}:
                raise ConfigError(
                    f"train: the attempt {min(shared)!r} is in another submission in progress: "
                    f"no attempt is trained on twice; trainer.epochs makes several passes"
                )

            for task in pending.tasks:
                if tasks.get(task.id, task) != task:
                    raise ConfigError(
                        f"train: the task {task.id!r} has other content in a submission in "
                        f"progress: give each task its own id"
                    )

    @property
    def num_under_way(self) -> int:
        """The number of submissions that have not become a step yet."""
        return len(self._under_way)

    def has(self, name: str) -> bool:
        """Whether a submission is in progress."""
        return name in self._ends

    def future(self, name: str) -> asyncio.Future[int]:
        """The step of a submission in progress."""
        return self._ends[name]

    async def save_checkpoint(self) -> None:
        """Saves a checkpoint of the committed weights, between two steps."""
        if self._over is not None:
            raise TrainingError(self._over)

        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def work() -> None:
            try:
                self.save()
            except BaseException as error:
                future.cancel()
                raise error
            future.set_result(None)

        self._waiting.put_nowait(work)
        await future

    def close(self) -> None:
        """The run ends once the submissions in progress are trained."""
        self._waiting.put_nowait(None)

    def end(self, why: str) -> None:
        """No step follows."""
        self._over = why
        for future in self._ends.values():
            if not future.done():
                future.set_exception(TrainingError(why))
                future.exception()  # the caller may have stopped waiting

    async def take(self) -> None:
        """Waits for the next submission without a deadline, since the program decides when it
        submits. Raises StopAskedError after `close`."""
        while True:
            item = await self._waiting.get()
            if item is None:
                raise StopAskedError("the program's loop has ended")
            if isinstance(item, Submission):
                self._current = item
                return
            item()

    def note_commit(self, step: int) -> None:
        """The current submission has become this step."""
        self.host.note_commit(self.current.id, step)
        del self._under_way[self.current.id]
        future = self._ends.pop(self.current.id)
        if not future.done():
            future.set_result(step)

    @property
    def current(self) -> Submission:
        """The submission that the trainer is working on, or the last one."""
        assert self._current is not None
        return self._current

    def train(self, step: int) -> list[Task]:
        """See StepTasks.train."""
        return self.current.tasks

    async def learn(self, store: Store) -> None:
        """See StepTasks.learn. The program decides what comes next."""


class SubmittedRollouts(RolloutSource):
    """The source of submitted attempts. The engine sleeps while the trainer changes the weights
    with which it computes."""

    def __init__(self, parts: Components, submissions: Submissions) -> None:
        super().__init__(parts)
        self.submissions = submissions
        self._sleepers = [
            engine
            for model, engine in parts.trained
            if shares(engine, model) and isinstance(engine, SleepingEngine)
        ]

    async def begin(self, step: int) -> None:
        """See RolloutSource.begin. Nothing remains of steps that were not committed."""
        await with_retries(
            lambda: self._parts.store.rewind(step),
            within_s=STORE_RETRY_S,
            what="deleting attempts that no step has committed",
        )
        await super().begin(step)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        failure: BaseException | None = None
        await self.submissions.host.note_open(self._parts)
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            why = "it was closed" if failure is None else describe_error(failure)
            self.submissions.end(f"the run takes no further step: {why}")
            await self.submissions.host.closing(failure)

    async def round(self, step: int, tasks: Sequence[Task]) -> RolloutRound:
        """The attempts of the submission, which are in the store from this point on."""
        store = self._parts.store
        await with_retries(
            lambda: store.add_tasks(tasks, queue=False), within_s=STORE_RETRY_S, what="add_tasks"
        )
        trajectories = await write_group(
            store, self.submissions.current.trajectories, split="train", step=step
        )
        return RolloutRound(trajectories)

    def training(self) -> AbstractAsyncContextManager[None]:
        return asleep(self._sleepers, self._parts.config)

    async def announce(self, step: int) -> None:
        self.submissions.note_commit(step)


class SubmittedBatches(RolloutBatches):
    """The groups that were submitted for a step."""

    activity = "waiting"

    def __init__(
        self,
        config: RunConfig,
        rollouts: SubmittedRollouts,
        trainer: RolloutTrainer,
        store: Store,
    ) -> None:
        self._submissions = rollouts.submissions
        super().__init__(config, rollouts, self._submissions, trainer, store)
        self._id = ""

    async def collect(self, step: int) -> Collected:
        """Waits for a submission."""
        await self._submissions.take()
        self._id = self._submissions.current.id
        return await super().collect(step)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {KEY: self._id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._id = state[KEY]
