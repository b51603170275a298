"""Training by stages (`tasks.stages`): the stage of a step, and the tasks of a stage. If a stage
ends by the success of its steps, the success comes from the committed steps' records
(`train/success`). There is no other state, so a resumed run and the other processes of the run find
the same stages. Samplers are `lag` steps ahead and must know the stage of a step before the step is
trained on. So if the success at step t is high enough, the stage ends with step t + lag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agentevo.config.tasks import TaskStage
from agentevo.errors import ConfigError
from agentevo.runtime.retry import with_retries
from agentevo.store.store import Store
from agentevo.types import Task

SUCCESS_METRIC = "train/success"
MAX_SHOWN = 8
"""The maximum number of values in a message."""


class TaskStages:
    """The stages of a run, in order."""

    def __init__(self, stages: Sequence[TaskStage], *, lag: int) -> None:
        """`lag`: how many steps in advance tasks are chosen."""
        self.stages = tuple(stages)
        self._lag = lag
        self._by_success = any(stage.until_success is not None for stage in stages)
        self._success: dict[int, float | None] = {}
        """The success of each committed step; None if no attempt was completed."""
        self._first_steps = [1]
        """The first steps of the stages whose start is known."""
        self._num_checked = 0
        """The number of steps that were checked for the end of the last of these stages."""

    async def learn(self, store: Store) -> None:
        """Reads the steps that were committed since the last call, if a stage depends on them."""
        if not self._by_success:
            return

        records = await with_retries(
            lambda: store.steps(after=len(self._success)),
            what="reading the success of the steps",
        )
        for record in records:
            # a sampler in the trainer's process calls learn() too
            if record.step not in self._success:
                self.note_step(record.step, record.record["metrics"].get(SUCCESS_METRIC))

    def note_step(self, step: int, success: float | None) -> None:
        """Records the results of a committed step. Steps must come in order."""
        if step != len(self._success) + 1:
            raise ValueError(f"step {step} is reported after step {len(self._success)}")
        self._success[step] = success

    def is_known(self, step: int) -> bool:
        """Whether the records that determine the stage of the step are read."""
        return not self._by_success or step - 1 - self._lag <= len(self._success)

    def begins(self, step: int) -> list[int]:
        """The first steps of the stages up to the step's own stage, in order. Raises ValueError if
        the records do not determine them yet."""
        if not self.is_known(step):
            raise ValueError(f"the stage of step {step} is not decided yet: learn() comes first")

        while len(self._first_steps) < len(self.stages) and self._first_steps[-1] <= step:
            last = self._last_step(self.stages[len(self._first_steps) - 1], self._first_steps[-1])
            if last is None or last >= step:
                break
            self._first_steps.append(last + 1)
            self._num_checked = last

        return [first for first in self._first_steps if first <= step]

    def name_at(self, step: int) -> str:
        """The name of the step's stage. Empty if there are no stages."""
        return self.stages[len(self.begins(step)) - 1].name if self.stages else ""

    def _last_step(self, stage: TaskStage, begin: int) -> int | None:
        """The last step of a stage that began at that step. None while it is not known."""
        if stage.until_success is not None:
            enough = begin + stage.success_window - 1
            for step in range(max(enough, self._num_checked + 1), len(self._success) + 1):
                if stage.until_step is not None and step + self._lag >= stage.until_step:
                    break

                window = [
                    self._success[t] for t in range(step - stage.success_window + 1, step + 1)
                ]
                rates = [rate for rate in window if rate is not None]
                if len(rates) == len(window) and fmean(rates) >= stage.until_success:
                    return step + self._lag

                self._num_checked = step

        return stage.until_step


def of_stage(stage: TaskStage, tasks: Sequence[Task], sources: Mapping[str, str]) -> list[Task]:
    """The tasks that belong to a stage. `sources`: the source of each task, by its id."""
    return [
        task
        for task in tasks
        if (not stage.sources or sources.get(task.id) in stage.sources)
        and all(_meets(value_of(task, key), condition) for key, condition in stage.where.items())
    ]


def check_stage(stage: TaskStage, count: int, tasks: Sequence[Task], at_least: int) -> None:
    """Raises ConfigError if a stage has too few tasks for a step."""
    if count >= at_least:
        return

    what = f" (where {stage.in_words})" if stage.in_words else ""
    if count:
        raise ConfigError(
            f"tasks.stages: the stage {stage.name!r}{what} has {count} of {len(tasks)} tasks, and "
            f"a step needs trainer.groups_per_step={at_least}: give it more tasks, or set fewer "
            "groups"
        )

    hints = [_values_in_words(key, tasks) for key in stage.where]
    raise ConfigError(
        f"tasks.stages: no task to train on is of the stage {stage.name!r}{what}"
        + "".join(f"; {hint}" for hint in hints)
    )


def value_of(task: Task, key: str) -> Any:
    """The value of a key in a task's metadata, or in a mapping inside it. None if the task lacks
    the key."""
    if key in task.metadata:
        return task.metadata[key]
    if key == "scorer":
        return task.scorer

    value: Any = task.metadata
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _meets(value: Any, condition: Any) -> bool:
    if isinstance(condition, Mapping):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        least = condition.get("min")
        most = condition.get("max")
        return (least is None or value >= least) and (most is None or value <= most)

    if isinstance(condition, (list, tuple)):
        return any(_meets(value, choice) for choice in condition)

    return isinstance(value, bool) == isinstance(condition, bool) and bool(value == condition)


def _values_in_words(key: str, tasks: Sequence[Task]) -> str:
    values = Counter(repr(value) for task in tasks if (value := value_of(task, key)) is not None)
    if not values:
        keys = sorted({key for task in tasks for key in task.metadata})
        return f"no task has the key {key!r}, they have {', '.join(keys[:MAX_SHOWN]) or 'none'}"
    most = [value[:60] for value, _ in values.most_common(MAX_SHOWN)]
    suffix = f" and {len(values) - MAX_SHOWN} others" if len(values) > MAX_SHOWN else ""
    return f"{key!r} is {', '.join(sorted(most))}{suffix}"
