"""Checks the rows of a store that no step trained on: tasks, and trajectories that wait, were
dropped, failed, or belong to evaluations. They must be unchanged, and in the state that the steps'
records name. If samplers queue tasks, the group of a completed task must be complete."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from agentevo.errors import StoreError, TrainingError
from agentevo.rollout.sampler import BASELINE
from agentevo.runs.audit.findings import Audit
from agentevo.runs.folder.chain import RecordedRows
from agentevo.store import rules
from agentevo.store.codec import content_digest, is_as_added, is_as_written
from agentevo.store.records import (
    TASK_STATES,
    StepRecord,
    StoredTrajectory,
    TrajectoryState,
    TrajectorySummary,
)
from agentevo.store.store import Store
from agentevo.training.batching.step_plan import SHOWN, StepPlan
from agentevo.types import QUEUED_FOR_STEP
from agentevo.types.images import images_of_task

_UNUSED: tuple[TrajectoryState, ...] = ("dropped", "failed", "ready", "reserved")


def wrong_content(stored: StoredTrajectory, summary: TrajectorySummary | None) -> list[str]:
    """The changes of a row since it was written."""
    # by `gc`, which deletes those of dropped trajectories; audit.py reports the others
    if stored.tokens_deleted:
        must_have_tokens = stored.state in ("failed", "ready", "reserved")
        return ["its tokens were deleted"] if must_have_tokens else []

    wrong = []
    if not is_as_written(stored):
        wrong.append("it was changed: the digest of its content is not the one in its row")

    trajectory = stored.trajectory
    counts = (len(trajectory.turns), trajectory.num_completion_tokens())
    if summary is not None and counts != (summary.num_turns, summary.num_completion_tokens):
        wrong.append(
            f"it has {counts[0]} turns with {counts[1]} tokens, its row says {summary.num_turns} "
            f"with {summary.num_completion_tokens}"
        )

    return wrong


async def check_rest(
    store: Store, records: Sequence[StepRecord], report: Audit, group_size: int | None
) -> None:
    """Adds the rows outside of all steps to the report. `group_size`: the minimum number of members
    in the group of a queued task. None if no tasks are queued."""
    unused: dict[str, TrajectorySummary] = {}
    attempts: dict[str, str | None] = {}
    try:
        for state in _UNUSED:
            rows = {summary.id: summary for summary in await store.summaries(state=state)}
            unused |= rows
            async for stored in store.trajectories(state=state):
                name = stored.trajectory.id
                report.note(stored)
                for what in wrong_content(stored, rows.get(name)):
                    report.add(what, trajectory=name)
                report.emptied += stored.tokens_deleted
                attempts[name] = None if stored.tokens_deleted else _shown(stored)

        _check_recorded(records, unused, attempts, report)
        committed = await store.summaries(state="committed")
        _check_states(records, unused, report)
        await _check_committed(store, records, committed, report)

        if group_size is not None:
            _check_groups(unused.values(), committed, group_size, report)

        attempted = {row.task_id for row in chain(unused.values(), committed)}
        queues = group_size is not None
        trained = {row.task_id for row in committed}
        await _check_tasks(store, records, trained, attempted, queues, report)
    except StoreError as error:
        report.add(f"untrained trajectories can't be read: {error}")


def _shown(stored: StoredTrajectory) -> str:
    return content_digest(stored.trajectory).hex()[:SHOWN]


def _check_recorded(
    records: Sequence[StepRecord],
    unused: Mapping[str, TrajectorySummary],
    attempts: Mapping[str, str | None],
    report: Audit,
) -> None:
    """Checks that the `attempts` (id -> digest, None for deleted tokens) agree with the steps'
    records."""
    recorded_names: set[str] = set()
    named = {violation.trajectory for violation in report.violations}
    for record in records:
        rows = RecordedRows.of(record.record)
        recorded_names |= rows.untrained.keys() | rows.evaluated.keys()
        for name, digest in (*rows.untrained.items(), *rows.evaluated.items()):
            if name not in attempts:
                what = "its record lists it, but it is not in the store, or was trained on"
            elif (unused[name].split == "eval") != (name in rows.evaluated):
                what = f"its record lists it, but its split is {unused[name].split} now"
            elif attempts[name] not in (None, digest) and name not in named:
                what = f"it was changed: its digest is {attempts[name]} now, and was {digest}"
            else:
                continue
            report.add(what, step=record.step, trajectory=name)

    report.unproven_attempts = len(attempts.keys() - recorded_names)


def _check_states(
    records: Sequence[StepRecord], unused: Mapping[str, TrajectorySummary], report: Audit
) -> None:
    """Checks that dropped trajectories are still dropped, and that untrained ones have a reason."""

    def add_violation(what: str, name: str) -> None:
        report.add(what, trajectory=name)

    named: set[str] = set()
    for record in records:
        for reason, names in _dropped_in(record).items():
            named.update(names)
            for name in names:
                row = unused.get(name)
                if row is None or row.state not in ("dropped", "failed"):
                    now = "not in the store as such" if row is None else row.state
                    add_violation(
                        f"step {record.step} dropped it ({reason}), but it is {now}", name
                    )
                elif row.state == "dropped" and row.drop_reason != reason:
                    add_violation(
                        f"step {record.step} dropped it for {reason}, but its row says for "
                        f"{row.drop_reason}",
                        name,
                    )

    for name, row in unused.items():
        if (row.state == "failed") == (row.status == "completed"):
            add_violation(f"it is {row.state}, though it {row.status}", name)
        if row.state != "dropped" and row.drop_reason is not None:
            add_violation(
                f"it is {row.state}, and has a reason for its drop: {row.drop_reason}", name
            )
        if row.split != "train":
            continue

        if row.state not in ("dropped", "failed"):
            report.waiting[row.state] += 1
            continue

        dropped = row.state == "dropped"
        kind, why = (row.state, row.drop_reason) if dropped else (row.status, row.error)
        if not why:
            add_violation(f"it is {kind}, and no reason is recorded", name)
        elif dropped and name not in named:
            add_violation(f"it is dropped ({why}), and no step's record says so", name)

        report.reasons.setdefault(kind, {}).setdefault(why or "no reason", []).append(name)


def _check_groups(
    unused: Collection[TrajectorySummary],
    committed: Sequence[TrajectorySummary],
    size: int,
    report: Audit,
) -> None:
    """Checks that a waiting group has all its members. Members missing from other groups are in the
    plan of their step."""
    used = {row.group_id for row in committed}
    used |= {row.group_id for row in unused if row.state == "dropped"}
    groups: dict[str, list[int]] = {}
    for row in unused:
        if row.split == "train" and row.group_id not in used:
            groups.setdefault(row.group_id, []).append(row.attempt)

    for name, attempts in groups.items():
        expected_size = 1 if name.startswith(f"{name.rpartition('/')[0]}/{BASELINE}@") else size
        if rules.lacks_members(attempts, expected_size):
            report.add(
                f"the group {name} is incomplete: it has the attempts "
                f"{', '.join(map(str, sorted(attempts)))}, and was written with at least "
                f"{expected_size}, from 0 on"
            )


def _dropped_in(record: StepRecord) -> dict[str, list[str]]:
    try:
        return StepPlan.of(record.step, record.record).dropped
    except TrainingError:  # the check of the step has reported these
        return {}


async def _check_committed(
    store: Store,
    records: Sequence[StepRecord],
    committed: Sequence[TrajectorySummary],
    report: Audit,
) -> None:
    """Checks that no row is committed to a step without a record."""
    since = await store.steps(
        after=max((record.step for record in records), default=0)
    )  # a run may continue during the audit
    steps = {record.step for record in (*records, *since)}
    for summary in committed:
        if summary.trained_step not in steps:
            what = f"it is committed to step {summary.trained_step}, which has no record"
            report.add(what, trajectory=summary.id)


async def _check_tasks(
    store: Store,
    records: Sequence[StepRecord],
    trained: Collection[str],
    attempted: Collection[str],
    queues: bool,
    report: Audit,
) -> None:
    """Checks that every task is the one that was added, and is completed if an attempt at it was
    trained on. Lists tasks that are not completed with the reason. `trained` and `attempted` are
    ids of tasks. `queues`: whether tasks are queued for samplers, which complete a task together
    with its group."""

    def add_violation(what: str) -> None:
        report.add(f"task {name} {what}")

    recorded: dict[str, set[str]] = {}
    for record in records:
        for name, digest in RecordedRows.of(record.record).tasks.items():
            recorded.setdefault(name, set()).add(digest)

    report.tasks = dict.fromkeys(TASK_STATES, 0)
    seen_names = set[str]()
    async for stored in store.tasks():
        name = stored.task.id
        seen_names.add(name)
        report.tasks[stored.state] += 1
        report.note_images(images_of_task(stored.task), f"task {name}")
        if not is_as_added(stored):
            add_violation("is not the one that was added: its digest is not the one in its row")
        elif name not in recorded:
            report.unproven_tasks += 1
        elif recorded[name] != {stored.digest.hex()[:SHOWN]}:
            add_violation("is not the one that was played, according to the record of its step")

        if stored.state == "completed":
            if queues and name not in attempted and QUEUED_FOR_STEP in stored.task.metadata:
                add_violation("is completed, and no attempt at it is in the store")
            report.without_attempt += [name] if name not in attempted else []
            continue

        if name in trained:
            add_violation(f"is {stored.state}, though an attempt at it was trained on")

        if stored.state in ("queued", "leased"):
            report.unfinished.append(name)
        else:
            errors = report.poison if stored.state == "poison" else report.failed
            errors[name] = stored.error or "no error"
            if not stored.error:
                outcome = "was set aside" if stored.state == "poison" else "failed"
                add_violation(f"{outcome}, and no error is recorded")

    for lost_id in sorted(recorded.keys() - seen_names):
        what = (
            f"task {lost_id} was played, according to the record of its step, but is not in the "
            "store"
        )
        report.add(what)
