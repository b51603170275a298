"""The remaining tasks of a run with a curriculum: those that it retired, and those at the edge of
what it solves. The next tasks begin there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentevo.errors import ConfigError
from agentevo.rollout.curriculum import TaskCurriculum
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.folder import check_run_folder, read_store, run_config
from agentevo.task_making.documents import PASSAGE
from agentevo.task_making.files import made_rows
from agentevo.task_making.scenario import CONTENT, PARENT
from agentevo.tools.state_checks import SOLVED_BY_CALLS


class QuestionsLeft(NamedTuple):
    """What a run has left of questions about documents."""

    solved: list[dict[str, Any]]
    """Rows that it retired."""
    unsolved: list[dict[str, Any]]
    asked_questions: set[str]
    """All that it trained on or holds out."""


def questions_left(run: Path) -> QuestionsLeft:
    """Raises ConfigError as `left_by`."""
    solved, unsolved = left_by(run, (PASSAGE, CONTENT))
    held_out = made_rows(run_config(run).tasks.eval, (PASSAGE, CONTENT))
    asked_questions = {str(row["query"]) for row in [*solved, *unsolved, *held_out]}
    return QuestionsLeft(solved, unsolved, asked_questions)


def left_by(
    run: Path, keys: Iterable[str] = (SOLVED_BY_CALLS, CONTENT)
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the tasks that the run retired, and of the others, which no longer wait for a retired
    parent. `keys`: what each generated row has. Raises ConfigError for a run without a curriculum,
    and for tasks that were not generated."""
    config = run_config(check_run_folder(run))
    if config.tasks.curriculum is None:
        raise ConfigError(f"{run}: was trained without tasks.curriculum: nothing is known of tasks")

    rows = {str(row["id"]): row for row in made_rows(config.tasks.train, keys)}
    curriculum = TaskSource(config, None).curriculum
    assert curriculum is not None

    read_store(run, curriculum.learn)
    retired = retired_ids(curriculum)
    return (
        [rows[name] for name in rows if name in retired],
        [
            free(row) if row.get(PARENT) in retired else row
            for name, row in rows.items()
            if name not in retired
        ],
    )


def retired_ids(curriculum: TaskCurriculum) -> set[str]:
    """Of the tasks that are retired when all is known that was committed."""
    state = curriculum.standing()
    return {task.id for task, is_retired in zip(curriculum.tasks, state, strict=True) if is_retired}


def free(row: Mapping[str, Any]) -> dict[str, Any]:
    """A variant of a task that is not played any more, which waits for nothing."""
    return {key: value for key, value in row.items() if key != PARENT}
