"""The recipe's key `tasks`: questions from files or datasets, for agents without an environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, model_validator

from agentevo.config.agents import brings_tasks
from agentevo.config.curriculum import Curriculum
from agentevo.config.self_play import SelfPlay
from agentevo.config.task_stages import TaskStage, stage_problem
from agentevo.runtime.section import Section, Texts


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

        if self.curriculum is not None and not self.train:
            raise ValueError("curriculum chooses among the tasks of train: give train")
        if problem := stage_problem(self.stages, self.train, self.eval):
            raise ValueError(problem)

        return self

    def _checked_self_play(self) -> TasksSection:
        conflicts = [key for key in ("train", "weights", "stages") if getattr(self, key)]
        conflicts += ["curriculum"] * (self.curriculum is not None)
        if conflicts:
            raise ValueError(
                f"self_play and {conflicts[0]} both choose the tasks of a step: remove one of them"
            )

        if not self.eval:
            raise ValueError(
                "self_play needs held-out tasks, which measure what the solver learns: give eval"
            )

        return self


def with_absolute_paths(section: Any, keys: Sequence[str], folder: Path) -> Any:
    """A section as written in a recipe in `folder`, with absolute paths for the files and folders
    under `keys`, so that every process of a run finds them: next to the recipe, else in the current
    folder. A value that is in neither is not changed, such as a dataset of the hub."""
    if not isinstance(section, dict):
        return section

    def absolute(source: object) -> object:
        if not isinstance(source, (str, Path)) or not str(source):
            return source
        for base in (folder, Path.cwd()):
            path = os.path.join(base, os.path.expanduser(source))
            if os.path.exists(path):  # pathlib's raises for what can be no path
                return os.path.realpath(path)
        return str(source)

    changed = dict(section)
    for key in keys:
        value = changed.get(key)
        if isinstance(value, (str, Path)):
            changed[key] = absolute(value)
        elif isinstance(value, (list, tuple)):
            changed[key] = [absolute(source) for source in value]

    stages = changed.get("stages")
    if isinstance(stages, (list, tuple)):  # these refer to the sources of `train`
        changed["stages"] = [with_absolute_paths(stage, ("sources",), folder) for stage in stages]

    return changed


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
