"""Training by stages (`tasks.stages`): the stage of a step, and the tasks of a stage. If a stage
ends by its steps' success, the success is read from the committed steps' records (`train/success`).
There is no other state, so a resumed run and the other processes of the run find the same stages.
Samplers are `lag` steps ahead and must know the stage of a step before it is trained on. So a stage
whose success at step t suffices ends with step t + lag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agentevo.config.task_stages import TaskStage
from agentevo.errors import ConfigError
from agentevo.retry import STORE_RETRY_S, with_retries
from agentevo.store.store import Store
from agentevo.types import Task

SUCCESS = "train/success"
SHOWN = 8
"""Values that a message lists."""


class TaskStages:
    """The stages of a run, in order."""

    def __init__(self, stages: Sequence[TaskStage], *, lag: int) -> None:
        """`lag`: steps whose tasks are chosen before the one that is trained on."""
        self.stages = tuple(stages)
        self._lag = lag
        self._by_success = any(stage.until_success is not None for stage in stages)
        self._success: dict[int, float | None] = {}
        """The success of each committed step; None if no attempt was completed."""
        self._begins = [1]
        """First steps of the stages whose beginning is known."""
        self._looked = 0
        """The number of steps that were checked for the end of the last of them."""

    async def learn(self, store: Store) -> None:
        """Reads the steps that were committed since, if anything depends on them."""
        if not self._by_success:
            return

        records = await with_retries(
            lambda: store.steps(after=len(self._success)),
            within_s=STORE_RETRY_S,
            what="reading the success of the steps",
        )
        for record in records:
            if record.step not in self._success:  # a sampler in the trainer's process asks as well
                self.note_step(record.step, record.record["metrics"].get(SUCCESS))

    def note_step(self, step: int, success: float | None) -> None:
        """Records the results of a committed step, in order of the steps."""
        if step != len(self._success) + 1:
            raise ValueError(f"step {step} is reported after step {len(self._success)}")
        self._success[step] = success

    def is_known(self, step: int) -> bool:
        """Whether the records determine the stage of the step."""
        return not self._by_success or step - 1 - self._lag <= len(self._success)

    def begins(self, step: int) -> list[int]:
        """First steps of the stages up to the step's own, in order. Raises ValueError before that
        is known."""
        if not self.is_known(step):
            raise ValueError(f"the stage of step {step} is not decided yet: learn() comes first")

        while len(self._begins) < len(self.stages) and self._begins[-1] <= step:
            last = self._last_step(self.stages[len(self._begins) - 1], self._begins[-1])
            if last is None or last >= step:
                break
            self._begins.append(last + 1)
            self._looked = last

        return [first for first in self._begins if first <= step]

    def name_at(self, step: int) -> str:
        """The name of the step's stage; empty if there are none."""
        return self.stages[len(self.begins(step)) - 1].name if self.stages else ""

    def _last_step(self, stage: TaskStage, begin: int) -> int | None:
        """The last step of a stage that began at that step; None while that is not known."""
        if stage.until_success is not None:
            enough = begin + stage.success_window - 1
            for step in range(max(enough, self._looked + 1), len(self._success) + 1):
                if stage.until_step is not None and step + self._lag >= stage.until_step:
                    break

                window = [
                    self._success[t] for t in range(step - stage.success_window + 1, step + 1)
                ]
                rates = [rate for rate in window if rate is not None]
                if len(rates) == len(window) and fmean(rates) >= stage.until_success:
                    return step + self._lag

                self._looked = step

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
    """Raises ConfigError for a stage whose tasks do not fill a step."""
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
    """The value of a key in a task's metadata, or in a mapping there; None if it has none."""
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
        return f"no task has the key {key!r}, they have {', '.join(keys[:SHOWN]) or 'none'}"
    most = [value[:60] for value, _ in values.most_common(SHOWN)]
    suffix = f" and {len(values) - SHOWN} others" if len(values) > SHOWN else ""
    return f"{key!r} is {', '.join(sorted(most))}{suffix}"
