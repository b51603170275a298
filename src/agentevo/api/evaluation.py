"""`agentevo.evaluate`: the Python interface of `agentevo eval`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.api import checked_tasks
from agentevo.config.rewards import Reward, reward_entry
from agentevo.errors import ConfigError, shown
from agentevo.runtime.extras import training_packages
from agentevo.types import Task

if TYPE_CHECKING:
    from agentevo.api.run import Run


def evaluate(  # noqa: PLR0913 (the options of `agentevo eval`)
    target: str | Path | Run,
    *,
    against: Sequence[str | Path] = (),
    tasks: Sequence[Task | Mapping[str, Any]] | Sequence[str] | str | Path | None = None,
    attempts: int = 1,
    checkpoint: str = "",
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    by: Sequence[str] | str = (),
    rewards: Sequence[Reward] = (),
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Evaluates a model on tasks and returns the contents of `summary.json`.

    `target` and `against` are targets of `agentevo eval` (a recipe, RUN, RUN@STEP, a model, a name
    of `remote_models`, URL#MODEL) or a `Run`. `tasks` are files, or a list of tasks or rows; None
    uses the target's held-out tasks. The other arguments are the command's options. `note` receives
    the command's messages.

    Raises `ConfigError` for invalid input, before anything is created. Raises
    `AttemptsFailedError` if every attempt of a model failed, after all results are written.
    """
    with training_packages("an evaluation"):
        from agentevo.runs.evaluation.evaluate import EvaluationRun, check_attempts
        from agentevo.runs.evaluation.evaluate import evaluate as measured

    files, given_tasks = _tasks(tasks)
    sampling = {"top_p": top_p, "max_new_tokens": max_new_tokens}
    named = [reward_entry(reward) for reward in rewards]
    summary = measured(
        EvaluationRun(
            target=_word(target),
            against=[_word(word) for word in against],
            overrides=[*overrides, *([f"rewards={json.dumps(named)}"] if named else [])],
            tasks=files,
            given_tasks=given_tasks,
            limit=limit,
            attempts=attempts,
            checkpoint=checkpoint,
            temperature=temperature,
            sampling={name: value for name, value in sampling.items() if value is not None},
            by=[by] if isinstance(by, str) else list(by),
            out=None if out is None else Path(out),
            resume=resume or retry_failed,
            retry_failed=retry_failed,
        ),
        note,
    )
    check_attempts(summary)

    return summary


def _word(target: Any) -> str:
    if isinstance(target, (str, Path)):
        return str(target)

    folder = getattr(target, "dir", None)
    if isinstance(folder, Path):
        return str(folder)

    raise ConfigError(
        f"agentevo.evaluate: {shown(target)}: give a recipe, the folder of a run or a model, a "
        "name, URL#MODEL, or the run that agentevo.train returned"
    )


def _tasks(tasks: Any) -> tuple[list[str], list[Task]]:
    """(files, tasks)."""
    if tasks is None:
        return [], []
    if isinstance(tasks, (str, Path)):
        return [str(tasks)], []

    if not isinstance(tasks, Sequence) or isinstance(tasks, bytes):
        raise ConfigError(
            f"agentevo.evaluate: tasks is {shown(tasks)}: give a file, a list of files, or a list "
            "of tasks"
        )

    if tasks and all(isinstance(item, (str, Path)) for item in tasks):
        return [str(item) for item in tasks], []
    if not all(isinstance(item, (Task, Mapping)) for item in tasks):
        raise ConfigError("agentevo.evaluate: tasks: give tasks, or rows as mappings, or files")

    return [], checked_tasks(tasks, None) or []
