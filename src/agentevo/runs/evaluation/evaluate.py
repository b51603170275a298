"""A whole evaluation, from settings to summary: `agentevo eval` with tasks, attempts or several
models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pydantic

from agentevo.config import RunConfig
from agentevo.config.sections import EvaluationSection, SamplingSection
from agentevo.errors import AttemptsFailedError, ConfigError
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.evaluation.contestants import Contestant, find_contestants
from agentevo.runs.evaluation.play import (
    PlaySettings,
    check_play,
    config_for_playing,
    find_tasks,
    play,
)
from agentevo.runs.evaluation.results import AttemptLine, ResultsFolder, task_digest
from agentevo.runs.evaluation.summary import numbers_of, parts_of_tasks, summarise
from agentevo.runs.orchestration.tracking import check_tracking, report_evaluation
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task

MAX_ATTEMPTS = 4096


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """The settings of an evaluation."""

    target: str
    against: Sequence[str] = ()
    overrides: Sequence[str] = ()
    tasks: Sequence[str] = ()
    """Files of tasks. Empty for the target's own held-out tasks."""
    given_tasks: Sequence[Task] = ()
    """Tasks to use instead of files."""
    limit: int | None = None
    """Use only the first N tasks."""
    attempts: int = 1
    checkpoint: str = ""
    temperature: float | None = None
    """None: greedy for a single attempt, evaluation.temperature for several."""
    sampling: Mapping[str, Any] | None = None
    """Overrides of the recipe's section `sampling`."""
    out: Path | None = None
    """The folder for results. None stores no results."""
    resume: bool = False
    by: Sequence[str] = ()
    """Keys of the tasks' metadata. Each of their values gets its own row."""
    retry_failed: bool = False
    """Whether a resumed evaluation plays tasks with failed attempts again."""

    @property
    def words_of_tasks(self) -> Sequence[str]:
        """A name for the tasks that replace the target's. Empty for the target's own tasks."""
        return self.tasks or (("given",) if self.given_tasks else ())


def evaluate(
    what: EvaluationRun,
    note: Callable[[str], None],
    progress: Callable[[str, int, int], None] = lambda label, done, total: None,
    begin: Callable[[Mapping[str, Any]], None] = lambda settings: None,
) -> dict[str, Any]:
    """Plays, and returns the summary. `begin` is called with the settings before the first attempt.
    Raises ConfigError before anything is created. If every attempt of a model failed, raises
    AttemptsFailedError after the results are written."""
    if not 1 <= what.attempts <= MAX_ATTEMPTS:
        raise ConfigError(f"--attempts {what.attempts}: give 1 to {MAX_ATTEMPTS}")
    if (what.resume or what.retry_failed) and what.out is None:
        raise ConfigError(
            "--resume continues the evaluation in a folder: name the folder with --out FOLDER"
        )

    contestants = find_contestants(
        what.target, what.against, what.overrides, what.words_of_tasks, what.checkpoint
    )
    base = contestants[0].config
    check_tracking(base)
    tasks, sources, notes = find_tasks(base, what.tasks, what.limit, what.given_tasks)
    configs = [_played_config(contestant, what) for contestant in contestants]
    has_engine = all(contestant.remote is None for contestant in contestants)
    check_play(configs[0], tasks, has_engine=has_engine)
    game = PlaySettings(tasks, what.attempts, _temperature(what, base), sources, tuple(notes))
    settings = _settings(what, contestants, configs[0], game)
    parts = parts_of_tasks(tasks, settings)

    for line in notes:
        note(line)

    folder = None if what.out is None else ResultsFolder(what.out)
    if folder is not None and not what.resume:
        folder.check_new()

    with nullcontext() if folder is None else folder.lock():
        kept_lines: Mapping[tuple[str, str, int], AttemptLine] = {}
        if folder is not None and what.resume:
            folder.check_and_resume(settings, tasks)
            kept_lines = _kept(folder, what.retry_failed)
        elif folder is not None:
            folder.check_new()
            folder.begin(settings, tasks)

        begin(settings)
        by_model = {}
        for player, config in zip(contestants, configs, strict=True):
            on_progress = partial(progress, player.label)
            played = play(player, config, game, kept_lines, folder, note=note, progress=on_progress)
            by_model[player.label] = run_coroutine(played)

        summary = summarise(by_model, what.attempts, settings, parts)
        summary |= _players(configs[0], tasks, note)
        if folder is not None:
            folder.end(summary)

    place = Path.cwd() if what.out is None else what.out
    report_evaluation(base, numbers_of(summary), folder=place, note=note)
    return summary


def check_attempts(summary: Mapping[str, Any]) -> None:
    """Raises AttemptsFailedError if every attempt of a model failed."""
    for model in summary["models"]:
        if model["failed"] == model["attempts"]:
            raise AttemptsFailedError(f"{model['model']}: {model['failed_words']}")


def _played_config(contestant: Contestant, what: EvaluationRun) -> RunConfig:
    config = config_for_playing(contestant.config, what.words_of_tasks)
    if not what.sampling:
        return config

    try:
        sampling = SamplingSection(**config.sampling.model_dump() | dict(what.sampling))
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"sampling.{key}: {wrong['msg']}") from error

    return config.model_copy(update={"sampling": sampling})


def _temperature(what: EvaluationRun, config: RunConfig) -> float:
    """Greedy for a single attempt. Several greedy attempts would all be the same."""
    if what.temperature is None:
        return 0.0 if what.attempts == 1 else config.evaluation.temperature
    if what.temperature == 0.0 and what.attempts == 1:
        return 0.0

    if what.temperature == 0.0:
        raise ConfigError(
            f"--temperature 0: {what.attempts} greedy attempts at a task are all the same: give a "
            "higher temperature, or --attempts 1"
        )

    try:
        return EvaluationSection(temperature=what.temperature).temperature
    except pydantic.ValidationError as error:
        raise ConfigError(f"--temperature: {error.errors()[0]['msg']}") from error


def _players(
    config: RunConfig, tasks: Sequence[Task], note: Callable[[str], None]
) -> dict[str, Any]:
    """The results of a random and an optimal player on an environment's tasks."""
    from agentevo.runs.orchestration.players import reference_players

    references = reference_players(config, tasks, note)
    if references is None:
        return {}
    return {"players": {"random": references.random, "optimal": references.optimal}}


def _settings(
    what: EvaluationRun, contestants: Sequence[Contestant], config: RunConfig, game: PlaySettings
) -> dict[str, Any]:
    """The settings that a resumed evaluation must repeat, and to which its numbers belong."""
    return {
        "tasks": list(what.words_of_tasks) or "held out",
        "num_tasks": len(game.tasks),
        "tasks_digest": task_digest(game.tasks),
        "sources": dict(game.sources),
        "played_models": {contestant.label: contestant.origin for contestant in contestants},
        "attempts": game.attempts,
        "temperature": game.temperature,
        "sampling": config.sampling.model_dump(mode="json", exclude={"temperature"}),
        "agent": config.agent.model_dump(mode="json"),
        "environment": None
        if config.environment is None
        else config.environment.model_dump(mode="json"),
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
        "seed": config.run.seed,
        **({"by": list(what.by)} if what.by else {}),
        **_stages(contestants[0].config, what),
    }


def _stages(config: RunConfig, what: EvaluationRun) -> dict[str, Any]:
    """The held-out tasks of each of the recipe's stages, by their ids."""
    if what.words_of_tasks or not config.tasks.stages:
        return {}
    of_each = TaskSource(config, None).held_out_by_stage()
    return {"stages": {name: sorted(ids) for name, ids in of_each.items()}}


def _kept(folder: ResultsFolder, retry_failed: bool) -> dict[tuple[str, str, int], AttemptLine]:
    all_lines = folder.attempts()
    if not retry_failed:
        return all_lines
    failed_tasks = {
        (line.model, line.task) for line in all_lines.values() if line.status != "completed"
    }
    return {key: line for key, line in all_lines.items() if key[:2] not in failed_tasks}
