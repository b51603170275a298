"""Resumes a run from the newest complete checkpoint, and repeats the committed steps after it from
their plans. The store records for every committed step what it trained on, in which order
(training/batching/step_plan.py). Therefore nothing that was completed is lost, nothing is in the
weights twice, and version numbers keep their meaning, for any process that was killed and any torn
checkpoint: in the extreme case all steps are repeated from the initial weights.

`ResumeChecks` refuses, with the remedy, any changed data that the trainer would read; a store and a
folder that were not modified pass. Only what will be read is checked, so the cost grows with the
repeated steps and the waiting attempts, and not with the run. `agentevo audit` checks all of a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.config.tasks import smallest_group
from agentevo.errors import CheckpointError, TrainingError, UnusableStoreError
from agentevo.models import checkpoint_manifest as manifest
from agentevo.observability.metrics import digests_by_step
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.folder.chain import (
    HEAD,
    KEY,
    LOG,
    OLDER_VERSION,
    SUMMARY,
    End,
    broken_links,
    file_digest,
    is_given_up,
    read_head,
)
from agentevo.runs.folder.run_folder import command_of
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runs.orchestration.batch_sources import BatchSource
from agentevo.runtime.credentials import without_password
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store import rules
from agentevo.store.codec import is_as_added, is_as_written
from agentevo.store.records import StepRecord, StoredTrajectory
from agentevo.store.records import TrajectoryFilter as Filter
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.checkpoint import Checkpoints
from agentevo.training.learner import Learner

SAME = 1e-3
"""Relative difference of a gradient norm up to which a repeated step counts as the same."""
REMEDY = (
    "nothing was trained or deleted: restore it from a copy, or begin another run (`agentevo "
    "audit` lists everything that has changed since it was written)"
)
Unusable = list[tuple[int, CheckpointError]]


class ResumeChecks:
    """The checks of one resume. All raise CheckpointError."""

    def __init__(self, config: RunConfig, store: Store) -> None:
        self._folder = config.run_dir
        self._store = store
        self._url = without_password(config.store_url)
        self._head = read_head(self._folder)
        is_async = config.rollout.staleness > 0 or config.rollout.samplers > 0
        self._queues = is_async and command_of(config.run_dir) != "loop"
        self._group_size = smallest_group(config)
        self.warnings: list[str] = []

        for name, digests in ({} if self._head is None else self._head.files).items():
            if name != SUMMARY and file_digest(self._folder / name) not in digests:
                raise CheckpointError(
                    f"{self._folder / name} differs from what this run wrote: restore it, and "
                    f"give changes as overrides on the command line"
                )

    def reach(self, checkpoints: Checkpoints, last: StepRecord | None) -> None:
        """The store must have every step that the folder has. A step's checkpoint is saved before
        the step is committed, so a kill can leave the checkpoint of the step after the last
        committed one."""
        committed = last.step if last is not None else 0
        if last is not None and KEY not in last.record:
            raise CheckpointError(f"{self._folder}: {OLDER_VERSION}")

        later = sorted(step for step in checkpoints.folders() if step > committed + 1)
        ahead = self._head is not None and self._head.step > committed
        if later or ahead:
            names = [checkpoints.path(step).name for step in later]
            known_steps = later[-1:] or [self._head.step if self._head is not None else 0]
            evidence = (
                f"a checkpoint of step {known_steps[0]}"
                if later
                else f"step {known_steps[0]} in {HEAD}"
            )
            where = checkpoints.folder if later else self._folder
            raise CheckpointError(
                f"{where} has {evidence}, but the store {self._url} ends at step {committed}: it "
                f"is new, older, another run's, or has lost steps. Nothing was deleted: restore "
                f"the store, or, to abandon all steps after step {committed}, delete "
                f"{', '.join([*names, HEAD] if ahead else names)} in {self._folder}"
            )

        if last is not None and self._head is None:
            self.warnings.append(
                f"{HEAD} was missing when the run was resumed after step {committed}: it is "
                f"unknown whether the store had later steps"
            )

    async def log(self, last: StepRecord | None) -> None:
        """metrics.jsonl must contain all logged rows. If its last steps are missing, which a power
        cut can cause, a warning says so."""
        if last is None or LOG not in last.record:
            return

        path = self._folder / "metrics.jsonl"
        digests = digests_by_step(path)
        newest = max(digests, default=0)
        # The row of a step is logged before its commit. A user who abandons later steps deletes the
        # head.
        if newest > last.step + 1 and self._head is not None:
            raise CheckpointError(
                f"{path} differs from what was logged: it has rows up to step {newest}, and the "
                f"store "
                f"ends at step {last.step}; {REMEDY}"
            )

        if digests.get(last.step) == last.record[LOG]:
            return

        end = max((step for step in digests if step <= last.step), default=0)
        records = await self._steps(end - 1) if end else []
        if end and (end == last.step or records[0].record.get(LOG) != digests[end]):
            raise CheckpointError(
                f"{path} differs from what was logged, at the latest from step {end} on; {REMEDY}"
            )

        self.warnings.append(
            f"metrics.jsonl lacked the rows of steps {end + 1} to {last.step} when the run was "
            "resumed"
        )

    async def newest_checkpoint(
        self, checkpoints: Checkpoints, committed: int
    ) -> tuple[int | None, Unusable]:
        """The newest checkpoint that is whole and the run's own, and the unusable ones after it,
        with their reasons."""
        unusable: Unusable = []
        limit = committed
        while True:
            newest = checkpoints.newest_whole(
                limit, torn=lambda step, error: unusable.append((step, error))
            )
            if newest is None:
                return None, unusable

            saved = manifest.read(checkpoints.path(newest)).sha256
            if saved in await self._known_checkpoints(newest):
                return newest, unusable

            unusable.append(
                (newest, CheckpointError("it is complete, but the run has no record of saving it"))
            )
            limit = newest - 1

    async def _known_checkpoints(self, step: int) -> list[str]:
        """The sha256 of each checkpoint that was saved of the step."""
        digests = [] if self._head is None else [self._head.checkpoints.get(step)]
        records = (await self._steps(step - 1))[:1] if step else []
        digests += [(record.record.get("checkpoint") or {}).get("sha256") for record in records]
        return [sha256 for sha256 in digests if sha256]

    def end_of(self, checkpoint: Path) -> End:
        """The newest step that was committed when the checkpoint was saved."""
        state = Checkpoints.run_state(checkpoint)
        if KEY not in state:
            raise CheckpointError(f"{self._folder}: {OLDER_VERSION}")
        return End(**state[KEY])

    async def records(self, end: End) -> list[StepRecord]:
        """The records after `end`. Each must be the record that was committed for its step."""
        records = await self._steps(end.step)
        broken = broken_links(records, end)
        ends = {end.step: end.chain} | {r.step: str(r.record.get(KEY)) for r in records}
        head = self._head
        if head is not None and ends.get(head.step, head.chain) != head.chain:
            broken.append(head.step)

        if [record.step for record in records] != list(
            range(end.step + 1, end.step + 1 + len(records))
        ):
            raise CheckpointError(
                f"{self._folder}: the store {self._url} lacks committed steps after step "
                f"{end.step}; {REMEDY}"
            )

        if broken:
            raise CheckpointError(
                f"{self._folder}: the record of step {broken[0]} in the store {self._url} "
                f"differs from the one that was committed; {REMEDY}"
            )

        return records

    async def trajectories(self, steps: list[StepRecord], committed: int) -> None:
        """The attempts of the repeated steps must be those that the steps were trained on. Attempts
        that wait for the next steps, or that evaluated the policy since, must be unchanged."""
        for record in steps:
            try:
                plan = StepPlan.of(record.step, record.record)
                stored = await with_retries(
                    lambda: plan.read_trained(self._store, record.step),  # noqa: B023 (called at once)
                    within_s=STORE_RETRY_S,
                    what="checking the attempts to train on",
                )
                plan.restore_trained(stored)
            except (TrainingError, UnusableStoreError) as error:
                raise CheckpointError(
                    f"step {record.step} can't be repeated: {error}; {REMEDY}"
                ) from error

        groups: dict[str, str] = {}
        waiting: list[Filter] = [
            {"state": "ready", "split": "train"},
            {"state": "reserved"},
            {"step": committed},
            {"step": committed + 1},
        ]
        for which in waiting:
            for row in await self._read(**which):
                is_lost = row.tokens_deleted and row.state != "dropped"
                if is_lost or not (row.tokens_deleted or is_as_written(row)):
                    raise CheckpointError(
                        f"trajectory {row.trajectory.id!r} in the store {self._url} differs from "
                        f"what was written; {REMEDY}"
                    )

                if (row.state == "failed") == (row.trajectory.status == "completed"):
                    raise CheckpointError(
                        f"trajectory {row.trajectory.id!r} in the store {self._url} is "
                        f"{row.state}, though it {row.trajectory.status}; {REMEDY}"
                    )

                if row.split == "train" and row.state in ("ready", "reserved"):
                    groups[row.trajectory.group_id] = row.trajectory.task_id

        if self._queues:
            await self._check_complete(groups)

    async def _check_complete(self, groups: Mapping[str, str]) -> None:
        """Groups that wait (with the ids of their tasks) must have all their members, since every
        group is written whole."""
        for name, task in groups.items():
            rows = await with_retries(
                lambda: self._store.summaries(group_id=name),  # noqa: B023 (called before the next)
                within_s=STORE_RETRY_S,
                what="checking groups",
            )
            size = 1 if name.startswith(f"{task}/{BASELINE}@") else self._group_size
            if rules.lacks_members([row.attempt for row in rows], size):
                raise CheckpointError(
                    f"the group {name!r} in the store {self._url} lacks attempts: it has "
                    f"{len(rows)}; {REMEDY}"
                )

    async def tasks(self) -> None:
        """Every task must be the one that was added."""

        async def read() -> list[str]:
            return [task.task.id async for task in self._store.tasks() if not is_as_added(task)]

        changed = await with_retries(read, within_s=STORE_RETRY_S, what="checking the tasks")
        if changed:
            raise CheckpointError(
                f"task {changed[0]!r} in the store {self._url} differs from the one that was "
                f"added; "
                f"{REMEDY}"
            )

    async def _steps(self, after: int) -> list[StepRecord]:
        return await with_retries(
            lambda: self._store.steps(after=after),
            within_s=STORE_RETRY_S,
            what="reading the committed steps",
        )

    async def _read(self, **which: object) -> list[StoredTrajectory]:
        async def read() -> list[StoredTrajectory]:
            return [trajectory async for trajectory in self._store.trajectories(**which)]  # type: ignore[arg-type]

        return await with_retries(
            read, within_s=STORE_RETRY_S, what="checking the attempts to train on"
        )


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
    again. Everything that training will read is checked before anything is changed.

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
    if batch.images:
        trainer.show(batch.images)
    return trainer.step(batch.samples) if batch.samples else {}


def difference_of_replay(step: StepRecord, trained: Mapping[str, float]) -> str | None:
    """How a repeated step's result, its metrics `trained`, differs from the committed one, for
    example on another machine; None if it does not. Raises TrainingError if only one of them has
    changed the weights."""
    was = step.record["metrics"].get("actor/grad_norm")
    now = trained.get("actor/grad_norm")
    if (was is None) != (now is None):
        raise TrainingError(
            f"step {step.step}, repeated from its plan, has gradient norm {now}; when it was "
            f"committed {was}: has the recipe changed?"
        )

    if was is None or now is None or abs(now - was) <= SAME * max(abs(was), 1e-6):
        return None

    return (
        f"step {step.step}, repeated from its plan, has a gradient norm of {now:.6g}; when it was "
        f"committed {was:.6g}"
    )
