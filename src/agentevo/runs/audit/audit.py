"""The audit proves from a run's store that every committed step was made from exactly the
trajectories that its record names. Each was used once, and none of its tokens was older than the
bound.

The audit recomputes all that it can: digests and ages from the tokens in the store, the chain of
steps from their records (runs/folder/chain.py), and checksums from the files. It proves neither
weights whose checkpoint is gone (`agentevo audit --replay` samples tokens again) nor times.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from agentevo.errors import CheckpointError, StoreError, TrainingError
from agentevo.runs.audit.findings import Audit
from agentevo.runs.audit.folder import (
    check_checkpoints,
    check_files,
    check_head,
    check_numbers,
    check_texts,
    list_unproven,
)
from agentevo.runs.audit.stored_images import check_images
from agentevo.runs.audit.untrained_rows import check_rest, wrong_content
from agentevo.runs.folder.chain import KEY, OLDER_VERSION, End, broken_links, read_head
from agentevo.runs.folder.run_folder import queued_group_size
from agentevo.runtime.progress import over
from agentevo.store.codec import content_digest
from agentevo.store.records import StepRecord, StoredTrajectory
from agentevo.store.store import Store
from agentevo.training.batching.staleness import age_of_oldest
from agentevo.training.batching.step_plan import SHOWN, StepPlan

EXACT_POLICIES = ("wait", "cancel")
"""The values of `rollout.policy` under which no token is too old, so that none needs masking."""

Violated: TypeAlias = Callable[..., None]
"""Adds a violation of a step to the report: what, and the id of a trajectory."""


async def audit(store: Store, folder: Path) -> Audit:
    """Reads the whole store of the run in `folder`, step by step, and the existing files."""
    report = Audit()
    try:
        # reads the head before the records, because a running run writes records first
        head = read_head(folder)
    except CheckpointError as error:
        head = None
        report.add(str(error))

    try:
        records = await store.steps()
    except StoreError as error:
        report.add(f"no step can be proven: {error}")
        return report

    report.steps = len(records)
    _check_numbers(records, report)
    used: dict[str, int] = {}
    members: dict[tuple[str, int], str] = {}
    _check_chain(records, report)

    for record in over(records, "audit", len(records), "steps"):
        if KEY in record.record:
            await _check_step(store, record, used, members, report)

    check_head(head, records, folder, report)
    check_files(head, records, folder, report)
    check_checkpoints(head, records, folder, report)
    check_numbers(records, folder, report)
    await check_rest(store, records, report, queued_group_size(folder))
    await check_images(store, report)
    check_texts(folder, report)
    list_unproven(head, records, folder, report)

    return report


def _check_chain(records: Iterable[StepRecord], report: Audit) -> None:
    """Checks by the chain that every record is the one that was committed."""
    older = [record.step for record in records if KEY not in record.record]
    if older:
        what = f"{len(older)} steps, of which this is the first, can't be proven: {OLDER_VERSION}"
        report.add(what, step=older[0])
    for step in broken_links((r for r in records if KEY in r.record), End()):
        what = "its record is not the one that was committed: the chain of steps breaks here"
        report.add(what, step=step)


def _check_numbers(records: Iterable[StepRecord], report: Audit) -> None:
    expected = 1
    for record in records:
        if record.step != expected:
            missing = (
                f"step {expected}"
                if record.step == expected + 1
                else f"steps {expected} to {record.step - 1}"
            )
            report.add(f"{missing} before it: there is no record", step=record.step)

        expected = record.step + 1


async def _check_step(
    store: Store,
    record: StepRecord,
    used: dict[str, int],
    members: dict[tuple[str, int], str],
    report: Audit,
) -> None:
    """Compares the step's plan with the trajectories that are committed to it in the ledger. `used`
    maps ids to the step that names them, and `members` maps (group, attempt) to ids."""
    step = record.step

    def add_violation(what: str, trajectory: str | None = None) -> None:
        report.add(what, step=step, trajectory=trajectory)

    try:
        plan = StepPlan.of(step, record.record)
    except TrainingError as error:
        add_violation(f"{error}; so neither its trajectories nor their ages can be proven")
        return

    _check_used_once(plan, step, used, add_violation)
    if record.num_trajectories != len(plan.ids):
        add_violation(
            f"its record counts {record.num_trajectories} trajectories, its plan {len(plan.ids)}"
        )

    digests = await _digest_replayed(store, plan, step, used, report)
    places = {name: index for index, name in enumerate(plan.ids)}
    contents: dict[str, list[str]] = {}
    masked = 0
    try:
        sizes = {row.id: row for row in await store.summaries(trained_step=step)}
        async for stored in store.trajectories(trained_step=step):
            name = stored.trajectory.id
            report.note(stored)
            for what in _wrong_with(stored, places):
                add_violation(what, name)

            contents[name] = wrong_content(stored, sizes.get(name))
            first_id = members.setdefault(
                (stored.trajectory.group_id, stored.trajectory.attempt), name
            )
            if first_id != name:
                add_violation(f"it is the same attempt as {first_id}, under another id", name)

            if name in places and not stored.tokens_deleted:
                digests[name] = content_digest(plan.final(stored.trajectory))
                masked += _count_ages(stored, plan, step, report)
    except StoreError as error:
        add_violation(f"its trajectories can't be read: {error}")
        return

    for name in plan.ids:
        if name not in digests:
            add_violation(
                "its plan names it, but it is not in the store as committed to this step", name
            )

    report.trained += len(digests.keys() & places.keys())
    report.masked_tokens += masked
    _check_masked(plan, masked, add_violation)
    is_complete = all(name in digests for name in plan.trained_ids)
    altered = _check_digest(plan, digests, add_violation) if is_complete else set()
    for name in contents.keys() - altered:
        for what in contents[name]:
            add_violation(what, name)


def _check_used_once(plan: StepPlan, step: int, used: dict[str, int], violated: Violated) -> None:
    """Checks that the plan repeats no trajectory of its own or of an earlier plan. Updates
    `used`."""
    for name, times in Counter(plan.ids).items():
        if times > 1:
            violated(f"its plan names it {times} times", name)
        if name in used:
            violated(f"step {used[name]} names it as well: it was trained on twice", name)
        used.setdefault(name, step)


async def _digest_replayed(
    store: Store, plan: StepPlan, step: int, used: Mapping[str, int], report: Audit
) -> dict[str, bytes]:
    """Checks that each replayed attempt is a success that an earlier step trained on, and that none
    of its tokens is too old. Returns the digests of those that the store has."""
    digests: dict[str, bytes] = {}
    for name in plan.replayed:
        if used.get(name, step) >= step:
            what = "its plan replays it, but no earlier step has trained on it"
            report.add(what, step=step, trajectory=name)
        try:
            stored = await store.trajectory(name)
        except StoreError as error:
            report.add(f"its plan replays it: {error}", step=step, trajectory=name)
            continue

        age = age_of_oldest(stored, trainer_version=step - 1)
        if age > plan.replay_max_age:
            what = f"it was replayed at age {age}, the bound was {plan.replay_max_age}"
            report.add(what, step=step, trajectory=name)
        if not stored.success:
            report.add("it was replayed though it did not succeed", step=step, trajectory=name)
        digests[name] = content_digest(plan.final(stored))

    report.replayed += len(plan.replayed)
    return digests


def _check_masked(plan: StepPlan, masked: int, violated: Violated) -> None:
    """Checks that the plan left out exactly the tokens that are too old. With a policy that waits
    for fresh tokens, there must be none."""
    if masked != plan.masked_tokens:
        violated(
            f"{masked} tokens were older than {plan.staleness} versions, its plan says that "
            f"{plan.masked_tokens} were left out"
        )

    if masked and plan.policy in EXACT_POLICIES:
        violated(
            f"{masked} tokens were older than {plan.staleness} versions, which "
            f"rollout.policy={plan.policy} rules out"
        )


def _wrong_with(stored: StoredTrajectory, places: Mapping[str, int]) -> list[str]:
    wrong = []
    if stored.state != "committed":
        wrong.append(f"it is {stored.state} for this step, which is committed")
    if stored.trajectory.id not in places:
        wrong.append("it is in the store as committed to this step, whose plan does not name it")
    if stored.split != "train":
        wrong.append(f"it is of the split {stored.split}, which is not trained on")
    if stored.trajectory.status != "completed":
        wrong.append(f"it was trained on though it {stored.trajectory.status}")
    if stored.tokens_deleted:
        wrong.append("its tokens were deleted")
    if stored.drop_reason is not None:
        wrong.append(f"it was trained on, and has a reason for its drop: {stored.drop_reason}")

    return wrong


def _count_ages(stored: StoredTrajectory, plan: StepPlan, step: int, report: Audit) -> int:
    """Adds the trajectory's trained tokens to `report.ages`. Returns how many are older than the
    bound. The trainer's version is step - 1."""
    counts: Counter[int] = Counter()
    for turn in stored.trajectory.turns:
        counts.update(turn.versions)

    masked = 0
    for version, count in counts.items():
        age = step - 1 - version
        if age < 0:
            what = (
                f"{count} of its tokens are of version {version}, which exists only "
                f"after step {version}"
            )
            report.add(what, step=step, trajectory=stored.trajectory.id)

        if age > plan.staleness:
            masked += count
        else:
            report.ages[age] = report.ages.get(age, 0) + count

    return masked


def _check_digest(plan: StepPlan, digests: Mapping[str, bytes], violated: Violated) -> set[str]:
    """Returns the ids of trajectories that were changed after they were trained on."""
    altered = []
    if len(plan.digests) == len(plan.trained_ids):
        shown = zip(plan.trained_ids, plan.digests, strict=True)
        altered = [
            (name, digest) for name, digest in shown if digests[name].hex()[:SHOWN] != digest
        ]

    for name, digest in altered:
        now = digests[name].hex()[:SHOWN]
        violated(
            f"it is not what was trained on: its digest is {now} now, and was {digest}",
            name,
        )

    combined_digest = hashlib.sha256(
        b"".join(digests[name] for name in plan.trained_ids)
    ).hexdigest()
    if combined_digest != plan.digest and not altered:
        violated(
            f"its trajectories have the digest {combined_digest[:SHOWN]}, its plan says "
            f"{plan.digest[:SHOWN]}: they or their order were changed"
        )

    return {name for name, _ in altered}
