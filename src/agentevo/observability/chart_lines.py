"""Metrics of runs as lines of a chart: by step, by tokens, or by time; of several runs of one
setting as their mean with a band."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

import numpy as np

from agentevo.observability.metrics_table import Measured
from agentevo.observability.pages.charts import Chart, ChartLine

Axis = Literal["step", "tokens", "time"]
X = TypeVar("X", int, float)
NAMES = {"step": "step", "tokens": "tokens", "time": "hours"}
"""The name of each axis."""
TOKENS = ("trainer/trained_tokens", "sft/tokens", "engine/generated_tokens")
"""Tokens of a step; the first that was logged is counted."""
COMPARED = (
    "critic/score/mean",
    "critic/rewards/mean",
    "train/success",
    "sft/loss",
    "actor/entropy",
    "actor/grad_norm",
    "response_length/mean",
    "perf/throughput",
    "group/zero_std_ratio",
)
"""The default metrics of a comparison, after held-out success."""
MAIN = (*COMPARED, "actor/ppo_kl", "distillation/reverse_kl", "staleness/mean")
"""The metrics of a run's first page."""
TITLES = {
    "train/success": "Success in training",
    "critic/score/mean": "Reward in training",
    "critic/rewards/mean": "Reward in training less the KL penalty",
    "sft/loss": "Loss of the batches, nats a token",
    "sft/eval/loss": "Loss of held-out conversations, nats a token",
    "sft/eval/token_accuracy": "Held-out tokens ranked first",
    "sft/tasks/pass@1": "Success of sampled attempts at training tasks (pass@1)",
    "sft/tasks/gap": "Gap between pass@k and pass@1 on training tasks",
    "sft/tasks/entropy": "Entropy of sampled attempts at training tasks, nats a token",
    "actor/grad_norm": "Gradient norm before clipping",
    "actor/entropy": "Entropy, nats a token",
    "actor/ppo_kl": "KL to the sampling policy, nats a token",
    "actor/pg_clipfrac": "Clipped tokens, share",
    "distillation/reverse_kl": "KL to the teacher, nats a token",
    "group/reward_std/mean": "Spread of rewards inside groups",
    "group/zero_std_ratio": "Groups whose rewards are all equal, share",
    "critic/vf_explained_var": "Returns that the critic predicts, share of variance",
    "process_reward/accuracy": "Outcomes that the process reward predicts",
    "preference/rewards/accuracies": "Pairs in the right order",
    "staleness/mean": "Staleness: versions of the weights between sampling and training",
    "prompt_length/mean": "Tokens of a prompt",
    "response_length/mean": "Tokens of a completion",
    "response_length/clip_ratio": "Completions cut by the limit, share",
    "num_turns/mean": "Turns of an attempt",
    "perf/throughput": "Tokens a second",
}
"""The title of a metric's chart; a metric that is not listed has its name as title."""
_HELD_OUT = re.compile(r"val-core/(?P<task>.+)/(?P<what>[^/]+)/(?P<decoding>greedy|sampled)")
MOST_POINTS = 1500
PAUSE_S = 6 * 3600.0
"""The longest gap between two rows in seconds; a longer one is a stopped run, and is not
counted."""


def title_of(metric: str) -> str:
    """The title of a metric's chart."""
    if match := _HELD_OUT.fullmatch(metric):
        what = match["what"].replace("_", " ")
        return f"Held-out {what}, {match['decoding']}: {match['task']}"
    return TITLES.get(metric, metric)


def is_share(metric: str) -> bool:
    """Whether its values are shares, to be drawn from 0 to 1."""
    return any(word in metric for word in ("success", "accurac"))


def metrics_to_compare(names: Sequence[str]) -> list[str]:
    """The logged metrics that a comparison shows by default."""
    held_out = [name for name in names if name.startswith("val-core/") and name.endswith("/greedy")]
    rates = [name for name in held_out if is_share(name)]
    return rates + [name for name in COMPARED if name in names]


def places(view: Measured, axis: Axis) -> Sequence[float]:
    """The place of each row of the table on the axis."""
    table = view.table
    num = view.num_rows
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
            num_before = [bisect_right(rows, row) for row in range(num)]
            return [sums[place - 1] if place else 0.0 for place in num_before]

    return [float(step) for step in table.steps[:num]]


def line_of(
    view: Measured, metric: str, axis: Axis = "step"
) -> tuple[list[float], list[float]] | None:
    """(x, values) of a metric; None if it was never a number."""
    rows, values = view.table.series(metric)
    number = sum(1 for row in rows if row < view.num_rows)
    rows = rows[:number]

    values = values[:number]
    if not any(map(math.isfinite, values)):
        return None

    where = places(view, axis)
    return thin_peaks([where[row] for row in rows], list(values))


def thin_peaks(
    x: list[X], values: list[float], most: int = MOST_POINTS
) -> tuple[list[X], list[float]]:
    """Reduces a line to about `most` points: the lowest and the highest of each stretch, so that no
    peak is lost."""
    if len(values) <= most:
        return x, values

    stretch = math.ceil(2 * len(values) / most)
    chosen_places: set[int] = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        finite = [
            place
            for place in range(start, min(start + stretch, len(values)))
            if math.isfinite(values[place])
        ]
        if finite:
            chosen_places |= {
                min(finite, key=values.__getitem__),
                max(finite, key=values.__getitem__),
            }

    order = sorted(chosen_places)
    return [x[place] for place in order], [values[place] for place in order]


def chart_of(view: Measured, metric: str, axis: Axis = "step") -> Chart | None:
    """The chart of one metric; None if it was never a number."""
    line = line_of(view, metric, axis)
    if line is None:
        return None

    return Chart(
        title_of(metric),
        line[0],
        [ChartLine(metric, line[1])],
        share=is_share(metric),
        name_of_x=NAMES[axis],
    )


def _between(line: tuple[list[float], list[float]], where: list[float]) -> list[float]:
    """A line's values at other places; NaN before its first point and after its last one."""
    finite_points = [(x, value) for x, value in zip(*line, strict=True) if math.isfinite(value)]
    xs = [x for x, _ in finite_points]
    values = [value for _, value in finite_points]
    return np.interp(where, xs, values, left=math.nan, right=math.nan).tolist()


def band_chart(
    settings: Sequence[tuple[str, Sequence[Measured]]], metric: str, axis: Axis = "step"
) -> Chart | None:
    """One line for each setting, which is a name and its runs: the mean at places where all of them
    have a value, and the band from the lowest to the highest. By tokens and by time, runs have
    different places, so their points are interpolated linearly. None if the metric was never a
    number."""
    drawn = [
        [line for view in views if (line := line_of(view, metric, axis))] for _, views in settings
    ]
    where = sorted({x for lines in drawn for line in lines for x in line[0]})
    if not where:
        return None

    if axis != "step" and any(len(lines) > 1 for lines in drawn):
        where = thin_peaks(where, [0.0] * len(where))[0]
        drawn = [[(where, _between(line, where)) for line in lines] for lines in drawn]

    at = {x: place for place, x in enumerate(where)}
    shown = []
    for color, ((name, _), lines) in enumerate(zip(settings, drawn, strict=True)):
        values_at: list[list[float]] = [[] for _ in where]
        for xs, values in lines:
            for x, value in zip(xs, values, strict=True):
                if math.isfinite(value):
                    values_at[at[x]].append(value)

        num_runs = len(lines)
        full = [
            point_values if num_runs and len(point_values) >= num_runs else []
            for point_values in values_at
        ]
        bands = num_runs > 1
        shown.append(
            ChartLine(
                name,
                [
                    statistics.fmean(point_values) if point_values else math.nan
                    for point_values in full
                ],
                low=[min(point_values) if point_values else math.nan for point_values in full]
                if bands
                else None,
                high=[max(point_values) if point_values else math.nan for point_values in full]
                if bands
                else None,
                color=color,
            )
        )

    return Chart(title_of(metric), where, shown, share=is_share(metric), name_of_x=NAMES[axis])
