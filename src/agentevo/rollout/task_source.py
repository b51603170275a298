"""The tasks of a run and their order. Both follow from the run's seed, so every process of a run
has the same tasks.

Orders of given tasks, round after round. All of them follow from the run's seed. A round of a
mixture has tasks of each source in proportion to the source's weight, in whole numbers. The source
with the fewest tasks for its weight limits the size of the round, so no round has a task twice.
Each round takes the next part of a source's shuffled tasks. After the last part the tasks are
shuffled again, and a remainder smaller than a part is not played before that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from agentevo.config import RunConfig
from agentevo.config.agents import brings_tasks
from agentevo.config.tasks import TasksSection
from agentevo.errors import ConfigError
from agentevo.rollout.curriculum import TaskCurriculum
from agentevo.rollout.given_tasks import GivenTasks, images_of_list, read_tasks, tasks_of_agent
from agentevo.rollout.self_play import ProposalTasks, make_family
from agentevo.rollout.task_stages import TaskStages, check_stage, of_stage
from agentevo.rollout.tasks import Purpose, environment_tasks, refill_tasks
from agentevo.runtime.seeds import derive_seed
from agentevo.store.store import Store
from agentevo.types import QUEUED_ATTEMPTS, QUEUED_FOR_STEP, Task
from agentevo.types.images import ImageFile


class Mixture:
    """The rounds of tasks from several sources, mixed by weight. A task's number counts the tasks
    of all sources, source after source."""

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, at_least: int
    ) -> None:
        """`sizes`: the number of tasks of each source. Raises ConfigError if a round has fewer than
        `at_least` tasks, the number that a step needs."""
        scarcest = min(size / weight for size, weight in zip(sizes, weights, strict=True))
        self.shares = [max(1, int(weight * scarcest + 1e-9)) for weight in weights]
        """The number of tasks of each source in a round."""
        self.round_size = sum(self.shares)
        self._sizes = list(sizes)
        self._seed = seed

        if self.round_size < at_least:
            raise ConfigError(
                f"tasks.weights: with {', '.join(map(str, sizes))} tasks a round has "
                f"{self.round_size}, and a step needs trainer.groups_per_step={at_least}: give the "
                "smaller source more tasks or less weight, or set fewer groups"
            )

    def order(self, round_: int) -> list[int]:
        """The numbers of a round's tasks, in order."""
        tasks: list[int] = []
        first = 0
        for source, (size, share) in enumerate(zip(self._sizes, self.shares, strict=True)):
            turn, part = divmod(round_, size // share)
            source_order = permutation(size, derive_seed(self._seed, "source", source, turn))
            tasks += [first + index for index in source_order[part * share : (part + 1) * share]]
            first += size

        shuffled = permutation(len(tasks), derive_seed(self._seed, "order", round_))
        return [tasks[place] for place in shuffled]


class TaskPool:
    """Given tasks, step after step, in rounds of all tasks or of a mixture. The tasks that are left
    at a round's end and do not fill a step are not played in that round, so no step has a task
    twice."""

    def __init__(
        self, tasks: Sequence[Task], seed: int, groups_per_step: int, mixture: Mixture | None = None
    ) -> None:
        self.tasks = list(tasks)
        self._seed = seed
        self._mixture = mixture
        self._round_size = len(self.tasks) if mixture is None else mixture.round_size
        self._count = min(groups_per_step, self._round_size)
        self._steps_per_round = self._round_size // self._count

    def of_step(self, place: int) -> list[Task]:
        """The tasks of the pool's step with the number `place`, counted from 0."""
        round_ = self.round_of(place)
        part = place % self._steps_per_round
        order = (
            self.shuffle("order", round_) if self._mixture is None else self._mixture.order(round_)
        )
        return [self.tasks[index] for index in order[part * self._count : (part + 1) * self._count]]

    def round_of(self, place: int) -> int:
        """The number of the round that contains the step."""
        return place // self._steps_per_round

    def shuffle(self, purpose: str, number: int) -> list[int]:
        """All tasks in a random order that follows from the purpose and the number."""
        return permutation(len(self.tasks), derive_seed(self._seed, purpose, number))


def permutation(size: int, seed: int) -> list[int]:
    """The numbers below `size` in a random order, the same as `torch.randperm` of a generator with
    this seed (Fisher-Yates with 32-bit draws of MT19937). For processes without torch."""
    draws = np.random.RandomState(seed % 2**32).randint(2**32, size=size, dtype=np.uint32)
    order = list(range(size))
    for index, draw in enumerate(draws[: max(size - 1, 0)].tolist()):
        target = index + draw % (size - index)
        order[index], order[target] = order[target], order[index]
    return order


class TaskSource:
    """Provides the tasks that each step trains on and the held-out tasks. They come from an
    environment, from the program that starts the run, from the recipe's files (`tasks`), or from
    the agent.

    Given tasks are split once. If no held-out tasks are given, they are the last `evaluation.tasks`
    of the given tasks, at most a fifth. Training cycles through the other tasks and shuffles them
    again in each round, by the run's seed. If the recipe has stages, each stage cycles
    through its own tasks (task_stages.py).
    """

    def __init__(self, config: RunConfig, given_tasks: Sequence[Task] | None) -> None:
        """Raises ConfigError if the files can't be read, and if there are too few tasks."""
        self._config = config
        self._given_images = images_of_list(given_tasks)
        self.read: GivenTasks | None = None
        """The tasks from the recipe's files or its agent, with the report of bad rows."""
        self.proposals: ProposalTasks | None = None
        """The proposer's prompts, under self-play."""

        if given_tasks is None and config.tasks.given:
            self.read = read_tasks(config.tasks, config.agent)
        elif given_tasks is None and brings_tasks(config.agent.type):
            self.read = tasks_of_agent(config.agent)

        if given_tasks is None and config.tasks.self_play is not None:
            section = config.tasks.self_play
            groups = config.trainer.groups_per_step
            timeout_s = config.agent.timeout_s
            family = make_family(section, timeout_s)
            self.proposals = ProposalTasks(
                section, family, config.run.seed, groups, timeout_s=timeout_s
            )

        train, self._held_out = self._split(given_tasks)
        self._plays_environment = train is None and self.proposals is None
        """Whether the environment makes the tasks."""
        self._train = train or []
        if self._plays_environment and config.tasks.from_environment is not None:
            train = self._environment("train", 0, config.tasks.from_environment)

        self._num_to_train = len(train or ())
        staged = config.tasks.stages if given_tasks is None else ()
        self.stages = TaskStages(staged, lag=config.rollout.staleness)
        self._files = {} if self.read is None else files_of(config.tasks, self.read)
        names = source_names(config.tasks.train) if config.tasks.weights else []
        self._source_names = dict(zip(config.tasks.train, names, strict=False))
        self._pools = None if train is None else self._pools_of(train)
        self.curriculum = self._curriculum_of(train)
        self._by_id = {task.id: task for task in (*(train or ()), *self._held_out)}
        _check_ids(self._by_id)

    @property
    def images(self) -> Mapping[str, ImageFile]:
        """The images that the tasks name and this process has read, by digest."""
        return self._given_images if self.read is None else self.read.images

    def _pools_of(self, train: Sequence[Task]) -> list[TaskPool]:
        """The pool of tasks that each stage cycles through."""
        seed = self._config.run.seed
        groups = self._config.trainer.groups_per_step
        if not self.stages.stages:
            return [TaskPool(train, seed, groups, self._mixture(train, seed))]

        pools = []
        for number, stage in enumerate(self.stages.stages):
            stage_tasks = of_stage(stage, train, self._files)
            check_stage(stage, len(stage_tasks), train, groups)
            own_seed = derive_seed(seed, "stage", number) if number else seed
            pools.append(
                TaskPool(stage_tasks, own_seed, groups, self._mixture(stage_tasks, own_seed))
            )

        return pools

    def _curriculum_of(self, train: Sequence[Task] | None) -> TaskCurriculum | None:
        config = self._config
        section = self._config.tasks.curriculum
        if section is None or train is None:
            return None
        return TaskCurriculum(
            section,
            train,
            config.run.seed,
            config.trainer.groups_per_step,
            group_size=config.trainer.group_size,
            lag=config.rollout.staleness,
        )

    def shortfall(self) -> str:
        """A message if there are too few tasks for trainer.groups_per_step, so that steps have
        fewer groups. Otherwise empty. Stages and mixtures of sources refuse such a recipe
        instead."""
        needed = self._config.trainer.groups_per_step
        count = self._num_to_train
        if not count or count >= needed:
            return ""
        tasks, groups = (
            ("is 1 task", "1 group") if count == 1 else (f"are {count} tasks", f"{count} groups")
        )
        return (
            f"trainer.groups_per_step={needed}, and there {tasks} to train on, so each step has "
            f"{groups}: give more tasks, or set trainer.groups_per_step={count}"
        )

    async def learn(self, store: Store) -> None:
        """Reads the committed steps, if the tasks of later steps depend on them."""
        await self.stages.learn(store)
        if self.curriculum is not None:
            await self.curriculum.learn(store)

    def is_known(self, step: int) -> bool:
        """Whether the committed steps that were read determine the tasks of the step."""
        return self.stages.is_known(step) and (
            self.curriculum is None or self.curriculum.is_known(step)
        )

    def _mixture(self, tasks: Sequence[Task], seed: int) -> Mixture | None:
        """The mixture of these tasks, if the recipe mixes sources by weights. A source without
        tasks is left out."""
        section = self._config.tasks
        if self.read is None or not section.weights:
            return None

        sizes = Counter(self._files[task.id] for task in tasks)
        weights = dict(zip(section.train, section.weights, strict=True))
        present = [source for source in weights if sizes[source]]
        return Mixture(
            [sizes[source] for source in present],
            [weights[source] for source in present],
            seed,
            at_least=self._config.trainer.groups_per_step,
        )

    def _split(self, given_tasks: Sequence[Task] | None) -> tuple[list[Task] | None, list[Task]]:
        """The tasks to train on and the held-out tasks. The tasks to train on are None for an
        environment, which has endless tasks."""
        count = self._config.evaluation.tasks
        if self.proposals is not None:
            return None, self.never_trained()[:count]
        if self.read is not None and self.read.held_out:
            return self.read.train, self.read.held_out[:count]

        tasks = self.read.train if self.read is not None else given_tasks
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
        """All tasks that do not come from an environment."""
        return [*self._train, *self._held_out]

    def given_to_train(self) -> list[Task]:
        """The tasks to train on that do not come from an environment."""
        return list(self._train)

    def _environment(self, purpose: Purpose, first: int, count: int) -> list[Task]:
        if self._config.environment is None:
            raise ConfigError(
                "environment: this run has none, so there are no tasks to play: add "
                "environment.type=NAME, or give tasks"
            )
        kind: str = self._config.environment.type
        return environment_tasks(kind, self._config.run.seed, purpose, first, count)

    def train(self, step: int) -> list[Task]:
        """The tasks of a step, counted from 1. Under self-play, the proposer's prompts."""
        if self.proposals is not None:
            return self.proposals.of_step(step)

        if self._pools is None:
            count = self._config.trainer.groups_per_step
            return self._environment("train", (step - 1) * count, count)

        if self.curriculum is not None:
            return self.curriculum.of_step(step)

        begins = self.stages.begins(step)
        return self._pools[len(begins) - 1].of_step(step - begins[-1])

    def attempts_of_step(self, step: int) -> dict[str, int]:
        """Task id -> number of attempts, for the tasks of a step that do not have
        trainer.group_size."""
        return {} if self.curriculum is None else self.curriculum.attempts_of_step(step)

    def tasks_to_queue(self, step: int) -> list[Task]:
        """The tasks of the step as samplers queue them. Their metadata names the step, and the
        number of attempts where it is not trainer.group_size. A given task that a later round
        repeats becomes a task with the id ID~ROUND. With a curriculum, every step is a round."""
        round_ = 0 if self._pools is None else self._rounds_before(self._pools, step)
        round_ = round_ if self.curriculum is None else step
        attempts = self.attempts_of_step(step)
        return [
            replace(
                task,
                id=f"{task.id}~{round_}" if round_ else task.id,
                metadata=task.metadata
                | {QUEUED_FOR_STEP: step}
                | ({QUEUED_ATTEMPTS: attempts[task.id]} if task.id in attempts else {}),
            )
            for task in self.train(step)
        ]

    def _rounds_before(self, pools: Sequence[TaskPool], step: int) -> int:
        """The number of rounds of all stages before the step's own round."""
        *earlier, begin = self.stages.begins(step)
        ends = [*earlier[1:], begin]
        before = sum(
            pool.round_of(end - first - 1) + 1
            for pool, first, end in zip(pools, earlier, ends, strict=False)
        )
        return before + pools[len(earlier)].round_of(step - begin)

    def given_id(self, task_id: str) -> str:
        """The id of the given task that a task, queued or not, plays."""
        without_round = task_id.rpartition("~")[0]
        repeats = task_id not in self._by_id and without_round in self._by_id
        return without_round if repeats else task_id

    def source_of(self, task_id: str) -> str | None:
        """The name of the source of a task, queued or not, if the recipe mixes sources."""
        file = self._files.get(task_id) or self._files.get(task_id.rpartition("~")[0])
        return None if file is None else self._source_names.get(file)

    def as_agent_task(self, task: Task) -> Task:
        """A queued task in the form that the agent receives."""
        if self._pools is None:
            metadata = {k: v for k, v in task.metadata.items() if k != QUEUED_FOR_STEP}
            return replace(task, metadata=metadata)
        return self._by_id.get(task.id) or self._by_id.get(task.id.rpartition("~")[0]) or task

    def stage_of(self, step: int) -> int | None:
        """The number of the stage that contains the step, from 1. None if there are no stages."""
        return len(self.stages.begins(step)) if self.stages.stages else None

    def stage_name(self, step: int) -> str:
        """The name of the step's stage. Empty if there are no stages."""
        return self.stages.name_at(step)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Metrics of how the step's tasks were chosen."""
        stage = self.stage_of(step)
        metrics = {} if stage is None else {"training/stage": float(stage)}
        return metrics if self.curriculum is None else metrics | self.curriculum.metrics(step)

    def refill(self, step: int) -> Iterator[Task]:
        """Further tasks for a step that could not fill its batch. They are the same for every call.
        An environment has endless new tasks. Of given tasks, all others of the stage come once, in
        the curriculum's order or else in an order for that step."""
        if self._pools is None:
            assert self._config.environment is not None
            yield from refill_tasks(self._config.environment.type, self._config.run.seed, step)
            return

        if self.curriculum is not None:
            order = self.curriculum.order(step)[len(self.train(step)) :]
            yield from (self.curriculum.tasks[place] for place in order)
            return

        pool = self._pools[len(self.stages.begins(step)) - 1]
        taken = {task.id for task in self.train(step)}
        yield from (
            pool.tasks[index]
            for index in pool.shuffle("refill", step)
            if pool.tasks[index].id not in taken
        )

    def held_out_by_stage(self) -> dict[str, set[str]]:
        """The ids of the held-out tasks of each stage that has some."""
        ids_by_stage = {
            stage.name: {task.id for task in of_stage(stage, self._held_out, self._files)}
            for stage in self.stages.stages
        }
        return {name: ids for name, ids in ids_by_stage.items() if ids}

    def held_out(self) -> list[Task]:
        """The evaluation's tasks, which are always the same."""
        return (
            self._environment("eval", 0, self._config.evaluation.tasks)
            if self._plays_environment
            else self._held_out
        )

    def never_trained(self) -> list[Task]:
        """Every held-out task of the recipe's files, including those beyond evaluation.tasks."""
        return [] if self.read is None else self.read.held_out


def files_of(section: TasksSection, read: GivenTasks) -> dict[str, str]:
    """Maps a task's id to the task's source, as the recipe names it."""
    splits = (
        (section.train, read.train, read.sizes),
        (section.eval, read.held_out, read.held_out_sizes),
    )
    source_of: dict[str, str] = {}
    for sources, tasks, sizes in splits:
        rest = iter(tasks)
        for source, size in zip(sources, sizes, strict=False):  # an agent's tasks have no source
            source_of |= {task.id: source for task in islice(rest, size)}

    return source_of


def _check_ids(tasks: Mapping[str, Task]) -> None:
    """Raises ConfigError if a task could be confused with a queued task."""
    for key in (QUEUED_FOR_STEP, QUEUED_ATTEMPTS):
        reserved = [task.id for task in tasks.values() if key in task.metadata]
        if reserved:
            raise ConfigError(
                f"tasks: {reserved[0]!r} has {key!r} in its metadata, which is reserved for a "
                "queued task: rename the key"
            )

    repeated = next(
        (
            name
            for name in tasks
            if name.rpartition("~")[0] in tasks and name.rpartition("~")[2].isdigit()
        ),
        None,
    )
    if repeated is not None:
        raise ConfigError(
            f"tasks: the id {repeated!r} is reserved for a repetition of "
            f"{repeated.rpartition('~')[0]!r}: use another id"
        )


def source_names(sources: Sequence[str]) -> list[str]:
    """A name for metrics for each source. It is the file's name, with a number if several files
    have the same name. No two sources have the same name."""
    stems = [re.sub(r"[^\w-]+", "_", Path(source).name.partition(".")[0]) for source in sources]
    names: list[str] = []
    for number, stem in enumerate(stems):
        name = stem if stems.count(stem) == 1 else f"{stem}_{number}"
        while name in names or (name != stem and name in stems):
            name += "_"
        names.append(name)

    return names
