"""Which tasks a run plays, in which order: all from the run's seed, so every process of a run knows
the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from agentevo.config import RunConfig
from agentevo.config.agents import brings_tasks
from agentevo.errors import ConfigError
from agentevo.rollout.agent_tasks import tasks_of_agent
from agentevo.rollout.given_tasks import GivenTasks, read_tasks
from agentevo.rollout.mixture import Mixture, permutation
from agentevo.rollout.tasks import Purpose, environment_tasks, refill_tasks
from agentevo.seeds import derive_seed
from agentevo.types import QUEUED_FOR_STEP, Task


class TaskSource:
    """Which tasks a step trains on and which are held out: an environment's, those that a program
    gave, those of the recipe's files (`tasks`), or those that the agent brings.

    Given tasks are split once. Where none are given as held out, these are the last
    `evaluation.tasks` of them, at most a fifth; training goes round the others in an order that the
    run's seed shuffles anew each round. What does not fill a step at a round's end waits: no step
    has a task twice. Where sources are mixed by weights, a round has so many of each as the weights
    say and the scarcest allows, and goes round within each source (mixture.py).
    """

    def __init__(self, config: RunConfig, given: Sequence[Task] | None) -> None:
        """Raises ConfigError for files that can't be read, and for too few tasks."""
        self._config = config
        self.read: GivenTasks | None = None
        """What the recipe's files or its agent gave, with the account of bad rows."""
        if given is None and config.tasks.given:
            self.read = read_tasks(config.tasks, config.agent)
        elif given is None and brings_tasks(config.agent.type):
            self.read = tasks_of_agent(config.agent)
        self._pool, self._held_out = self._split(given)
        self._mixture: Mixture | None = None
        self._sources: dict[str, str] = {}
        if self.read is not None and config.tasks.weights:
            self._mixture = Mixture(
                self.read.sizes,
                config.tasks.weights,
                config.run.seed,
                at_least=config.trainer.groups_per_step,
            )
            tasks = iter(self.read.train)
            for name, size in zip(source_names(config.tasks.train), self.read.sizes, strict=True):
                self._sources |= {task.id: name for task in islice(tasks, size)}
        self._by_id = {task.id: task for task in (*(self._pool or ()), *self._held_out)}
        reserved = [task.id for task in self._by_id.values() if QUEUED_FOR_STEP in task.metadata]
        if reserved:
            raise ConfigError(
                f"tasks: {reserved[0]!r} has {QUEUED_FOR_STEP!r} in its metadata, where a queued "
                "task's step is kept: rename the key"
            )
        repeated = next(
            (
                name
                for name in self._by_id
                if name.rpartition("~")[0] in self._by_id and name.rpartition("~")[2].isdigit()
            ),
            None,
        )
        if repeated is not None:
            raise ConfigError(
                f"tasks: the id {repeated!r} is what a repetition of "
                f"{repeated.rpartition('~')[0]!r} is called: give it another"
            )

    def _split(self, given: Sequence[Task] | None) -> tuple[list[Task] | None, list[Task]]:
        """Tasks to train on (None: an environment's, which never end) and held-out ones."""
        count = self._config.evaluation.tasks
        if self.read is not None and self.read.held_out:
            return self.read.train, self.read.held_out[:count]
        tasks = self.read.train if self.read is not None else given
        if tasks is None:
            return None, []
        if len(tasks) < 2:
            raise ConfigError(
                f"tasks: {len(tasks)} given, at least 2 are needed: one to train on and one held "
                "out"
            )
        count = max(1, min(count, len(tasks) // 5))
        return list(tasks[:-count]), list(tasks[-count:])

    def given(self) -> list[Task]:
        """Every task that is no environment's."""
        return [*(self._pool or ()), *self._held_out]

    def _environment(self, purpose: Purpose, first: int, count: int) -> list[Task]:
        if self._config.environment is None:
            raise ConfigError(
                "environment: this run has none, so there are no tasks to play: add "
                "environment.type=NAME, or give tasks"
            )
        kind: str = self._config.environment.type
        return environment_tasks(kind, self._config.run.seed, purpose, first, count)

    def train(self, step: int) -> list[Task]:
        """Tasks of step `step` (from 1)."""
        count = self._config.trainer.groups_per_step
        if self._pool is None:
            return self._environment("train", (step - 1) * count, count)
        pool, size = self._pool, self._round_size()
        count = min(count, size)
        round_, place = divmod(step - 1, size // count)  # `queued` counts rounds likewise
        if self._mixture is None:
            order = self._shuffled("order", round_, size)
        else:
            order = self._mixture.order(round_)
        return [pool[index] for index in order[place * count : (place + 1) * count]]

    def _round_size(self) -> int:
        """Given tasks that a round has."""
        return len(self._pool or ()) if self._mixture is None else self._mixture.round_size

    def queued(self, step: int) -> list[Task]:
        """Tasks of step `step` as samplers queue them: their metadata says for which step, and a
        given task that a later round repeats is a task of its own there, ID~ROUND."""
        tasks, round_ = self.train(step), 0
        if self._pool is not None:
            round_ = (step - 1) // (self._round_size() // len(tasks))
        return [
            replace(
                task,
                id=f"{task.id}~{round_}" if round_ else task.id,
                metadata=task.metadata | {QUEUED_FOR_STEP: step},
            )
            for task in tasks
        ]

    def source_of(self, task_id: str) -> str | None:
        """The name of the source of a task, queued or not, where sources are mixed."""
        return self._sources.get(task_id) or self._sources.get(task_id.rpartition("~")[0])

    def as_given(self, task: Task) -> Task:
        """A queued task as the agent knows it."""
        if self._pool is None:
            metadata = {k: v for k, v in task.metadata.items() if k != QUEUED_FOR_STEP}
            return replace(task, metadata=metadata)
        return self._by_id.get(task.id) or self._by_id.get(task.id.rpartition("~")[0]) or task

    def refill(self, step: int) -> Iterator[Task]:
        """More tasks for a step that could not fill its batch, always the same ones: endless new
        ones of an environment; of given tasks all others that are not held out, each once, in an
        order of the step's own."""
        if self._pool is None:
            assert self._config.environment is not None
            yield from refill_tasks(self._config.environment.type, self._config.run.seed, step)
            return
        pool = self._pool
        taken = {task.id for task in self.train(step)}
        yield from (
            pool[index]
            for index in self._shuffled("refill", step, len(pool))
            if pool[index].id not in taken
        )

    def held_out(self) -> list[Task]:
        """The evaluation's tasks, the same every time."""
        return (
            self._environment("eval", 0, self._config.evaluation.tasks)
            if self._pool is None
            else self._held_out
        )

    def _shuffled(self, purpose: str, number: int, size: int) -> list[int]:
        return permutation(size, derive_seed(self._config.run.seed, purpose, number))


def source_names(sources: Sequence[str]) -> list[str]:
    """A name for metrics of each source: that of its file, numbered where several have the same,
    and never that of another."""
    stems = [re.sub(r"[^\w-]+", "_", Path(source).name.partition(".")[0]) for source in sources]
    names: list[str] = []
    for number, stem in enumerate(stems):
        name = stem if stems.count(stem) == 1 else f"{stem}_{number}"
        while name in names or (name != stem and name in stems):
            name += "_"
        names.append(name)
    return names
