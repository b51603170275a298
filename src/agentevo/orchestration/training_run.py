"""One life of the process that trains: load or resume, run the loop, say what came of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.models.adapters import num_parameters
from agentevo.models.attention import prepare
from agentevo.models.load import load_reward_model
from agentevo.observability import LiveView, MetricsLog, report_from_run
from agentevo.orchestration.attempts import Apart, Attempts, Beside, InTurn
from agentevo.orchestration.cold_start import cold_start
from agentevo.orchestration.components import AgentFunction, Components, open_components
from agentevo.orchestration.evaluation import headline, reference_players
from agentevo.orchestration.loop import Loop
from agentevo.orchestration.preference import preference_trainer
from agentevo.orchestration.redo import Beginning, beginning, redo
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner
from agentevo.training.token_rewards import TokenRewardModel
from agentevo.training.trainer import Trainer
from agentevo.types import Task


@contextmanager
def stop_on_interrupt(view: LiveView) -> Iterator[list[bool]]:
    """The first Ctrl-C asks for a clean stop, the second interrupts at once. Only in the main thread, which alone gets signals."""
    asked: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        view.note("stopping after this step; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Two trainers of one run would undo each other's steps. The lock ends with the process, however it ends."""
    lock = FileLock(folder / "trainer.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{folder}: another process trains there: stop it first, or give another run.dir") from None
    try:
        yield
    finally:
        lock.release()


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
    """Trains to the last step or a clean stop, which raises KeyboardInterrupt. The run's folder is there, with its config.yaml, and the
    caller is its `only_trainer`.

    apart: samplers and engines are other processes; `check` raises when they can't be had any more.
    """
    folder = config.run_dir
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint.keep_last)
    with view, stop_on_interrupt(view) as asked:
        view.phase("loading", config.model.name)
        start = await beginning(config, checkpoints, note=view.note) if resume else Beginning()
        own_weights = not apart and config.rollout.staleness > 0 and config.rollout.sharing == "overlap"
        async with open_components(config, agent=agent, tasks=tasks, checkpoint=start.checkpoint, own_weights=own_weights) as parts:
            trainer = make_trainer(parts)
            if config.model.lora.enabled:
                trained, total = num_parameters(parts.model)
                view.note(f"training adapters: {trained:,} of {total:,} parameters ({trained / total:.1%})")
            attempts = _attempts(parts, lambda: bool(asked), apart=apart, check=check, note=view.warn)
            with MetricsLog(folder / "metrics.jsonl", folder / "tensorboard" if config.tracking.tensorboard else None) as log:
                loop = Loop(parts, trainer, attempts, checkpoints, log, view, reference_players(parts), lambda: bool(asked))
                if resume:
                    log.resume(start.committed if start.checkpoint is not None or start.steps else -1)
                if start.checkpoint is not None:
                    trainer_state, run_state = checkpoints.load(start.checkpoint)
                    trainer.load_state_dict(trainer_state)
                    loop.restore(run_state)
                elif config.cold_start.episodes:
                    await _cold_start(loop, again=bool(start.steps))
                if not asked or start.checkpoint is not None:
                    await redo(loop, start)
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
    parts: Components, stop: Callable[[], bool], *, apart: bool, check: Callable[[], None], note: Callable[[str], None]
) -> Attempts:
    if apart:
        return Apart(parts, stop, check, note)
    return Beside(parts, stop, note) if parts.config.rollout.staleness else InTurn(parts)


def _reward_model(parts: Components) -> TokenRewardModel | None:
    section = parts.config.reward_model
    if section.name is None:
        return None
    return TokenRewardModel(prepare(load_reward_model(section.name, parts.model, parts.tokenizer)), section)


async def _cold_start(loop: Loop, *, again: bool) -> None:
    """Teaches the model before the first step. `again`: a resumed run without a checkpoint, whose log has it already."""
    if loop.parts.config.model.name != "tiny" and not again:  # random weights have nothing to show
        loop.progress.cold_start_before = await loop.evaluate("before the cold start", full=False, label="untaught-")
    metrics = cold_start(loop.parts, loop.view, loop.stop)
    if not again:
        loop.progress.trained_tokens += int(metrics.get("cold_start/tokens", 0))
        loop.log.log(0, metrics)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, atomically."""
    staging = folder / "summary.json.tmp"
    staging.write_text(json.dumps(summary, indent=2), encoding="utf-8")
    os.replace(staging, folder / "summary.json")


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
            "cold_start_before": headline(progress.cold_start_before) if progress.cold_start_before else None,
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


def sampled_success(metrics: dict[str, float]) -> float | None:
    """Success of the sampled attempts out of an evaluation's metrics."""
    return next((value for key, value in metrics.items() if key.endswith("/success/sampled")), None)
