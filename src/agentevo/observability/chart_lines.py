"""Metrics of a run as lines of a chart: by step, by tokens, or by time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from agentevo.observability.metrics_table import Measured
from agentevo.pages.charts import Chart, Line

Axis = Literal["step", "tokens", "time"]
NAMES = {"step": "step", "tokens": "tokens", "time": "hours"}
"""What the axis is called."""
TOKENS = ("trainer/trained_tokens", "sft/tokens", "engine/generated_tokens")
"""Tokens of a step; the first that was logged is counted."""
MOST_POINTS = 1500
PAUSE_S = 6 * 3600.0
"""Between two rows: a longer one is a run that was stopped, and counts for nothing."""


def is_share(metric: str) -> bool:
    """Whether its values are shares, to be drawn from 0 to 1."""
    return any(word in metric for word in ("success", "accurac"))


def places(view: Measured, axis: Axis) -> Sequence[float]:
    """Where each row of the table stands on the axis."""
    table, num = view.table, view.num_rows
    if axis == "time":
        times = list(table.times[:num])
        gaps = [
            min(max(later - earlier, 0.0), PAUSE_S) if math.isfinite(later - earlier) else 0.0
            for earlier, later in pairwise(times)
        ]
        return [seconds / 3600 for seconds in accumulate(gaps, initial=0.0)] if times else []
    if axis == "tokens":
        name = next((name for name in TOKENS if name in table.columns), None)
        if name is not None:
            rows, values = table.series(name)
            sums = list(accumulate((v if math.isfinite(v) else 0.0) for v in values))
            counted = [bisect_right(rows, row) for row in range(num)]
            return [sums[place - 1] if place else 0.0 for place in counted]
    return [float(step) for step in table.steps[:num]]


def line_of(
    view: Measured, metric: str, axis: Axis = "step"
) -> tuple[list[float], list[float]] | None:
    """(x, values) of a metric; None where it was never a number."""
    rows, values = view.table.series(metric)
    number = sum(1 for row in rows if row < view.num_rows)
    rows, values = rows[:number], values[:number]
    if not any(map(math.isfinite, values)):
        return None
    where = places(view, axis)
    return thinned([where[row] for row in rows], list(values))


def thinned(
    x: list[float], values: list[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most about so many points: of each stretch the lowest and the highest, so that no peak is
    lost."""
    if len(values) <= most:
        return x, values
    stretch = math.ceil(2 * len(values) / most)
    kept: set[int] = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        finite = [
            place
            for place in range(start, min(start + stretch, len(values)))
            if math.isfinite(values[place])
        ]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    order = sorted(kept)
    return [x[place] for place in order], [values[place] for place in order]


def chart_of(view: Measured, metric: str, title: str = "", axis: Axis = "step") -> Chart | None:
    """The chart of one metric; None where it was never a number."""
    line = line_of(view, metric, axis)
    if line is None:
        return None
    return Chart(
        title or metric,
        line[0],
        [Line(metric, line[1])],
        share=is_share(metric),
        name_of_x=NAMES[axis],
    )
