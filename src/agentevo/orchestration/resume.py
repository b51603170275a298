"""Resuming: from the newest whole checkpoint, the committed steps after it are done again from
their plans.

The store knows of every committed step what it trained on, in which order (training/plan.py). So
nothing that was completed is lost, nothing is in the weights twice, and version numbers keep their
meaning, whatever was killed and whichever checkpoint is torn: in the extreme all steps are done
again from the first weights.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentevo.config import RunConfig
from agentevo.errors import TrainingError
from agentevo.orchestration.batch_sources import BatchSource
from agentevo.orchestration.progress import Progress
from agentevo.orchestration.resume_checks import ResumeChecks
from agentevo.orchestration.rollout_sources import SynchronousRollouts
from agentevo.retry import STORE_RETRY_S, with_retries
from agentevo.runs.chain import KEY, End, is_given_up
from agentevo.runs.store_opening import open_run_store
from agentevo.store.records import StepRecord
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner

if TYPE_CHECKING:
    from agentevo.orchestration.training_run import TrainingRun

SAME = 1e-3
"""Relative difference of a gradient norm up to which a step that was done again is taken for the
same."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a life of the trainer starts."""

    checkpoint: Path | None = None
    """None: from the recipe's own weights."""
    end: End = field(default_factory=End)
    """The newest committed step."""
    steps: list[StepRecord] = field(default_factory=list)
    """Committed steps after the checkpoint, to be done again."""
    warnings: tuple[str, ...] = ()


async def find_resume_point(
    config: RunConfig, checkpoints: Checkpoints, *, note: Callable[[str], None]
) -> ResumePoint:
    """Where to resume. Checkpoints that are torn, that a kill has left of later steps, or that the
    run has no record of, are deleted. So every checkpoint that is left is one of this run's own
    weights: as it was first saved, or again by a resume that had done the step again.

    Of a run that was given up before its first step nothing stays but its tasks, which are queued
    again. Everything that training will read is checked before anything is changed
    (resume_checks.py).
    Raises CheckpointError, and leaves all as it was, where the store, config.yaml or a record is
    not what this run has written.
    """
    async with await open_run_store(config.store_url) as store:
        checks = ResumeChecks(config, store)
        last = await with_retries(
            store.last_step, within_s=STORE_RETRY_S, what="reading the newest committed step"
        )
        committed = last.step if last is not None else 0
        checks.reach(checkpoints, last)
        newest, unusable = await checks.newest_checkpoint(checkpoints, committed)
        before = End() if newest is None else checks.end_of(checkpoints.path(newest))
        records = await checks.records(before)
        steps = [record for record in records if newest is None or record.step > newest]
        await checks.trajectories(steps, committed)
        await checks.tasks()

        if last is None and is_given_up(config.run_dir):
            note("nothing was trained before, so the run begins again")
            await with_retries(
                lambda: store.rewind(-1), within_s=STORE_RETRY_S, what="deleting failed attempts"
            )

    for step, error in unusable:
        note(f"the checkpoint of step {step} is left out and deleted: {error}")
        shutil.rmtree(checkpoints.path(step))

    if checkpoints.folder.is_dir():
        checkpoints.forget_after(committed)

    if newest is not None:
        again = f"; {len(steps)} committed steps after it are done again" if steps else ""
        note(f"resuming after step {committed} from {checkpoints.path(newest)}{again}")

    path = checkpoints.path(newest) if newest is not None else None
    end = End(committed, str(last.record[KEY])) if last is not None else before
    return ResumePoint(path, end, steps, tuple(checks.warnings))


async def replay_steps(run: TrainingRun, start: ResumePoint) -> None:
    """Brings trainer and progress to the newest committed step, unless the run is asked to stop
    before that.

    Of the step after it, which a kill may have left reserved, the same attempts are taken again
    (rollout_sources.py). Where they are those of the step's own tasks, nothing else stays of what
    was chosen among them: the recipe may choose otherwise now.
    """
    if isinstance(run.rollouts, SynchronousRollouts) or run.parts.config.rollout.policy == "wait":
        store = run.parts.store
        await with_retries(
            lambda: store.rewind(start.end.step, keep=True),
            within_s=STORE_RETRY_S,
            what="releasing what was reserved",
        )

    if start.steps and start.checkpoint is None:
        run.trainer.begin()

    for number, step in enumerate(start.steps, start=1):
        if run.is_stopped():
            run.view.note("stopped while committed steps were done again: nothing was changed")
            return
        run.view.phase("doing again", f"step {step.step} ({number}/{len(start.steps)})")
        await _replay_step(run, step)


async def replay_step(trainer: Learner, source: BatchSource, step: StepRecord) -> dict[str, float]:
    """Trains on what the step was trained on; metrics. Raises TrainingError if the store no longer
    has that."""
    batch = await source.replay(step)
    return trainer.step(batch.samples) if batch.samples else {}


async def _replay_step(run: TrainingRun, step: StepRecord) -> None:
    _compare(run, step, await replay_step(run.trainer, run.source, step))
    earlier = [*run.progress.warnings]  # without those of `observe`, which the record has
    run.observe(
        step.step,
        {
            key: math.nan if value is None else value
            for key, value in step.record["metrics"].items()
        },
    )
    run.source.load_state_dict(step.record["source"])
    progress = msgspec.convert(step.record["progress"], Progress)
    run.go_on_from(msgspec.structs.replace(progress, warnings=earlier + progress.warnings))


def _compare(run: TrainingRun, step: StepRecord, trained: dict[str, float]) -> None:
    """Tells if the step has come to something else than when it was committed: on another machine,
    say."""
    was = step.record["metrics"].get("actor/grad_norm")
    now = trained.get("actor/grad_norm")
    if (was is None) != (now is None):
        raise TrainingError(
            f"step {step.step}, done again from its plan, has gradient norm {now}; when it was "
            f"committed {was}: has the recipe changed?"
        )

    if was is not None and now is not None and abs(now - was) > SAME * max(abs(was), 1e-6):
        run.warn(
            f"step {step.step}, done again from its plan, has a gradient norm of {now:.6g}; when "
            f"it was committed {was:.6g}"
        )
