"""Resumes a run from the newest complete checkpoint, and repeats the committed steps after it from
their plans. The store records for every committed step what it trained on, in which order
(training/batching/step_plan.py). Therefore nothing that was completed is lost, nothing is in the
weights twice, and version numbers keep their meaning, for any process that was killed and any torn
checkpoint: in the extreme case all steps are repeated from the initial weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.runs.folder.chain import KEY, End, is_given_up
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runs.orchestration.resume_checks import ResumeChecks
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store.records import StepRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a trainer continues a run."""

    checkpoint: Path | None = None
    """None: from the recipe's own weights."""
    end: End = field(default_factory=End)
    """The newest committed step."""
    steps: list[StepRecord] = field(default_factory=list)
    """Committed steps after the checkpoint, which are repeated."""
    warnings: tuple[str, ...] = ()


async def find_resume_point(
    config: RunConfig, checkpoints: Checkpoints, *, note: Callable[[str], None]
) -> ResumePoint:
    """Finds where to resume. Deletes checkpoints that are torn, that belong to later steps and were
    left by a kill, or that the run has no record for. Every remaining checkpoint therefore has this
    run's own weights, saved by the first pass over the step or by a resume that repeated it.

    Of a run that was abandoned before its first step, only the tasks remain, and they are queued
    again. Everything that training will read is checked before anything is changed
    (resume_checks.py).

    Raises CheckpointError, and changes nothing, if the store, config.yaml or a record differs from
    what this run wrote.
    """
    async with await open_run_store(config.store_url) as store:
        checks = ResumeChecks(config, store)
        last = await with_retries(
            store.last_step, within_s=STORE_RETRY_S, what="reading the newest committed step"
        )
        committed = last.step if last is not None else 0
        checks.reach(checkpoints, last)
        await checks.log(last)
        newest, unusable = await checks.newest_checkpoint(checkpoints, committed)
        before = End() if newest is None else checks.end_of(checkpoints.path(newest))
        records = await checks.records(before)
        steps = [record for record in records if newest is None or record.step > newest]
        await checks.trajectories(steps, committed)
        await checks.tasks()

        if last is None and is_given_up(config.run_dir):
            note("nothing was trained before, so the run starts again")
            await with_retries(
                lambda: store.rewind(-1), within_s=STORE_RETRY_S, what="deleting failed attempts"
            )

    for step, error in unusable:
        note(f"the checkpoint of step {step} is unusable and was deleted: {error}")
        shutil.rmtree(checkpoints.path(step))

    if checkpoints.folder.is_dir():
        checkpoints.forget_after(committed)

    if newest is not None:
        redone = f"; {len(steps)} committed steps after it are repeated" if steps else ""
        note(f"resuming after step {committed} from {checkpoints.path(newest)}{redone}")

    path = checkpoints.path(newest) if newest is not None else None
    end = End(committed, str(last.record[KEY])) if last is not None else before
    return ResumePoint(path, end, steps, tuple(checks.warnings))


async def replay_step(trainer: Learner, source: BatchSource, step: StepRecord) -> dict[str, float]:
    """Repeats a step on its recorded training data; returns its metrics. Raises TrainingError if
    the store no longer has the data."""
    batch = await source.replay(step)
    return trainer.step(batch.samples) if batch.samples else {}
