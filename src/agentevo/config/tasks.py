"""The recipe's key `tasks`: questions from files or datasets, for agents without an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat, field_validator, model_validator

from agentevo.config.agents import brings_tasks
from agentevo.config.self_play import SelfPlay
from agentevo.runtime.section import Section, Texts

if TYPE_CHECKING:
    from agentevo.config.recipe import RunConfig


class Curriculum(Section):
    """Samples mostly tasks at the edge of the agent's ability. A task has weight 4 p (1 - p), the
    variance of its success in units of the largest variance: 1 for a task that half of its attempts
    solve. p is (s + 1) / (n + 2) for s successes in n attempts, so an untried task has weight 1."""

    window: int = Field(default=2, ge=1)
    """A task's successes and attempts are those of this many newest steps that played it."""
    retire_after: int = Field(default=2, ge=0)
    """A task retires when all its attempts succeed in this many of its steps in a row. A step plays
    retired tasks only if the others do not fill it. 0 retires none."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """The smallest weight of a task that is not retired. It sets how often tasks return that were
    always or never solved."""
    attempts: tuple[int, int] | None = None
    """Smallest and largest number of attempts at a task. A step's attempts, trainer.group_size per
    task on average, are divided in proportion to 1 - p: hard tasks get more, easy ones fewer (DART,
    arXiv 2509.23866). Default: trainer.group_size for every task."""


def curriculum_contradictions(config: RunConfig) -> list[str]:
    """Contradictions with other sections, as 'what: remedy'."""
    problems = []
    if config.tasks.from_environment is not None and config.environment is None:
        problems.append(
            f"tasks.from_environment={config.tasks.from_environment} is for tasks of an "
            "environment, and this recipe has none: give environment.type, or remove it"
        )

    if config.tasks.curriculum is not None and config.rollout.policy != "wait":
        problems.append(
            "tasks.curriculum chooses a step's tasks by the results of earlier steps, but "
            f"rollout.policy={config.rollout.policy} queues tasks without regard to steps: set "
            "rollout.policy=wait, or leave out tasks.curriculum"
        )

    attempts = None if config.tasks.curriculum is None else config.tasks.curriculum.attempts
    size = config.trainer.group_size
    least = 2 if config.algorithm.within_group else 1
    if attempts is not None and not least <= attempts[0] <= size <= attempts[1]:
        problems.append(
            f"tasks.curriculum.attempts={list(attempts)} must be a minimum of {least} or more and "
            f"a maximum, with their mean trainer.group_size={size} between them: set "
            f"attempts=[{max(least, size // 2)},{2 * size}], say"
        )

    return problems


def smallest_group(config: RunConfig) -> int:
    """The smallest number of attempts that are started at a task."""
    curriculum = config.tasks.curriculum
    attempts = None if curriculum is None else curriculum.attempts
    return config.trainer.group_size if attempts is None else attempts[0]


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


class TaskFields(Section):
    """The keys of a row that hold a task's fields. Every row must have a key that is named here;
    default keys are optional."""

    query: str | None = None
    """Key of the question. Default: the row's first key among query, question, prompt, problem,
    instruction. A list of chat messages is a conversation that the agent continues."""
    answer: str | None = None
    """Key of the correct answer, for rewards: any value, or a list of several correct ones.
    Default: the row's first key among answer, solution, target, ground_truth."""
    id: str | None = None
    """Key of the task's unique name. Default: id or task_id. A row without one is named by its
    content."""
    scorer: str | None = None
    """Key of the name of the reward for this task, which replaces the recipe's `rewards`. Default:
    scorer."""


class TasksSection(Section):
    """Tasks from files: .jsonl, .json, .csv (also .gz), .parquet, folders of them, saved datasets,
    or datasets of the Hugging Face hub written ORG/NAME or ORG/NAME:SPLIT. `tasks: FILE` is short
    for tasks.train. The other keys of a row are the task's metadata. Paths are searched next to the
    recipe, then in the current folder."""

    train: Texts = ()
    """Tasks to train on."""
    eval: Texts = ()
    """Held-out tasks; the first evaluation.tasks of them are used. Default: the last
    evaluation.tasks tasks of `train`, at most a fifth of all."""
    weights: tuple[PositiveFloat, ...] = ()
    """Mixture weights: for each source of `train`, the relative number of its tasks that are played
    (2 and 1: twice as many of the first). Needs `eval`. Default: every task equally often."""
    stages: tuple[TaskStage, ...] = ()
    """Training in stages, such as easy tasks first: a list of stages, each with `name`; `where`
    (conditions on a task's metadata: `{difficulty: 1}`, `{level: [easy, medium]}`, `{difficulty:
    {min: 2, max: 4}}`) or `sources` (of `train` and `eval`); `until_step` or `until_success` (the
    success rate, as a mean over `success_window` steps, 5), except in the last stage. Needs `eval`,
    whose tasks are reported for each stage. Default: every task from the first step."""
    from_environment: int | None = Field(default=None, ge=2)
    """With an environment: training returns to this many of its tasks, in rounds, as if they were
    given in `train`. Default: new tasks in every step."""
    curriculum: Curriculum | None = None
    """Curriculum: each step chooses its tasks by their success rates so far. Tasks with a success
    rate near one half are played most often, and solved tasks are retired. A task with the key
    `variant_of` (another task's id) waits until that task is retired. `true`, or a section with
    `window`, `retire_after` and `floor`. Default: every task equally often."""
    self_play: SelfPlay | None = None
    """Self-play instead of given tasks: a proposer writes the questions that a solver trains on.
    The name of a question family, or a section with `family`, `options`, `group_size`, `reward`,
    `repetition` and `invalid`. Needs `eval`, whose questions are never trained on. Default:
    none."""
    fields: TaskFields = TaskFields()
    """The keys of a row that hold a task's fields."""
    allow_bad_rows: bool = True
    """Skip rows that are not valid tasks, and report them (bad_rows.jsonl). false refuses the
    file."""

    @property
    def given(self) -> bool:
        return bool(self.train) or self.self_play is not None

    @model_validator(mode="after")
    def _held_out_of_something(self) -> TasksSection:
        if self.self_play is not None:
            return self._checked_self_play()
        if self.eval and not self.train:
            raise ValueError("eval is given without train: give tasks to train on")

        if self.weights and len(self.weights) != len(self.train):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {len(self.train)} sources of train: "
                "give one for each"
            )

        if self.weights and not self.eval:
            raise ValueError(
                "weights mixes sources, so the held-out tasks must be given: give eval"
            )

        if self.stages and not (self.train and self.eval):
            missing = "eval" if self.train else "train and eval"
            raise ValueError(
                "stages choose among the tasks of train, and those of eval are reported for each "
                f"stage: give {missing}"
            )

        if self.curriculum is not None and (self.stages or self.weights):
            conflict = "stages" if self.stages else "weights"
            raise ValueError(
                f"curriculum and {conflict} both choose the tasks of a step: remove one of them"
            )

        if self.train and self.from_environment is not None:
            raise ValueError("train and from_environment both give tasks: remove one of them")
        if self.curriculum is not None and not (self.train or self.from_environment):
            raise ValueError(
                "curriculum chooses among the tasks of train: give train (or from_environment, "
                "with an environment)"
            )
        if problem := stage_problem(self.stages, self.train, self.eval):
            raise ValueError(problem)

        return self

    def _checked_self_play(self) -> TasksSection:
        conflicts = [key for key in ("train", "weights", "stages") if getattr(self, key)]
        conflicts += ["curriculum"] * (self.curriculum is not None)
        conflicts += ["from_environment"] * (self.from_environment is not None)
        if conflicts:
            raise ValueError(
                f"self_play and {conflicts[0]} both choose the tasks of a step: remove one of them"
            )

        if not self.eval:
            raise ValueError(
                "self_play needs held-out tasks, which measure what the solver learns: give eval"
            )

        return self


def names_tasks(section: Any) -> bool:
    """Whether a section `tasks`, as written, gives tasks or self-play."""
    return isinstance(section, dict) and bool(section.get("train") or section.get("self_play"))


def play_problems(
    tree: dict[str, Any], needs_environment: bool, environments: list[str]
) -> list[str]:
    """The problems of a recipe's environment and tasks: it must have exactly one of them."""
    section = tree.get("tasks")
    agent = tree.get("agent")

    has_tasks = names_tasks(section)
    has_environment = tree.get("environment") is not None
    kind = agent.get("type") if isinstance(agent, dict) else getattr(agent, "type", None)
    if isinstance(kind, str) and brings_tasks(kind):
        conflict = "tasks" if has_tasks else "environment" if has_environment else ""
        line = f"{conflict}: agent.type={kind} brings tasks of its own: leave out `{conflict}`"
        return [line] if conflict else []

    if has_tasks and has_environment:
        return [
            "tasks: the environment makes its own tasks: leave out either `tasks` or "
            "`environment`. To play each row as an episode, leave out `environment`, and play "
            "the row in your own agent (docs/environments.md, Episodes from a file)"
        ]

    if has_tasks and kind == "environment":
        return [
            "agent.type: the agent `environment` needs an environment, and this recipe has tasks "
            "instead: set agent.type=single_turn, or your own agent"
        ]

    if has_environment or has_tasks or not needs_environment:
        return []

    names = ", ".join(environments)
    if kind == "environment":
        return [f"environment.type: missing; choose one of {names}"]

    return [
        f"tasks.train: missing; agent.type={kind} needs tasks or an environment: give tasks, or "
        f"environment.type, one of {names}"
    ]
