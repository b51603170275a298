"""Checks of a resume before it trains on data from an earlier life of the run: files, records,
trajectories.

A store and a folder that were not modified pass. The checks refuse, with the remedy, any changed
data that the trainer would read. Only what will be read is checked, so the cost grows with the
repeated steps and the waiting attempts, and not with the run. `agentevo audit` checks all of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentevo.config import RunConfig
from agentevo.errors import CheckpointError, TrainingError
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
    read_head,
)
from agentevo.runs.folder.run_folder import command_of
from agentevo.runtime.credentials import without_password
from agentevo.runtime.retry import STORE_RETRY_S, with_retries
from agentevo.store import rules
from agentevo.store.codec import is_as_added, is_as_written
from agentevo.store.records import StepRecord, StoredTrajectory
from agentevo.store.records import TrajectoryFilter as Filter
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import StepPlan
from agentevo.training.checkpoint import Checkpoints

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
        self._group_size = config.trainer.group_size
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
            stored = await self._read(trained_step=record.step)
            try:
                StepPlan.of(record.step, record.record).restore_trained(
                    row.trajectory for row in stored
                )
            except TrainingError as error:
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
