"""The audit proves from a run's store that every committed step was made from exactly the
trajectories its record names, each used once, none of its tokens older than the bound.

Nothing is believed that can be computed again: digests and ages come from the tokens in the store,
checksums from the checkpoints' files. Not proven: metrics, and weights whose checkpoint is gone
(`agentevo replay` draws tokens again).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from agentevo.errors import CheckpointError, StoreError, TrainingError
from agentevo.store.store import StepRecord, Store, StoredTrajectory, TaskState
from agentevo.training import manifest
from agentevo.training.batching.step_plan import SHOWN, Plan, trajectory_digest

_NUMBER = re.compile(r"\d+(\.\d+)?")
EXACT_POLICIES = ("wait", "cancel")
"""The values of `rollout.policy` that leave no token too old, so that none needs masking."""


class Violated(Protocol):
    """Notes a violation of one step."""

    def __call__(self, what: str, trajectory: str | None = None) -> None: ...


class Violation(msgspec.Struct, frozen=True):
    """Something that the store says and can't be, or should say and doesn't."""

    what: str
    step: int | None = None
    trajectory: str | None = None

    def __str__(self) -> str:
        places = [f"step {self.step}"] if self.step is not None else []
        places += [f"trajectory {self.trajectory}"] if self.trajectory is not None else []
        return ": ".join([*places, self.what])


class Audit(msgspec.Struct, kw_only=True):
    """What the audit found."""

    steps: int = 0
    """Number of committed steps."""
    trained: int = 0
    """Number of trajectories that they were made from."""
    ages: dict[int, int] = {}
    """Age in versions -> trained tokens."""
    masked_tokens: int = 0
    """Tokens of those trajectories that were too old and therefore not trained on."""
    reasons: dict[str, dict[str, list[str]]] = {}
    """`dropped`, `failed` or `cancelled` -> reason -> ids of trajectories for training, in the
    order of writing."""
    waiting: dict[str, int] = {}
    """`ready` and `reserved` trajectories for training."""
    tasks: dict[str, int] = {}
    """Number of tasks in each state."""
    unfinished: list[str] = []
    """Ids of tasks that are queued or leased."""
    poison: dict[str, str] = {}
    """Ids of tasks that were set aside -> error."""
    failed: dict[str, str] = {}
    """Ids of tasks that failed, with whatever was attempted of them -> error."""
    checkpoints: list[int] = []
    """Steps whose checkpoint is whole and the one that the record names."""
    gone: list[int] = []
    """Steps whose checkpoint is no longer there (checkpoint.keep_last)."""
    remade: list[int] = []
    """Steps whose checkpoint is whole, but not the one of the record: a resume found that one torn,
    did the step again and saved it anew. A resume goes on from it like from any whole one;
    `agentevo replay` can compare what its weights say."""
    violations: list[Violation] = []

    @property
    def ok(self) -> bool:
        return not self.violations

    def lines(self, *, dropped: bool = False) -> list[tuple[str, str]]:
        """Rows of (what, value) to print, without the violations. With `dropped`, the ids of what
        was not trained on are among them."""
        total = sum(self.ages.values())
        ages = ", ".join(
            f"{count / total:.1%} of age {age}" for age, count in sorted(self.ages.items())
        )
        named = {"whole": self.checkpoints, "no longer there": self.gone}
        named |= (
            {"whole but not the record's own (made again after a resume)": self.remade}
            if self.remade
            else {}
        )
        rows = [
            (
                "steps",
                f"{self.steps} committed, from {self.trained} trajectories, each in one step",
            ),
            (
                "tokens",
                f"{total:,} trained on{': ' if ages else ''}{ages}; {self.masked_tokens:,} masked",
            ),
            ("checkpoints", ", ".join(f"{len(steps)} {word}" for word, steps in named.items())),
            (
                "tasks",
                ", ".join(f"{count} {state}" for state, count in self.tasks.items() if count)
                or "none",
            ),
        ]
        if any(self.waiting.values()):
            rows.append(
                (
                    "not yet trained on",
                    ", ".join(f"{count} {state}" for state, count in self.waiting.items()),
                )
            )
        rows += [
            (f"task {name}", f"set aside as poison: {error}") for name, error in self.poison.items()
        ]
        rows += [(f"task {name}", f"failed: {error}") for name, error in self.failed.items()]
        for kind, reasons in self.reasons.items():
            counts: Counter[str] = Counter()
            for reason, ids in reasons.items():
                counts[_without_numbers(reason)] += len(ids)
            rows += [(kind, f"{count} {reason}") for reason, count in counts.most_common()]
        if dropped:
            rows += [
                (name, f"{kind}: {why}")
                for kind, reasons in self.reasons.items()
                for why, ids in reasons.items()
                for name in ids
            ]
        return rows


async def audit(store: Store, folder: Path) -> Audit:
    """Reads the whole store of the run in `folder`, step by step, and the checkpoints that are
    there."""
    report = Audit()
    records = await store.steps()
    report.steps = len(records)
    _check_numbers(records, report)
    used: dict[str, int] = {}
    members: dict[tuple[str, int], str] = {}
    for record in records:
        await _check_step(store, record, used, members, report)
        _check_checkpoint(record, folder, report)
    await _check_rest(store, records, report)
    await _account(store, report)
    return report


def _check_numbers(records: Iterable[StepRecord], report: Audit) -> None:
    expected = 1
    for record in records:
        if record.step != expected:
            missing = (
                f"step {expected}"
                if record.step == expected + 1
                else f"steps {expected} to {record.step - 1}"
            )
            report.violations.append(
                Violation(f"{missing} before it: there is no record", step=record.step)
            )
        expected = record.step + 1


async def _check_step(
    store: Store,
    record: StepRecord,
    used: dict[str, int],
    members: dict[tuple[str, int], str],
    report: Audit,
) -> None:
    """Compares the step's plan with the trajectories that the ledger has committed to it. `used`
    maps ids to the step that names them, `members` maps (group, attempt) to ids."""
    step = record.step

    def violated(what: str, trajectory: str | None = None) -> None:
        report.violations.append(Violation(what, step=step, trajectory=trajectory))

    try:
        plan = Plan.of(step, record.record)
    except TrainingError as error:
        violated(f"{error}; so neither its trajectories nor their ages can be proven")
        return
    _check_used_once(plan, step, used, violated)
    if record.num_trajectories != len(plan.ids):
        violated(
            f"its record counts {record.num_trajectories} trajectories, its plan {len(plan.ids)}"
        )
    places = {name: place for place, name in enumerate(plan.ids)}
    digests: dict[str, bytes] = {}
    masked = 0
    try:
        async for stored in store.trajectories(trained_step=step):
            name = stored.trajectory.id
            for what in _wrong_with(stored, places):
                violated(what, name)
            first_id = members.setdefault(
                (stored.trajectory.group_id, stored.trajectory.attempt), name
            )
            if first_id != name:
                violated(f"it is the same attempt as {first_id}, under another id", name)
            if name in places and not stored.tokens_deleted:
                digests[name] = trajectory_digest(plan.final(stored.trajectory))
                masked += _count_ages(stored, plan, step, report)
    except StoreError as error:
        violated(f"its trajectories can't be read: {error}")
        return
    for name in plan.ids:
        if name not in digests:
            violated(
                "its plan names it, but it is not in the store as committed to this step", name
            )
    report.trained += len(digests)
    report.masked_tokens += masked
    _check_masked(plan, masked, violated)
    if all(name in digests for name in plan.ids):
        _check_digest(plan, digests, violated)


def _check_used_once(plan: Plan, step: int, used: dict[str, int], violated: Violated) -> None:
    """No trajectory may be named twice, in this plan or in an earlier one; `used` learns them."""
    for name, times in Counter(plan.ids).items():
        if times > 1:
            violated(f"its plan names it {times} times", name)
        if name in used:
            violated(f"step {used[name]} names it as well: it was trained on twice", name)
        used.setdefault(name, step)


def _check_masked(plan: Plan, masked: int, violated: Violated) -> None:
    """The plan must have left out as many tokens as are too old, and a policy that waits for fresh
    tokens none."""
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
    return wrong


def _count_ages(stored: StoredTrajectory, plan: Plan, step: int, report: Audit) -> int:
    """Adds its trained tokens to `report.ages`; returns how many are older than the bound. The
    trainer's version is step - 1."""
    counts: Counter[int] = Counter()
    for turn in stored.trajectory.turns:
        counts.update(turn.versions)
    masked = 0
    for version, count in counts.items():
        age = step - 1 - version
        if age < 0:
            what = (
                f"{count} of its tokens are of version {version}, which weights had only "
                f"after step {version}"
            )
            report.violations.append(Violation(what, step=step, trajectory=stored.trajectory.id))
        if age > plan.staleness:
            masked += count
        else:
            report.ages[age] = report.ages.get(age, 0) + count
    return masked


def _check_digest(plan: Plan, digests: Mapping[str, bytes], violated: Violated) -> None:
    altered = []
    if len(plan.digests) == len(plan.ids):
        shown = zip(plan.ids, plan.digests, strict=True)
        altered = [
            (name, digest) for name, digest in shown if digests[name].hex()[:SHOWN] != digest
        ]
    for name, digest in altered:
        now = digests[name].hex()[:SHOWN]
        violated(
            "it is not what was trained on: its tokens, log-probs, versions or rewards have the "
            f"digest {now}, then {digest}",
            name,
        )
    whole = hashlib.sha256(b"".join(digests[name] for name in plan.ids)).hexdigest()
    if whole != plan.digest and not altered:
        violated(
            f"its trajectories have the digest {whole[:SHOWN]}, its plan says "
            f"{plan.digest[:SHOWN]}: they or their order were changed"
        )


def _check_checkpoint(record: StepRecord, folder: Path, report: Audit) -> None:
    named = record.record.get("checkpoint")
    if named is None:
        return
    path = folder / named["path"]
    if not path.is_dir():
        report.gone.append(record.step)
        return
    try:
        sha256 = manifest.verify(path).sha256
    except CheckpointError as error:
        if path.is_dir():
            report.violations.append(Violation(str(error), step=record.step))
        else:  # a run that goes on has deleted it meanwhile
            report.gone.append(record.step)
        return
    (report.checkpoints if sha256 == named["sha256"] else report.remade).append(record.step)


async def _check_rest(store: Store, records: Sequence[StepRecord], report: Audit) -> None:
    """Nothing may be committed to a step that has no record."""
    committed = sum(
        count for name, count in (await store.counts()).items() if name.endswith("/committed")
    )
    if committed == report.trained:
        return
    summaries = await store.summaries(state="committed")
    since = await store.steps(
        after=max((record.step for record in records), default=0)
    )  # of a run that goes on meanwhile
    steps = {record.step for record in (*records, *since)}
    for summary in summaries:
        if summary.trained_step not in steps:
            what = f"it is committed to step {summary.trained_step}, which has no record"
            report.violations.append(Violation(what, trajectory=summary.id))


async def _account(store: Store, report: Audit) -> None:
    """Every trajectory for training that was not trained on, and every task that is not done, with
    the reason."""
    for state in ("dropped", "failed"):
        for summary in await store.summaries(state=state, split="train"):
            kind, reason = (
                (state, summary.drop_reason)
                if state == "dropped"
                else (summary.status, summary.error)
            )
            if not reason:
                report.violations.append(
                    Violation(f"it is {kind}, and no reason is recorded", trajectory=summary.id)
                )
            report.reasons.setdefault(kind, {}).setdefault(reason or "no reason", []).append(
                summary.id
            )
    counts = await store.counts()
    report.waiting = {
        state: counts[f"trajectories/train/{state}"] for state in ("ready", "reserved")
    }
    report.tasks = {
        name.removeprefix("tasks/"): count
        for name, count in counts.items()
        if name.startswith("tasks/")
    }
    report.unfinished = [task.task.id async for task in store.tasks(state="queued")]
    report.unfinished += [task.task.id async for task in store.tasks(state="leased")]
    lost: list[tuple[TaskState, dict[str, str], str]] = [
        ("poison", report.poison, "was set aside"),
        ("failed", report.failed, "failed"),
    ]
    for place, tasks, fate in lost:
        async for task in store.tasks(state=place):
            if not task.error:
                report.violations.append(
                    Violation(f"task {task.task.id} {fate}, and no error is recorded")
                )
            tasks[task.task.id] = task.error or "no error"


def _without_numbers(reason: str) -> str:
    """The first line of a reason: what reasons have in common that differ in versions, seconds and
    lengths."""
    return _NUMBER.sub("N", next(iter(reason.strip().splitlines()), "no reason"))
