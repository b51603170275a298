"""The run's numbers on disk, `metrics.jsonl`, one JSON object a line. They also go to the run's
trackers.

    {"step": 12, "time": 1771234567.8, "actor/entropy": 1.02, "critic/score/mean": 0.41, ...}

Invariants: a line is written whole and flushed before `log` returns. `step` never decreases along
the file. After `resume(s)` no row has `step > s`, so a resumed run has each row once. Metric names
are verl's, and names are sorted. A non-finite number is written as null, because JSON has no NaN
and a reader must not fail on a diverged run. Trackers get each step once, with its rows merged into
one, when `deliver_to_trackers` reports the step as committed. Not guaranteed: the last line may not
survive a power failure (the file isn't fsynced).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from agentevo.errors import TrainingError, UnusableStoreError
from agentevo.observability.trackers import TrackedRow, TrackedTable, Tracking
from agentevo.observability.trackers.tracking import merge_rows
from agentevo.runtime.files import must_write, write_atomic
from agentevo.runtime.parsing import ParseError, check_file, parse_json

MetricsRow = dict[str, float | None]
"""A line of metrics.jsonl: `step`, `time` (Unix seconds) and metrics. None means a number that was
not finite."""

RESERVED = ("step", "time")
EVALUATION_KEY = re.compile(
    r"^val-(?:core|aux)/(?P<environment>.+?)/"
    r"(?P<name>(?:success|reward|failed)/(?:greedy|sampled)|random|optimal|n)$"
)
MAX_FAILED_SHARE = 0.02
"""Above this share, the missing outcomes of the failed attempts could explain the whole difference
between two evaluations."""


class EvaluationMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The agent and the two reference players on the held-out tasks of an environment. Success is
    from 0 to 1."""

    environment: str
    success_greedy: float | None = None
    success_sampled: float | None = None
    reward_greedy: float | None = None
    reward_sampled: float | None = None
    random: float | None = None
    """The success of a player that chooses valid actions uniformly at random, under the agent's
    limits."""
    optimal: float | None = None
    n: float | None = None
    """The number of held-out tasks."""
    failed_greedy: float | None = None
    """The share of attempts that failed. Success and reward are means over the others."""
    failed_sampled: float | None = None

    @property
    def success(self) -> float | None:
        """The main number: greedy, or sampled if the evaluation has no greedy attempts."""
        return self.success_sampled if self.success_greedy is None else self.success_greedy


def read_evaluations(metrics: Mapping[str, float | None]) -> list[EvaluationMetrics]:
    """The evaluations in a row, by environment. Keys are `val-core/{environment}/{success/greedy,
    random, ...}`. Other keys are ignored."""
    scores_of: dict[str, dict[str, float | None]] = {}
    for key, value in metrics.items():
        match = EVALUATION_KEY.match(key)
        if match:
            scores_of.setdefault(match["environment"], {})[match["name"].replace("/", "_")] = value
    return [
        EvaluationMetrics(environment=name, **scores) for name, scores in sorted(scores_of.items())
    ]


def held_out(rows: Sequence[MetricsRow]) -> dict[str, list[tuple[float, EvaluationMetrics]]]:
    """Evaluations that have a success rate, by environment, as (step, evaluation) in the order of
    the steps. Of several at one step the last counts: at step 0 an earlier one was measured before
    the cold start."""
    by_environment: dict[str, dict[float, EvaluationMetrics]] = {}
    for row in rows:
        for result in read_evaluations(row):
            if result.success is not None:
                by_environment.setdefault(result.environment, {})[float(row["step"] or 0)] = result
    return {environment: list(points.items()) for environment, points in by_environment.items()}


def wilson_interval(rate: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a success rate measured on `n` tasks (Wilson 1927); stays within
    0..1 also at 0% and 100%."""
    rate = min(max(rate, 0.0), 1.0)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def not_comparable(before: Sequence[EvaluationMetrics], after: Sequence[EvaluationMetrics]) -> str:
    """The reason why the success of two evaluations can't be compared: more than MAX_FAILED_SHARE
    of the attempts failed. Empty if it can."""
    shares = [
        max((evaluation.failed_greedy or 0.0 for evaluation in evaluations), default=0.0)
        for evaluations in (before, after)
    ]
    if max(shares) <= MAX_FAILED_SHARE:
        return ""

    return (
        f"Before and after can't be compared: {shares[0]:.0%} of the held-out attempts failed "
        f"before and {shares[1]:.0%} after, and the numbers count only the others."
    )


def read_metrics(path: Path | str) -> list[MetricsRow]:
    """All rows, in the order of the file. An incomplete last line (the process died while it wrote
    the line) is left out. A missing file has no rows.

    Raises `UnusableStoreError` for any other line that is not a metrics row.
    """
    return [row for row, _ in _read_rows(Path(path))]


def digests_by_step(path: Path) -> dict[int, str]:
    """Maps a step to the sha256 of the file's rows up to the last row of that step, in order.
    Raises the errors of `read_metrics`."""
    digest = hashlib.sha256()
    digests = {}
    for row, line in _read_rows(path):
        digest.update(line + b"\n")
        digests[int(row["step"] or 0)] = digest.hexdigest()
    return digests


def _read_rows(path: Path) -> list[tuple[MetricsRow, bytes]]:
    if not path.exists():
        return []

    check_file(path)
    lines = path.read_bytes().split(b"\n")
    rows: list[tuple[MetricsRow, bytes]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue

        try:
            row = parse_json(line)
        except ParseError:
            row = None

        if _is_row(row):
            rows.append((row, line))
        elif number < len(lines):
            raise UnusableStoreError(
                f"{path}, line {number} is not a metrics row (a JSON object of numbers with an "
                "integer 'step'): delete that line and try again"
            )

    return rows


def _is_row(row: object) -> bool:
    """Whether a row is an object of numbers (or nulls) with a whole `step`."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    return all(value is None or type(value) in (int, float) for value in row.values())


def _json_number(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


class MetricsLog:
    """Appends to `metrics.jsonl`, after it has repaired an incomplete last line of an existing
    file. Close it, or use it in a `with`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.tracking: Tracking | None = None
        """The run's trackers. Their owner closes them."""
        self._undelivered: dict[int, TrackedRow] = {}
        """Maps a step to the row that trackers don't have yet."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = _read_rows(self.path)
        self._last_step = int(rows[-1][0]["step"] or 0) if rows else 0

        if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._rewrite([line for _, line in rows])

        self._begin_at([line for _, line in rows])

    @property
    def digest(self) -> str:
        """The sha256 of the rows so far, as they are in the file."""
        return self._digest.hexdigest()

    def log(
        self, step: int, metrics: Mapping[str, float], tables: Sequence[TrackedTable] = ()
    ) -> None:
        """Appends one row. Values may be anything that `float()` accepts. `tables` go only to
        trackers. Raises `TrainingError` if the row would break the file's invariants."""
        taken = [key for key in RESERVED if key in metrics]
        if taken:
            raise TrainingError(
                f"metrics of step {step}: the name {taken[0]!r} belongs to the row itself; "
                "rename the metric"
            )

        if step < self._last_step:
            raise TrainingError(
                f"metrics of step {step} come after step {self._last_step} in {self.path}: call "
                f"resume({step - 1}) first"
            )

        now = round(time.time(), 3)
        row = {
            "step": step,
            "time": now,
            **{key: _json_number(metrics[key]) for key in sorted(metrics)},
        }
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with must_write(self.path):
            # the next MetricsLog repairs the incomplete line
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self._digest.update(line)
        self._last_step = step
        if self.tracking:
            numbers = {name: float(value) for name, value in metrics.items()}
            new = TrackedRow(step=step, time=now, metrics=numbers, tables=tables)
            self._undelivered[step] = merge_rows(self._undelivered.get(step), new)

    def deliver_to_trackers(self, step: int) -> None:
        """Passes every step up to this one, which is committed, to the trackers."""
        for ready in sorted(ahead_step for ahead_step in self._undelivered if ahead_step <= step):
            row = self._undelivered.pop(ready)
            if self.tracking is not None:
                self.tracking.put(row)
        if self.tracking is not None:
            self.tracking.pass_messages()

    def resume(self, step: int) -> None:
        """Deletes every row after `step`, because the run resumes from the checkpoint of that step.
        Trackers get the remaining rows again, and add those that they lack."""
        self._file.close()
        rows = [(row, line) for row, line in _read_rows(self.path) if (row["step"] or 0) <= step]
        lines = [line for _, line in rows]
        self._rewrite(lines)
        self._undelivered.clear()

        for row in (row for row, _ in rows) if self.tracking else ():
            numbers = {
                name: math.nan if value is None else value
                for name, value in row.items()
                if name not in RESERVED
            }
            old = TrackedRow(
                step=int(row["step"] or 0), time=row.get("time") or 0.0, metrics=numbers
            )
            self._undelivered[old.step] = merge_rows(self._undelivered.get(old.step), old)

        self.deliver_to_trackers(step)
        self._begin_at(lines)
        self._last_step = min(self._last_step, step)

    def close(self) -> None:
        """Raises nothing: `log` has already written every row."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin_at(self, lines: list[bytes]) -> None:
        """Opens the file, which contains these lines, for appending."""
        self._digest = hashlib.sha256(b"".join(line + b"\n" for line in lines))
        with must_write(self.path):
            self._file = self.path.open("ab", buffering=0)

    def _rewrite(self, lines: list[bytes]) -> None:
        """Replaces the file's content by these lines in one rename, so a reader or a crash sees the
        old file or the new one."""
        with must_write(self.path):
            write_atomic(self.path, b"".join(line + b"\n" for line in lines), durable=True)
