"""The recipe's key `tasks.stages`: the order in which tasks are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from agentevo.runtime.section import Section, Texts

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig

BOUNDS = ("min", "max")


class TaskStage(Section):
    """A stage of training: which of the tasks it trains on, and until when."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")
    """Name of the stage in metrics and tables."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Conditions on a task's metadata: key -> a value, a list of values, or {min: 1, max: 3}, with
    at least one of the two. `extra_info.level` is a nested key; `scorer` is the task's scorer.
    Empty: every task."""
    sources: Texts = ()
    """Sources of `tasks.train`, written as in that key, and of `tasks.eval`, whose tasks are
    reported for the stage. Empty: all sources."""
    until_step: int | None = Field(default=None, ge=1)
    """The latest training step at which the stage ends."""
    until_success: float | None = Field(default=None, gt=0, le=1)
    """The stage ends when the success rate of its attempts, as a mean over success_window of its
    steps, reaches this value."""
    success_window: int = Field(default=5, ge=1)
    """Number of steps in the mean for until_success."""

    @field_validator("where")
    @classmethod
    def _is_a_condition(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, condition in value.items():
            if problem := _condition_problem(condition):
                raise ValueError(f"{key}: {problem}")
        return value

    @property
    def in_words(self) -> str:
        """The condition on its tasks as readable text; empty for all tasks."""
        parts = [f"{key} {_in_words(condition)}" for key, condition in self.where.items()]
        parts += [f"from {', '.join(self.sources)}"] if self.sources else []
        return " and ".join(parts)


def _condition_problem(condition: object) -> str:
    if isinstance(condition, Mapping):
        numbers = [value for value in condition.values() if not isinstance(value, bool)]
        if not condition or any(key not in BOUNDS for key in condition):
            return f"got {dict(condition)!r}; a range is written {{min: 1, max: 3}}"
        if len(numbers) < len(condition) or not all(
            isinstance(number, (int, float)) for number in numbers
        ):
            return f"got {dict(condition)!r}; min and max are numbers"
        if len(condition) == len(BOUNDS) and condition["min"] > condition["max"]:
            return f"min {condition['min']} is above max {condition['max']}: exchange them"

        return ""

    values = condition if isinstance(condition, (list, tuple)) else [condition]
    if not values or not all(isinstance(value, (str, int, float)) for value in values):
        return f"got {condition!r}; needs a value, a list of values, or {{min: 1, max: 3}}"

    return ""


def _in_words(condition: Any) -> str:
    if isinstance(condition, Mapping):
        least, most = (condition.get(bound) for bound in BOUNDS)
        if least is None or most is None:
            return f"at least {least}" if most is None else f"at most {most}"
        return f"from {least} to {most}"
    return (
        f"one of {', '.join(map(repr, condition))}"
        if isinstance(condition, list)
        else repr(condition)
    )


def stage_problem(
    stages: Sequence[TaskStage], train: Sequence[str], held_out: Sequence[str]
) -> str:
    """What is wrong with these stages of those sources; empty if nothing is."""
    names = [stage.name for stage in stages]
    for index, stage in enumerate(stages):
        place = f"stages[{index}]"
        ends = stage.until_step is not None or stage.until_success is not None
        unknown = [source for source in stage.sources if source not in (*train, *held_out)]

        if names.index(stage.name) < index:
            return f"{place}.name: {stage.name} is the name of another stage: give it its own"
        if unknown:
            return f"{place}.sources: {unknown[0]} is not a source of train: {', '.join(train)}"
        if stage.sources and not set(stage.sources) & set(train):
            return f"{place}.sources: none is a source of train: {', '.join(train)}"

        if index == len(stages) - 1 and ends:
            return (
                f"{place}: the last stage lasts to the end of the run: remove until_step and "
                "until_success, or add a stage after it"
            )

        if index < len(stages) - 1 and not ends:
            return f"{place}: the stage has no end: give until_step or until_success"

        earlier = [previous.until_step for previous in stages[:index]]
        if stage.until_step is not None and None in earlier:
            return (
                f"{place}.until_step: an earlier stage has none, and could last longer: give "
                "until_step to each earlier stage"
            )

        if stage.until_step is not None and earlier and stage.until_step <= (earlier[-1] or 0):
            return f"{place}.until_step: {stage.until_step} is not after {earlier[-1]}"

    return ""


def stage_contradictions(config: RunConfig) -> list[str]:
    """Contradictions with other sections, as 'what: remedy'."""
    by_success = any(stage.until_success is not None for stage in config.tasks.stages)
    if by_success and config.rollout.policy != "wait":
        return [
            "tasks.stages: until_success chooses the tasks of a step by the results of earlier "
            f"steps, and rollout.policy={config.rollout.policy} queues tasks independently of "
            "steps: set rollout.policy=wait, or give until_step instead"
        ]

    return []
