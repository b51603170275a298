"""The summary of a run that has ended, for people and tables."""

from __future__ import annotations

from typing import Any

from agentevo.runs.folder.creation import RunCommand
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.components import Components
from agentevo.runs.orchestration.evaluation import failed_share, headline
from agentevo.runs.orchestration.progress import RunProgress
from agentevo.types import Baselines


def summary_of(
    parts: Components,
    source: BatchSource,
    progress: RunProgress,
    *,
    command: RunCommand,
    players: Baselines | None,
    wall_s: float,
    best: dict[str, float | None],
    profile: dict[str, Any],
) -> dict[str, Any]:
    """The contents of summary.json. `best`: step and value of the best checkpoint. `profile`: what
    Profiling measured."""
    config = parts.config
    plays = parts.plays

    def success(metrics: dict[str, float]) -> float | None:
        return headline(metrics) if plays and metrics else None

    return {
        "name": config.run.name,
        "command": command,
        "model": config.model.name,
        "environment": config.environment.type if config.environment is not None else None,
        "seed": config.run.seed,
        "eval": {
            "before": success(progress.before),
            "after": success(progress.after),
            "n": len(parts.tasks.held_out()) if plays else None,
            "cold_start_before": success(progress.cold_start_before),
            "random": players.random if players is not None else None,
            "optimal": players.optimal if players is not None else None,
            "sampled": {
                "before": _sampled_success(progress.before),
                "after": _sampled_success(progress.after),
            },
            "failed": {
                "before": failed_share(progress.before),
                "after": failed_share(progress.after),
            },
        },
        **source.summary(progress.before, progress.after),
        "wall_s": wall_s,
        "steps": progress.step,
        "planned_steps": source.num_steps,
        "stopped_early": progress.early_stop(config.evaluation.stop_after)
        if progress.step < source.num_steps
        else None,
        "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
        "best": best,
        "profile": profile,
        "remote_models": parts.sampler.remote_models.summary() if plays else {},
        "warnings": [*source.warnings(), *progress.warnings],
    }


def _sampled_success(metrics: dict[str, float]) -> float | None:
    """Success of the sampled attempts, from an evaluation's metrics."""
    return next((value for key, value in metrics.items() if key.endswith("/success/sampled")), None)
