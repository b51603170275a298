"""One life of the process that trains: load or resume, run the loop, say what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentevo.config import RunConfig
from agentevo.inference.transports import local_transport
from agentevo.models.adapters import num_parameters
from agentevo.models.attention import prepare
from agentevo.models.load import load_reward_model
from agentevo.observability import LiveView, MetricsLog, report_from_run
from agentevo.orchestration.cold_start import cold_start
from agentevo.orchestration.components import AgentFunction, Components, open_components
from agentevo.orchestration.evaluation import headline, reference_players
from agentevo.orchestration.loop import Loop
from agentevo.orchestration.preference_data import preference_trainer
from agentevo.orchestration.resume import ResumePoint, find_resume_point, replay_steps
from agentevo.orchestration.rollout_sources import (
    ColocatedRollouts,
    DisaggregatedRollouts,
    RolloutSource,
    SynchronousRollouts,
)
from agentevo.runs.summary import sampled_success, write_summary
from agentevo.signals import stop_on_interrupt
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.roles.token_rewards import TokenRewardModel
from agentevo.training.trainer import Trainer
from agentevo.types import Task


async def run_training(
    config: RunConfig,
    view: LiveView,
    *,
    agent: AgentFunction | None = None,
    tasks: Sequence[Task] | None = None,
    resume: bool = False,
    apart: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Trains to the last step or a clean stop, which raises KeyboardInterrupt. The run's folder is
    there, with its config.yaml, and the caller is its `only_trainer`.

    apart: samplers and engines are other processes; `check` raises when they can't be had any more.
    """
    folder = config.run_dir
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep_last)
    with view, stop_on_interrupt(view.note) as asked:
        view.phase("loading", config.model.name)
        start = (
            await find_resume_point(config, checkpoints, note=view.note)
            if resume
            else ResumePoint()
        )
        async with open_components(
            config,
            agent=agent,
            tasks=tasks,
            checkpoint=start.checkpoint,
            transport=local_transport(config, apart=apart),
            note=view.note,
        ) as parts:
            trainer = make_trainer(parts)
            if config.model.lora.enabled:
                trained, total = num_parameters(parts.model)
                view.note(
                    f"training adapters: {trained:,} of {total:,} parameters "
                    f"({trained / total:.1%})"
                )
            attempts = _attempts(
                parts, lambda: bool(asked), apart=apart, check=check, note=view.warn
            )
            with MetricsLog(
                folder / "metrics.jsonl",
                folder / "tensorboard" if config.tracking.tensorboard else None,
            ) as log:
                loop = Loop(
                    parts,
                    trainer,
                    attempts,
                    checkpoints,
                    log,
                    view,
                    reference_players(parts),
                    lambda: bool(asked),
                )
                if resume:
                    log.resume(
                        start.committed if start.checkpoint is not None or start.steps else -1
                    )
                if start.checkpoint is not None:
                    trainer_state, run_state = checkpoints.load(start.checkpoint)
                    trainer.load_state_dict(trainer_state)
                    loop.restore(run_state)
                elif config.cold_start.episodes:
                    await _cold_start(loop, again=bool(start.steps))
                if not asked or start.checkpoint is not None:
                    await replay_steps(loop, start)
                    await loop.run()
                _write_summary(loop)
        if config.tracking.report:
            view.phase("reporting")
            path = report_from_run(folder, lambda token: str(parts.tokenizer.decode([token])))
            view.note(f"report: {path}")
    if asked:
        raise KeyboardInterrupt


def make_trainer(parts: Components) -> Learner:
    """Whoever trains the policy by this recipe's algorithm."""
    config = parts.config
    return preference_trainer(parts) or Trainer(
        parts.model,
        config.trainer,
        config.algorithm,
        critic=config.critic,
        process_reward=config.process_reward,
        reward_model=_reward_model(parts),
        memory=config.memory,
    )


def _attempts(
    parts: Components,
    stop: Callable[[], bool],
    *,
    apart: bool,
    check: Callable[[], None],
    note: Callable[[str], None],
) -> RolloutSource:
    if apart:
        return DisaggregatedRollouts(parts, stop, check, note)
    return (
        ColocatedRollouts(parts, stop, note)
        if parts.config.rollout.staleness
        else SynchronousRollouts(parts)
    )


def _reward_model(parts: Components) -> TokenRewardModel | None:
    section = parts.config.reward_model
    if section.name is None:
        return None
    return TokenRewardModel(
        prepare(load_reward_model(section.name, parts.model, parts.tokenizer)), section
    )


async def _cold_start(loop: Loop, *, again: bool) -> None:
    """Teaches the model before the first step. `again`: a resumed run without a checkpoint, whose
    log has it already."""
    if loop.parts.config.model.name != "tiny" and not again:  # random weights have nothing to show
        loop.progress.cold_start_before = await loop.evaluate(
            "before the cold start", full=False, label="untaught-"
        )
    metrics = cold_start(loop.parts, loop.view, loop.stop)
    if not again:
        loop.progress.trained_tokens += int(metrics.get("cold_start/tokens", 0))
        loop.log.log(0, metrics)


def _write_summary(loop: Loop) -> None:
    config, progress = loop.parts.config, loop.progress
    best = loop.checkpoints
    summary = {
        "name": config.run.name,
        "model": config.model.name,
        "environment": config.environment.type if config.environment is not None else None,
        "seed": config.run.seed,
        "eval": {
            "before": headline(progress.before) if progress.before else None,
            "after": headline(progress.after) if progress.after else None,
            "n": len(loop.parts.tasks.held_out()),
            "cold_start_before": headline(progress.cold_start_before)
            if progress.cold_start_before
            else None,
            "random": loop.players.random if loop.players is not None else None,
            "optimal": loop.players.optimal if loop.players is not None else None,
            "sampled": {
                "before": sampled_success(progress.before),
                "after": sampled_success(progress.after),
            },
        },
        "wall_s": loop.wall_s(),
        "steps": progress.step,
        "tokens": {"generated": progress.generated_tokens, "trained": progress.trained_tokens},
        "best": {"step": best.best_step, "value": best.best_value},
        "profile": loop.profiling.summary,
        "warnings": progress.warnings,
    }
    write_summary(config.run_dir, summary)
