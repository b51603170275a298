"""The tasks that a run with a curriculum leaves: the retired tasks, and the tasks that it solves
only sometimes. The next tasks are made from both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentevo.agents.tools.state_checks import SOLVED_BY_CALLS
from agentevo.errors import ConfigError
from agentevo.rollout.curriculum import TaskCurriculum
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder.run_folder import check_run_folder, read_store, run_config
from agentevo_evolve.task_making.documents import PASSAGE
from agentevo_evolve.task_making.files import made_rows
from agentevo_evolve.task_making.scenario import CONTENT, PARENT


class RemainingQuestions(NamedTuple):
    """The questions about documents that a run leaves."""

    solved: list[dict[str, Any]]
    """The rows of retired tasks."""
    unsolved: list[dict[str, Any]]
    asked_questions: set[str]
    """The questions of all rows, trained on or held out."""


def remaining_questions(run: Path) -> RemainingQuestions:
    """The questions that a run leaves. Raises ConfigError like `remaining_rows`."""
    solved, unsolved = remaining_rows(run, (PASSAGE, CONTENT))
    held_out = made_rows(run_config(run).tasks.eval, (PASSAGE, CONTENT))
    asked_questions = {str(row["query"]) for row in [*solved, *unsolved, *held_out]}
    return RemainingQuestions(solved, unsolved, asked_questions)


def remaining_rows(
    run: Path, keys: Iterable[str] = (SOLVED_BY_CALLS, CONTENT)
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the run's retired tasks, and those of its other tasks, which no longer wait for a
    retired parent. `keys`: the keys that every generated row has. Raises ConfigError for a run
    without a curriculum, and for tasks that were not generated."""
    config = run_config(check_run_folder(run))
    if config.tasks.curriculum is None:
        raise ConfigError(f"{run} was trained without tasks.curriculum, so it has no retired tasks")

    rows = {str(row["id"]): row for row in made_rows(config.tasks.train, keys)}
    curriculum = TaskSource(config, None).curriculum
    assert curriculum is not None

    read_store(run, curriculum.learn)
    retired = retired_ids(curriculum)
    return (
        [rows[name] for name in rows if name in retired],
        [
            without_parent(row) if row.get(PARENT) in retired else row
            for name, row in rows.items()
            if name not in retired
        ],
    )


def retired_ids(curriculum: TaskCurriculum) -> set[str]:
    """The ids of the tasks that are retired after all committed results."""
    state = curriculum.standing()
    return {task.id for task, is_retired in zip(curriculum.tasks, state, strict=True) if is_retired}


def without_parent(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the reference to its parent, so that the task does not wait for the
    parent."""
    return {key: value for key, value in row.items() if key != PARENT}
