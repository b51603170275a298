"""Selects the tasks of a step under `tasks.curriculum`. Tasks of medium success have the highest
weights (config/curriculum.py), and no task is selected twice.

    key of a task = log(u) / weight, u uniform in (0, 1): the tasks with the largest keys are
    selected

(Efraimidis and Spirakis, 2006). u comes from the run's seed and the step. A task's results come
from the records of the committed steps (`solved` of their batch source). With `lag` steps of
staleness, the tasks of a step depend on the records up to step - 1 - lag, the ones that exist when
the tasks are chosen. There is no other state. So a resumed run, a replay, and samplers in other
processes choose the same tasks.

With `attempts: [min, max]`, hard tasks get more attempts and easy ones fewer, as in DART (arXiv
2509.23866; its released code does not contain its rule). `divide_attempts` has ours.

A task can be a harder variant of another task, whose id is `variant_of` in its metadata. The
variant is not played before that other task is retired.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from agentevo.config.tasks import Curriculum
from agentevo.errors import ConfigError
from agentevo.runtime.retry import with_retries
from agentevo.runtime.seeds import derive_seed
from agentevo.store.store import Store
from agentevo.types import Task

SOLVED = "solved"
"""A key in the state of a step's batch source. Its value maps a task id to [attempts that
succeeded, attempts that were completed]."""
VARIANT_OF = "variant_of"


class TaskStepResult(NamedTuple):
    step: int
    solved: int
    attempts: int


class TaskCurriculum:
    """The tasks of a run, with the known results of each task."""

    def __init__(
        self,
        section: Curriculum,
        tasks: Sequence[Task],
        seed: int,
        groups: int,
        *,
        group_size: int,
        lag: int,
    ) -> None:
        """Raises ConfigError if no task can be played at the start, or if a variant has no base
        task."""
        self._section = section
        self.tasks = list(tasks)
        self._seed = seed
        self._lag = lag
        self._groups = min(groups, len(self.tasks))
        self._group_size = group_size
        self._index_by_id = {task.id: index for index, task in enumerate(self.tasks)}
        self._parents = [task.metadata.get(VARIANT_OF) for task in self.tasks]
        self._history: dict[int, list[TaskStepResult]] = defaultdict(list)
        self._last_step = 0
        """The newest committed step that was read."""
        self._order_cache: dict[int, list[int]] = {}

        orphan = next(
            (
                variant.id
                for variant, parent in self._variant_pairs()
                if parent not in self._index_by_id
            ),
            None,
        )
        if orphan is not None or all(parent is not None for parent in self._parents):
            what = (
                f"{orphan!r}: {VARIANT_OF} does not name a task to train on"
                if orphan
                else "all are variants"
            )
            raise ConfigError(
                f"tasks.curriculum: {what}: also give the tasks that they are harder variants of"
            )

    def _variant_pairs(self) -> list[tuple[Task, str]]:
        pairs = zip(self.tasks, self._parents, strict=True)
        return [(task, str(parent)) for task, parent in pairs if parent is not None]

    async def learn(self, store: Store) -> None:
        """Reads the steps that were committed since the last call."""
        records = await with_retries(
            lambda: store.steps(after=self._last_step),
            what="reading the results of the steps",
        )
        for record in records:
            # a sampler in the trainer's process calls learn() too
            if record.step == self._last_step + 1:
                self.note_step(record.step, record.record["source"].get(SOLVED) or {})

    def note_step(self, step: int, solved: Mapping[str, Sequence[int]]) -> None:
        """Records the results of a committed step. Steps must come in order. Raises ValueError for
        a step out of order."""
        if step != self._last_step + 1:
            raise ValueError(f"step {step} is reported after step {self._last_step}")
        self._last_step = step
        for name, (good, attempts) in solved.items():
            task_id = name if name in self._index_by_id else name.rpartition("~")[0]
            if task_id in self._index_by_id and attempts:
                self._history[self._index_by_id[task_id]].append(
                    TaskStepResult(step, good, attempts)
                )

    def is_known(self, step: int) -> bool:
        """Whether the records that determine the tasks of the step are read."""
        return step - 1 - self._lag <= self._last_step

    def of_step(self, step: int) -> list[Task]:
        """The tasks of a step. Raises ValueError if the records do not determine them yet."""
        return [self.tasks[place] for place in self.order(step)[: self._groups]]

    def attempts_of_step(self, step: int) -> dict[str, int]:
        """Task id -> number of attempts, for the tasks of a step. Empty if all have the same
        number."""
        if self._section.attempts is None:
            return {}

        places = self.order(step)[: self._groups]
        numbers = divide_attempts(
            [1 - self._success_rate(place, step) for place in places],
            self._group_size * len(places),
            *self._section.attempts,
        )
        return {self.tasks[place].id: number for place, number in zip(places, numbers, strict=True)}

    def order(self, step: int) -> list[int]:
        """All tasks by their number, in the order in which the step would play them."""
        if not self.is_known(step):
            raise ValueError(f"the tasks of step {step} are not decided: learn() comes first")

        if step not in self._order_cache:
            state = [self._weigh(index, step) for index in range(len(self.tasks))]
            draws = np.random.RandomState(
                derive_seed(self._seed, "curriculum", step) % 2**32
            ).random_sample(len(self.tasks))
            keys = []
            for index, (weight, is_retired) in enumerate(state):
                parent = self._parents[index]
                is_locked = parent is not None and not state[self._index_by_id[str(parent)]][1]
                rank = 2 if is_locked else 1 if is_retired else 0
                key = -math.log(max(float(draws[index]), 1e-300)) / weight
                keys.append((rank, key, index))

            # no caller asks for an earlier step again
            self._order_cache = {step: [place for _, _, place in sorted(keys)]}

        return self._order_cache[step]

    def standing(self) -> list[bool]:
        """Whether each task is retired after all committed steps."""
        step = self._last_step + self._lag + 1
        return [self._weigh(index, step)[1] for index in range(len(self.tasks))]

    def metrics(self, step: int) -> dict[str, float]:
        """The state of the tasks when the step's tasks were chosen."""
        state = [self._weigh(index, step) for index in range(len(self.tasks))]
        retired = [is_retired for _, is_retired in state]
        locked = sum(not retired[self._index_by_id[parent]] for _, parent in self._variant_pairs())
        chosen = self.order(step)[: self._groups]
        numbers = self.attempts_of_step(step).values()
        sizes = (
            {"curriculum/attempts_min": min(numbers), "curriculum/attempts_max": max(numbers)}
            if numbers
            else {}
        )

        return sizes | {
            "curriculum/retired": float(sum(retired)),
            "curriculum/locked": float(locked),
            "curriculum/untried": float(
                sum(not self._results_before(index, step) for index in range(len(self.tasks)))
            ),
            "curriculum/weight": sum(state[place][0] for place in chosen) / len(chosen),
        }

    def _results_before(self, place: int, step: int) -> list[TaskStepResult]:
        """The known results of a task when the step's tasks were chosen."""
        return [tried for tried in self._history[place] if tried.step <= step - 1 - self._lag]

    def _success_rate(self, place: int, step: int) -> float:
        """The estimate of a task's success rate when the step's tasks were chosen."""
        newest = self._results_before(place, step)[-self._section.window :]
        solved = sum(tried.solved for tried in newest)
        attempts = sum(tried.attempts for tried in newest)
        return (solved + 1) / (attempts + 2)

    def _weigh(self, place: int, step: int) -> tuple[float, bool]:
        """A task's weight, and whether it is retired."""
        section = self._section
        before = self._results_before(place, step)
        p = self._success_rate(place, step)
        last = before[-section.retire_after :] if section.retire_after else []
        is_retired = len(last) == section.retire_after > 0 and all(
            tried.solved == tried.attempts for tried in last
        )
        return max(4 * p * (1 - p), section.floor), is_retired


def divide_attempts(shares: Sequence[float], total: int, least: int, most: int) -> list[int]:
    """Divides `total` attempts among tasks in proportion to their shares (above 0), each at least
    `least` and at most `most`.

    Each task has `least`, and each further attempt goes to the task with the largest share / (n +
    1) among those with n < `most` attempts (D'Hondt's rule), the first one of several.
    """
    numbers = [least] * len(shares)
    for _ in range(total - least * len(shares)):
        place = max(
            (place for place, number in enumerate(numbers) if number < most),
            key=lambda place: shares[place] / (numbers[place] + 1),
        )
        numbers[place] += 1

    return numbers
