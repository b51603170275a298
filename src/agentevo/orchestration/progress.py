"""What a run has come to so far, and the summary of it that people and tables read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from agentevo.orchestration.evaluation import headline
from agentevo.runs.summary import sampled_success

if TYPE_CHECKING:
    from agentevo.orchestration.run import TrainingRun


class Progress(msgspec.Struct):
    """Saved with every step and every checkpoint (with a step: only the warnings since the one
    before, or a long run's records would grow with every step)."""

    step: int = 0
    """Committed steps."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    wall_s: float = 0.0
    """Training and evaluation so far, pauses left out."""
    begun: bool = False
    """Whether the evaluation before the first step is done."""
    before: dict[str, float] = {}
    """Evaluation after any cold start, before the first step."""
    after: dict[str, float] = {}
    """The newest evaluation."""
    cold_start_before: dict[str, float] = {}
    """Evaluation before the cold start, if there was one."""
    warnings: list[str] = []


def summary_of(run: TrainingRun) -> dict[str, Any]:
    """The contents of summary.json."""
    config, progress, players, plays = (
        run.parts.config,
        run.progress,
        run.players,
        run.parts.plays,
    )

    def success(metrics: dict[str, float]) -> float | None:
        return headline(metrics) if plays and metrics else None

    return {
        "name": config.run.name,
        "command": run.command,
        "model": config.model.name,
        "environment": config.environment.type if config.environment is not None else None,
        "seed": config.run.seed,
        "eval": {
            "before": success(progress.before),
            "after": success(progress.after),
            "n": len(run.parts.tasks.held_out()) if plays else None,
            "cold_start_before": success(progress.cold_start_before),
            "random": players.random if players is not None else None,
            "optimal": players.optimal if players is not None else None,
            "sampled": {
                "before": sampled_success(progress.before),
                "after": sampled_success(progress.after),
            },
        },
        **run.source.summary(progress.before, progress.after),
        "wall_s": run.wall_s(),
        "steps": progress.step,
        "planned_steps": run.source.num_steps,
        "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
        "best": {"step": run.checkpoints.best_step, "value": run.checkpoints.best_value},
        "profile": run.profiling.summary,
        "warnings": [*run.source.warnings(), *progress.warnings],
    }
