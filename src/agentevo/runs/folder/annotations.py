"""People's annotations of a run's attempts: right or wrong, a note, a better last reply, and which
of two attempts is better. They are in RUN/annotations.jsonl, never in the store, so training data
never changes. Records are only appended (records.py). The newest record of an attempt, or of a pair
of attempts, counts. An empty record withdraws the earlier ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from agentevo.observability.metrics import wilson_interval
from agentevo.runs.folder.records import add_record, read_records

ANNOTATIONS = "annotations.jsonl"
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
    verdict: Literal["right", "wrong", ""] = ""
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
