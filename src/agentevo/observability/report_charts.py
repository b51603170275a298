"""The charts of a report: the main metrics, as in the dashboard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentevo.observability.chart_lines import MOST_POINTS, TITLES, chart_of, thin_peaks
from agentevo.observability.metrics import (
    RESERVED,
    EvaluationMetrics,
    MetricsRow,
    held_out,
    wilson_interval,
)
from agentevo.observability.metrics_table import Measured, MetricsTable
from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.observability.run_now import PHASES

LEARNING = ("train/success", "critic/score/mean", "critic/rewards/mean")
SUPERVISED = (
    "sft/loss",
    "sft/eval/loss",
    "sft/eval/token_accuracy",
    "sft/tasks/pass@1",
    "sft/tasks/gap",
    "sft/tasks/entropy",
)
OPTIMISATION = (
    "actor/grad_norm",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/pg_clipfrac",
    "distillation/reverse_kl",
    "group/reward_std/mean",
    "group/zero_std_ratio",
    "critic/vf_explained_var",
    "process_reward/accuracy",
    "preference/rewards/accuracies",
    "staleness/mean",
)
LENGTHS = ("prompt_length/mean", "num_turns/mean", "response_length/clip_ratio")
SPEED = (
    ("perf/throughput", "whole step"),
    ("engine/tokens_per_s", "engine, new tokens"),
    ("perf/tokens_per_s_logical", "trainer"),
)
TIMES = (
    *((f"timing_s/{phase}", name) for phase, name in PHASES),
    ("timing_s/save_checkpoint", "checkpoints"),
)
PARTS = "reward_parts/"
MOST_PARTS = 8


class RunColumns(NamedTuple):
    """The rows of a run, as columns."""

    table: MetricsTable
    num_rows: int


class ReportCharts(NamedTuple):
    """The charts by section; an empty list where none of its metrics was logged."""

    learning: list[Chart]
    supervised: list[Chart]
    rewards: list[Chart]
    optimisation: list[Chart]
    lengths: list[Chart]
    speed: list[Chart]


def columns_of(rows: Sequence[MetricsRow]) -> RunColumns:
    """The numbers of the rows as columns."""
    table = MetricsTable(Path("metrics.jsonl"))
    for row in rows:
        values = {name: value for name, value in row.items() if name not in RESERVED}
        table.add_row(int(row["step"] or 0), row.get("time"), values)
    return RunColumns(table, table.num_rows)


def report_charts(
    run: Measured, rows: Sequence[MetricsRow], summary: Mapping[str, Any]
) -> ReportCharts:
    """All of a run's charts. `rows` are those whose columns `run` has."""
    lengths = together(
        run,
        TITLES["response_length/mean"],
        [("response_length/mean", "mean")],
        band=("response_length/min", "response_length/max"),
    )
    names = [
        name
        for name in sorted(run.table.columns)
        if name.startswith(PARTS) and name.endswith("/mean")
    ]
    parts = [(name, name.removeprefix(PARTS).removesuffix("/mean")) for name in names]
    rewards = [
        together(run, "Mean part of the reward", parts[start : start + MOST_PARTS])
        for start in range(0, min(len(parts), 4 * MOST_PARTS), MOST_PARTS)
    ]
    number = (summary.get("eval") or {}).get("n")
    number = float(number) if isinstance(number, (int, float)) else 0.0

    return ReportCharts(
        learning=[*_held_out(rows, number), *_singles(run, LEARNING)],
        supervised=_singles(run, SUPERVISED),
        rewards=[reward for reward in rewards if reward],
        optimisation=_singles(run, OPTIMISATION),
        lengths=[*([lengths] if lengths else []), *_singles(run, LENGTHS)],
        speed=[
            chart
            for chart in (
                together(run, "Tokens a second", SPEED),
                together(run, "Seconds a step", TIMES),
            )
            if chart
        ],
    )


def _singles(run: Measured, metrics: Sequence[str]) -> list[Chart]:
    return [chart for metric in metrics if (chart := chart_of(run, metric))]


def together(
    run: Measured,
    title: str,
    lines: Sequence[tuple[str, str]],
    band: tuple[str, str] | None = None,
) -> Chart | None:
    """A chart of several (metric, name) over the steps; `band`: the metrics around the first line.
    None if none of them was ever a number."""
    columns = {
        name: dict(zip(*run.table.series(name), strict=True))
        for name in [*(name for name, _ in lines), *(band or ())]
    }
    drawn = [
        (name, says) for name, says in lines if any(map(math.isfinite, columns[name].values()))
    ]
    if not drawn:
        return None

    most = MOST_POINTS // len(drawn)
    rows = sorted(
        {
            row
            for name, _ in drawn
            for row in thin_peaks(list(columns[name]), list(columns[name].values()), most)[0]
        }
    )

    def values(name: str) -> list[float]:
        return [columns[name].get(row, math.nan) for row in rows]

    has_band = band is not None and bool(columns[band[0]]) and bool(columns[band[1]])
    return Chart(
        title,
        [float(run.table.steps[row]) for row in rows],
        [
            ChartLine(
                says,
                values(name),
                low=values(band[0]) if band and has_band and not place else None,
                high=values(band[1]) if band and has_band and not place else None,
            )
            for place, (name, says) in enumerate(drawn)
        ],
    )


def _held_out(rows: Sequence[MetricsRow], number: float) -> list[Chart]:
    """Success on held-out tasks: a chart for each environment, with 95% intervals and the two
    players. `number`: the tasks of an evaluation that does not record their number."""
    charts = []
    environments = held_out(rows)
    for environment, points in environments.items():
        of = f" in {environment}" if len(environments) > 1 else ""
        charts.append(_evaluation_chart(f"Success on held-out tasks{of}", points, number))
    return charts


def _evaluation_chart(
    title: str, points: list[tuple[float, EvaluationMetrics]], number: float
) -> Chart:
    x = [step for step, _ in points]
    lines: list[ChartLine] = []
    for name, rates in (
        ("greedy", [evaluated.success_greedy for _, evaluated in points]),
        ("sampled", [evaluated.success_sampled for _, evaluated in points]),
    ):
        if any(rate is not None for rate in rates):
            ends = [
                wilson_interval(rate, evaluated.n or number)
                if rate is not None and (evaluated.n or number)
                else (math.nan, math.nan)
                for rate, (_, evaluated) in zip(rates, points, strict=True)
            ]
            is_first = not lines  # two bands over each other say nothing
            lines.append(
                ChartLine(
                    name,
                    [math.nan if rate is None else rate for rate in rates],
                    low=[low for low, _ in ends] if is_first else None,
                    high=[high for _, high in ends] if is_first else None,
                )
            )

    for name, color, level in (
        ("random player", 7, points[-1][1].random),
        ("optimal player", 2, points[-1][1].optimal),
    ):
        if level is not None:
            lines.append(ChartLine(name, [level] * len(x), color=color))

    return Chart(title, x, lines, share=True)
