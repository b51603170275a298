"""Scores stored attempts again with other rewards, without playing.

An attempt whose play failed stays failed. An attempt that failed because it could not be scored,
for example because a judge was unreachable, is scored now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentevo.config import RunConfig, build_config
from agentevo.errors import ConfigError
from agentevo.inference.remote_models import RemoteModels
from agentevo.inference.remote_models.model import check_keys
from agentevo.rollout.failures import FirstFailures, failure_kind
from agentevo.rollout.scoring import Scoring
from agentevo.runs.evaluation.play import PlaySettings, check_engine, line_of, run_folder
from agentevo.runs.evaluation.results import AttemptLine, ResultsFolder
from agentevo.runs.evaluation.summary import parts_of_tasks, summarise
from agentevo.runtime.event_loop import run_coroutine
from agentevo.runtime.progress import over
from agentevo.types import Task, Trajectory
from agentevo.types.images import images_of_trajectory

PRICE_LOGS = "remote_models"
_AGENT_REWARD = "returned"
"""The reward that the agent returned. It is not stored separately from the final reward."""


def score(
    source: Path, overrides: Sequence[str], out: Path | None, note: Callable[[str], None]
) -> dict[str, Any]:
    """Scores the attempts of the folder `source` with the rewards of the overrides
    (`rewards=[...]`), else with the tasks' own scorers, and returns the summary. With `out`, also
    writes a complete new folder. Raises ConfigError."""
    folder = ResultsFolder(source)
    settings = folder.settings()
    tasks = folder.tasks()

    # Scoring needs no environment, so the configuration gets one that every installation has.
    config = build_config({"environment": {"type": "coins"}}, overrides, where="score")
    scoring = _checked_scoring(config, tasks)

    attempts = folder.trajectories()
    if not attempts:
        raise ConfigError(f"{source} has no attempts yet: continue its evaluation (--resume)")
    _check_images(scoring, tasks, attempts.values())

    settings = {
        **settings,
        "rewards": [reward.model_dump(mode="json") for reward in config.rewards],
    }
    with run_folder(config, out) as opened_config:
        if out is None:
            return _score_attempts(opened_config, settings, tasks, attempts, None, note)

        out_folder = ResultsFolder(out)
        out_folder.check_new()
        with out_folder.lock():
            out_folder.check_new()
            out_folder.begin(settings, tasks)
            return _score_attempts(opened_config, settings, tasks, attempts, out_folder, note)


def _checked_scoring(config: RunConfig, tasks: Sequence[Task]) -> Scoring:
    if any(reward.name == _AGENT_REWARD for reward in config.rewards):
        raise ConfigError(
            f"rewards: {_AGENT_REWARD} is the value that the agent returned, which is not stored: "
            "give a reward that scores stored attempts"
        )

    if not config.rewards and not any(task.scorer for task in tasks):
        raise ConfigError("no reward is set: give rewards=[NAME] (`agentevo list rewards`)")

    check_keys(config.remote_models)
    scoring = Scoring(config.rewards, models=config.remote_models)
    scoring.check(tasks, needed=True)
    check_engine(scoring, tasks, has_engine=False)
    return scoring


def _check_images(scoring: Scoring, tasks: Sequence[Task], attempts: Iterable[Trajectory]) -> None:
    """Raises ConfigError if rewards need images of the attempts, which the folder does not have."""
    seen_by_rewards = {task.id for task in tasks if scoring.sees_images(task)}
    for attempt in attempts:
        if attempt.task_id in seen_by_rewards and images_of_trajectory(attempt):
            raise ConfigError(
                f"rewards: the attempts at task {attempt.task_id!r} show images, which the folder "
                "of an evaluation does not keep, and a reward sees images: choose rewards that "
                "score the text alone (`images: 0` for judges), or play again with these rewards"
            )


def _score_attempts(
    config: RunConfig,
    settings: Mapping[str, Any],
    tasks: Sequence[Task],
    attempts: Mapping[tuple[str, str, int], Trajectory],
    out_folder: ResultsFolder | None,
    note: Callable[[str], None],
) -> dict[str, Any]:
    tasks_by_id = {task.id: task for task in tasks}
    play_settings = PlaySettings(
        tasks, settings["attempts"], settings["temperature"], settings.get("sources", {})
    )
    models = RemoteModels(config.remote_models, config.run_dir / PRICE_LOGS)
    scoring = Scoring(config.rewards, show=FirstFailures(note).show, models=models)
    lines_by_model: dict[str, list[AttemptLine]] = {
        label: [] for label in settings["played_models"]
    }

    async def score_groups() -> None:
        groups = groupby(sorted(attempts), key=lambda key: key[:2])
        total = len({key[:2] for key in attempts})
        for (label, task_id), keys in over(groups, "score", total, "groups"):
            group = [_without_scores(attempts[key]) for key in keys]
            task = tasks_by_id[task_id]
            scored = await scoring.score(group, [True] * len(group), {}, task=task)
            lines = [
                await line_of(trajectory, task, label, config, play_settings)
                for trajectory in scored
            ]
            lines_by_model[label] += lines
            if out_folder is not None:
                out_folder.add(lines, scored)

    try:
        run_coroutine(score_groups())
    finally:
        for line in models.account():
            note(line)
        models.close()

    played = {label: lines for label, lines in lines_by_model.items() if lines}
    parts = parts_of_tasks(tasks, settings)
    summary = summarise(played, settings["attempts"], settings, parts)
    if out_folder is not None:
        out_folder.end(summary)

    return summary


def _without_scores(trajectory: Trajectory) -> Trajectory:
    """The attempt as it was before scoring. A failed play stays unchanged."""
    kind = failure_kind(trajectory.error) if trajectory.status == "failed" else ""
    is_played = (
        trajectory.status == "completed" or kind.startswith("scorer_") or kind == "no_reward"
    )
    if not is_played:
        return trajectory
    return replace(
        trajectory, status="completed", error=None, reward=0.0, reward_parts={}, success=False
    )
