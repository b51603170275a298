"""People's annotations of a run's attempts: right or wrong, a note, a better last reply, and which
of two attempts is better. They are in RUN/annotations.jsonl, never in the store, so training data
never changes. Records are only appended (records.py). The newest record of an attempt, or of a pair
of attempts, counts. An empty record withdraws the earlier ones.

Attempts without an annotation are shown first, and among them the most surprising: those whose
outcome is unlikely given the other attempts of the group.

    surprise = -log2 p,    p = (n_same + 1) / (n + 2)

for an attempt with n other attempts in its group, of which n_same have the same outcome (success or
not), by Laplace's rule of succession. Among equals, the attempt whose reward is farther from its
group's mean comes first, then the newest.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import msgspec

from agentevo.errors import ConfigError
from agentevo.observability.metrics import wilson_interval
from agentevo.runs.folder.records import add_record, read_records
from agentevo.store.records import TrajectorySummary
from agentevo.types import RemoteTurn, Trajectory, Turn

ANNOTATIONS = "annotations.jsonl"
Verdict = Literal["right", "wrong", ""]
RIGHT = "right"
WRONG = "wrong"
MAX_NOTE = 10_000
MAX_REPLY = 200_000
"""The limits are in characters."""


class Annotation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="attempt"):
    """A person's annotation of an attempt."""

    attempt: str
    at: float = 0.0
    who: str = ""
    id: str = ""
    verdict: Verdict = ""
    note: str = ""
    reply: str | None = None
    """The last reply as it should have been."""
    task: str = ""
    reward: float = 0.0
    success: bool = False
    parts: dict[str, float] = {}
    """The reward of the attempt, from its scorers and judges."""

    @property
    def says_something(self) -> bool:
        return bool(self.verdict or self.note or self.reply is not None)


class Preference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pair"):
    """A person's choice of the better of two attempts."""

    better: str
    worse: str
    equal: bool = False
    """Whether neither is better. True also withdraws an earlier preference."""
    at: float = 0.0
    who: str = ""
    id: str = ""
    note: str = ""
    rewards: tuple[float, float] = (0.0, 0.0)
    """The rewards of the better attempt and of the other."""

    @property
    def says_something(self) -> bool:
        return not self.equal


Record = Annotation | Preference


@dataclass(frozen=True)
class Annotations:
    """All annotations of a run."""

    attempts: dict[str, Annotation]
    """The newest annotation of each attempt, without empty ones, in the order of time."""
    pairs: dict[frozenset[str], Preference]
    history: Sequence[Record]
    """All annotations, the oldest first."""


def annotate(folder: Path, record: Record) -> None:
    """Appends a record. `at` is the current time unless it is set. Raises ConfigError if the record
    can't be written."""
    if not record.at:
        record = msgspec.structs.replace(record, at=time.time())
    add_record(folder / ANNOTATIONS, msgspec.to_builtins(record))


def read_annotations(folder: Path) -> Annotations:
    """All records of a run, without invalid lines and repeated records. Raises ConfigError if the
    file can't be read."""
    attempts: dict[str, Annotation] = {}
    pairs: dict[frozenset[str], Preference] = {}
    history: list[Record] = []
    ids: set[str] = set()
    for row in read_records(folder / ANNOTATIONS):
        try:
            record: Record = msgspec.convert(row, Annotation | Preference)
        except msgspec.ValidationError:
            continue

        if record.id and record.id in ids:
            continue

        ids.add(record.id)
        history.append(record)
        if isinstance(record, Annotation):
            attempts.pop(record.attempt, None)
            if record.says_something:
                attempts[record.attempt] = record
        else:
            pair_key = frozenset((record.better, record.worse))
            pairs.pop(pair_key, None)
            if record.says_something:
                pairs[pair_key] = record

    return Annotations(attempts, pairs, history)


@dataclass(frozen=True)
class Agreement:
    """The agreement of people and a judge."""

    judge: str
    counts: tuple[int, int, int, int]
    """The counts of: right and passed, right and not passed, wrong and passed, wrong and not
    passed."""

    @property
    def num(self) -> int:
        return sum(self.counts)

    @property
    def rate(self) -> float | None:
        """The share of attempts on which they agree."""
        return (self.counts[0] + self.counts[3]) / self.num if self.num else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the rate, by Wilson's formula."""
        return None if self.rate is None else wilson_interval(self.rate, self.num)

    @property
    def kappa(self) -> float | None:
        """Cohen's kappa (1960), (p_o - p_e) / (1 - p_e): the agreement beyond the chance agreement
        of two raters who say `right` equally often. None if both always give the same verdict, so
        that p_e = 1."""
        if self.rate is None:
            return None
        a, b, c, d = self.counts
        n = self.num
        chance = ((a + b) * (a + c) + (c + d) * (b + d)) / (n * n)
        return None if chance == 1 else (self.rate - chance) / (1 - chance)


def agreement(judge: str, verdicts: Iterable[tuple[bool, bool]]) -> Agreement:
    """`verdicts`: pairs (people say right, the judge passed it)."""
    counts = [0, 0, 0, 0]
    for right, has_passed in verdicts:
        counts[2 * (not right) + (not has_passed)] += 1
    return Agreement(judge, (counts[0], counts[1], counts[2], counts[3]))


def calibration(annotations: Annotations, passed_from: float = 0.5) -> list[Agreement]:
    """Compares people's verdicts with the attempts' success and with each part of the reward. A
    part passes an attempt if it is at least `passed_from` (a penalty, which is never above 0, if it
    is 0). For pairs of attempts, compares whether the one that people prefer has the higher reward
    (`reward, of two`). Equal rewards count as disagreement."""
    judged = [attempt for attempt in annotations.attempts.values() if attempt.verdict]
    rows = [
        agreement("success", ((attempt.verdict == RIGHT, attempt.success) for attempt in judged))
    ]
    names = sorted({name for attempt in judged for name in attempt.parts})
    for name in names:
        values = [
            (attempt.verdict == RIGHT, attempt.parts[name])
            for attempt in judged
            if name in attempt.parts
        ]
        numbers = [value for _, value in values]
        least = 0.0 if min(numbers) < 0 and max(numbers) <= 0 else passed_from
        rows.append(
            agreement(f"{name} ≥ {least:g}", ((right, value >= least) for right, value in values))
        )

    pairs = [pair.rewards for pair in annotations.pairs.values()]
    rows.append(agreement("reward, of two", ((True, better > worse) for better, worse in pairs)))
    return [row for row in rows if row.num]


def last_answer(trajectory: Trajectory) -> Turn | RemoteTurn | None:
    """The reply that an annotation may edit: the last trained turn."""
    turns: Sequence[Turn | RemoteTurn] = trajectory.remote_turns or trajectory.turns
    return turns[-1] if turns else None


def surprises(summaries: Sequence[TrajectorySummary]) -> dict[str, tuple[float, float]]:
    """The (bits, distance from the mean reward) of each completed attempt, by its id."""
    groups: dict[str, list[TrajectorySummary]] = defaultdict(list)
    for summary in summaries:
        if summary.status == "completed":
            groups[summary.group_id].append(summary)

    surprise_by_id = {}
    for members in groups.values():
        mean = sum(member.reward for member in members) / len(members)
        for summary in members:
            same = sum(peer.success == summary.success for peer in members) - 1
            bits = -math.log2((same + 1) / (len(members) + 1))
            surprise_by_id[summary.id] = (bits, abs(summary.reward - mean))

    return surprise_by_id


def attempts_to_label(
    summaries: Sequence[TrajectorySummary], annotations: Annotations
) -> list[str]:
    """The ids of the completed attempts without an annotation, in the order in which they are
    shown."""
    surprise = surprises(summaries)
    unlabelled = [
        summary
        for summary in summaries
        if summary.id in surprise and summary.id not in annotations.attempts
    ]
    unlabelled.sort(
        key=lambda summary: (
            *(-part for part in surprise[summary.id]),
            -summary.written_at,
            summary.id,
        )
    )
    return [summary.id for summary in unlabelled]


def pairs_to_compare(
    summaries: Sequence[TrajectorySummary], annotations: Annotations
) -> list[tuple[str, str]]:
    """Two attempts of each group that were not compared yet: the best and the worst if rewards
    differ, else the first two. The groups with the largest surprise come first."""
    surprise = surprises(summaries)
    groups: dict[str, list[TrajectorySummary]] = defaultdict(list)
    for summary in summaries:
        if summary.id in surprise:
            groups[summary.group_id].append(summary)

    scored_pairs = []
    for members in groups.values():
        if len(members) < 2:
            continue

        ranked = sorted(members, key=lambda member: (member.reward, member.attempt))
        first = ranked[-1]
        second = ranked[0]
        if frozenset((first.id, second.id)) not in annotations.pairs:
            most = max(surprise[member.id] for member in members)
            # The better one is not always shown first, because that would be a hint.
            pair = (
                (first.id, second.id) if first.attempt < second.attempt else (second.id, first.id)
            )
            scored_pairs.append((most, pair))

    scored_pairs.sort(key=lambda scored: (*(-part for part in scored[0]), scored[1]))
    return [pair for _, pair in scored_pairs]


def annotation_of(
    trajectory: Trajectory,
    *,
    verdict: str = "",
    note: str = "",
    reply: str | None = None,
    who: str = "",
    id: str = "",
) -> Annotation:
    """The record of a person's annotation of an attempt, with the scorers' results. Raises
    ConfigError if it can't be stored, or if there is no last reply to edit."""
    if verdict not in ("right", "wrong", ""):
        raise ConfigError("a verdict is right, wrong, or none")

    if len(note) > MAX_NOTE or len(reply or "") > MAX_REPLY:
        raise ConfigError(
            f"a note has at most {MAX_NOTE:,} characters, an edited reply {MAX_REPLY:,}"
        )

    if reply is not None and last_answer(trajectory) is None:
        raise ConfigError("this attempt has no reply to edit")

    return Annotation(
        attempt=trajectory.id,
        who=who,
        id=id,
        verdict=cast("Verdict", verdict),
        note=note.strip(),
        reply=reply,
        task=trajectory.task_id,
        reward=trajectory.reward,
        success=trajectory.success,
        parts=dict(trajectory.reward_parts),
    )


def preference_of(
    better: str,
    shown_first: Trajectory,
    shown_second: Trajectory,
    *,
    who: str = "",
    id: str = "",
) -> Preference:
    """The record of a person's choice between two attempts, by id. Empty for neither. Raises
    ConfigError for another id."""
    if better not in ("", shown_first.id, shown_second.id):
        raise ConfigError("`better` must be one of these two attempts, or neither")

    first, second = (
        (shown_second, shown_first) if better == shown_second.id else (shown_first, shown_second)
    )
    return Preference(
        better=first.id,
        worse=second.id,
        equal=not better,
        who=who,
        id=id,
        rewards=(first.reward, second.reward),
    )
