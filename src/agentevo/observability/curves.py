"""Metrics as curves: the points of a metric by step, their running mean, and the confidence
interval of a success rate. Nothing is drawn here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentevo.observability.metrics import EvaluationMetrics, MetricsRow, read_evaluations

SMOOTHING = 2
"""A smoothed curve is the mean over this many neighbours on each side."""


Series = tuple[list[float], list[float]]
"""Steps and values, equally long; NaN is a gap."""


def series(rows: Sequence[MetricsRow], key: str) -> Series:
    """The logged values of one metric by step; rows without it are skipped, null becomes NaN."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [float(step or 0) for step, _ in points], [
        math.nan if value is None else float(value) for _, value in points
    ]


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over each value and its finite neighbours; centred, so that a rise is not drawn later
    than it happened. NaN stays NaN."""
    smoothed = []
    for index, value in enumerate(values):
        near = [
            neighbour
            for neighbour in values[max(index - SMOOTHING, 0) : index + SMOOTHING + 1]
            if math.isfinite(neighbour)
        ]
        smoothed.append(sum(near) / len(near) if math.isfinite(value) else math.nan)

    return smoothed


def wilson_interval(rate: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a success rate measured on `n` tasks (Wilson 1927); stays within
    0..1 also at 0% and 100%."""
    rate = min(max(rate, 0.0), 1.0)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def held_out(rows: Sequence[MetricsRow]) -> dict[str, list[tuple[float, EvaluationMetrics]]]:
    """Evaluations that have a success rate, by environment, as (step, evaluation) in the order of
    the steps.

    Of several at one step the last counts: at step 0 an earlier one was measured before the cold
    start.
    """
    by_environment: dict[str, dict[float, EvaluationMetrics]] = {}
    for row in rows:
        for result in read_evaluations(row):
            if result.success is not None:
                by_environment.setdefault(result.environment, {})[float(row["step"] or 0)] = result
    return {environment: list(points.items()) for environment, points in by_environment.items()}


def has_numbers(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)
