"""The current state of a run as plain data: facts, time left, failures by kind, and the time of
each phase."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from typing import Protocol

from agentevo.observability.metrics_table import Measured
from agentevo.observability.pages import words
from agentevo.observability.run_warnings import STEP_METRIC

PACE_STEPS = 20
"""The number of last steps that measure the pace of the run."""
SHOWN_STEPS = 40
"""The number of last steps whose time is divided among phases."""
PHASES = (
    ("gen", "sampling"),
    ("adv", "rewards and advantages"),
    ("update_actor", "update"),
    ("update_weights", "publishing weights"),
    ("testing", "evaluation"),
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


def time_shares(view: Measured) -> list[tuple[str, float]]:
    """(phase, its share of the time of the last SHOWN_STEPS steps), without phases of less than
    half a percent."""
    steps, _ = view.table.series(STEP_METRIC)
    since = steps[-SHOWN_STEPS:][0] if steps else 0
    spent = {}
    for name, phase in PHASES:
        rows, seconds = view.table.series(f"timing_s/{name}")
        newest = seconds[bisect_left(rows, since) :]
        spent[phase] = sum(value for value in newest if math.isfinite(value))

    total = sum(spent.values())
    return [(phase, s / total) for phase, s in spent.items() if s > 0 and s >= 0.005 * total]
