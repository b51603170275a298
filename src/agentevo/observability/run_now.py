"""The current state of a run as plain data: facts, time left, failures by kind, and the time of
each phase."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentevo.observability.metrics_table import Measured
from agentevo.observability.signs import STEP_METRIC
from agentevo.pages import words

PACE_STEPS = 20
"""The number of last steps that measure the pace of the run."""
SHOWN_STEPS = 40
"""The number of steps in the timeline."""
PHASES = (
    ("gen", "sampling"),
    ("adv", "rewards and advantages"),
    ("update_actor", "update"),
    ("update_weights", "publishing weights"),
)
"""(metric below timing_s/, name) in the order of a step."""
NOW = (
    ("Reward", "critic/score/mean", words.number, ""),
    ("Success", "train/success", words.percent, ""),
    ("Loss", "sft/loss", words.number, ""),
    ("Tokens a second", "perf/throughput", words.count, ""),
    ("MFU", "perf/mfu", words.percent, ""),
    ("Seconds a step", "timing_s/step", words.number, ""),
    ("Entropy", "actor/entropy", words.number, "nats"),
    ("Gradient norm", "actor/grad_norm", words.number, ""),
    ("Staleness", "staleness/mean", words.number, "versions"),
    ("Engines", "engine/engines", words.count, ""),
    ("Waiting requests", "engine/waiting", words.count, ""),
    ("Groups under way", "sampler/groups_running", words.count, ""),
    ("Memory", "perf/cpu_memory_used_gb", words.number, "GiB"),
)
"""(label, metric, format, unit) of the facts. Each is shown if its metric was logged."""


class RunUnderWay(Measured, Protocol):
    """A run that may still be running."""

    @property
    def state(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def planned(self) -> int | None: ...


def facts(view: Measured) -> list[tuple[str, str, str]]:
    """The (label, value, unit) of the newest step."""
    entries = []
    for label, metric, written, unit in NOW:
        value = view.table.latest(metric)
        if value is not None:
            entries.append((label, written(value), unit))
    return entries


def seconds_left(view: RunUnderWay, now: float | None = None) -> float | None:
    """The time left at the pace of the last steps, including the time between them. None for a run
    that is not running, or has no end."""
    if view.state != "running" or not view.planned or view.step >= view.planned:
        return None

    rows, lasted = view.table.series(STEP_METRIC)
    if not rows:
        return None

    ends = [view.table.times[row] for row in rows[-PACE_STEPS:]]
    pace = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else lasted[-1]
    if not math.isfinite(pace) or pace <= 0:
        return None

    elapsed_s = max((time.time() if now is None else now) - ends[-1], 0.0)
    return max((view.planned - view.step) * pace - elapsed_s, 0.0)


def counts_below(view: Measured, prefix: str) -> list[tuple[str, float, float]]:
    """(kind, in the newest step, in all) of the counts that are logged as PREFIX/kind, the most
    frequent first."""
    newest, _ = view.table.series(STEP_METRIC)
    counts = []
    for name in sorted(view.table.columns):
        if not name.startswith(prefix):
            continue
        _, values = view.table.series(name)
        total = sum(value for value in values if math.isfinite(value))
        last = view.table.value_at(name, newest[-1]) if newest else None
        if total:
            counts.append((name.removeprefix(prefix), last or 0.0, total))

    return sorted(counts, key=lambda count: -count[2])


@dataclass(frozen=True)
class RunSegment:
    """A stretch of time of a step's phase."""

    step: int
    phase: str
    place: int
    """The number of the phase, which determines its colour."""
    start_s: float
    lasted_s: float


def timeline(view: Measured) -> list[RunSegment]:
    """The phases of the last SHOWN_STEPS steps, each at its time. Seconds count from the first of
    them. Evaluations and checkpoints are between the steps."""
    rows, lasted = view.table.series(STEP_METRIC)
    shown = list(zip(rows, lasted, strict=False))[-SHOWN_STEPS:]
    segments: list[RunSegment] = []
    for row, duration_s in shown:
        end = view.table.times[row]
        if not (math.isfinite(end) and math.isfinite(duration_s)):
            continue

        at = end - duration_s
        for index, (name, words_of_it) in enumerate(PHASES):
            value = view.table.value_at(f"timing_s/{name}", row)
            if value is None or value <= 0:
                continue
            segments.append(RunSegment(view.table.steps[row], words_of_it, index, at, value))
            at += value

    segments += _evaluations(view, shown)
    first = min((segment.start_s for segment in segments), default=0.0)
    return [
        RunSegment(
            segment.step, segment.phase, segment.place, segment.start_s - first, segment.lasted_s
        )
        for segment in segments
    ]


def _evaluations(view: Measured, shown: Sequence[tuple[int, float]]) -> list[RunSegment]:
    if not shown:
        return []

    begins = view.table.times[shown[0][0]] - shown[0][1]
    rows, lasted = view.table.series("timing_s/testing")
    return [
        RunSegment(view.table.steps[row], "evaluation", len(PHASES), end - seconds, seconds)
        for row, seconds in zip(rows, lasted, strict=False)
        if math.isfinite(end := view.table.times[row])
        and math.isfinite(seconds)
        and end - seconds >= begins
    ]


def shares(segments: Sequence[RunSegment]) -> list[tuple[str, int, float]]:
    """(phase, its colour's number, its share of the time that the segments take), without those of
    less than half a percent."""
    total = sum(segment.lasted_s for segment in segments)
    sums: dict[tuple[str, int], float] = {}
    for segment in segments:
        key = segment.phase, segment.place
        sums[key] = sums.get(key, 0.0) + segment.lasted_s
    return [
        (phase, place, seconds / total)
        for (phase, place), seconds in sorted(sums.items(), key=lambda item: item[0][1])
        if seconds >= 0.005 * total
    ]
