"""The content of a report: pure functions from a run's records to the plain data of report.html.

Everything is text until the template escapes it. Numbers in table cells are formatted here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentevo.observability import run_now
from agentevo.observability.metrics import (
    EvaluationMetrics,
    MetricsRow,
    held_out,
    not_comparable,
    read_evaluations,
    wilson_interval,
)
from agentevo.observability.pages.static_page import CHARTS, render_still
from agentevo.observability.report_charts import columns_of, report_charts
from agentevo.observability.run_warnings import warnings_in_summary
from agentevo.observability.static_attempt import StillAttempt
from agentevo.runtime.console import format_duration
from agentevo.runtime.credentials import without_passwords

SHOWN_WARNINGS = 50
Table = tuple[list[str], list[list[str]]]
"""The header and the rows."""


class ReportResult(NamedTuple):
    """The headline numbers: before and after, the tasks, and the reference players."""

    before: float | None
    after: float | None
    random: float | None
    optimal: float | None
    is_comparable: bool
    words: str
    caveats: list[str]


def report_html(
    rows: Sequence[MetricsRow],
    summary: Mapping[str, Any],
    config_yaml: str,
    attempts: Sequence[StillAttempt],
    *,
    profile: str = "",
    name: str = "run",
) -> str:
    """The whole page."""
    run = columns_of(rows)
    all_warnings = warnings_in_summary(summary)

    return render_still(
        "report.html",
        scripts=CHARTS,
        name=str(summary.get("name") or name),
        about=" · ".join(
            str(summary[key]) for key in ("environment", "model", "recipe") if summary.get(key)
        ),
        made_at=time.time(),
        result=result(rows, summary),
        facts=facts(rows, summary),
        warnings=all_warnings[:SHOWN_WARNINGS],
        num_more_warnings=max(0, len(all_warnings) - SHOWN_WARNINGS),
        charts=report_charts(run, rows, summary),
        evaluations=evaluations(rows),
        data=rows_of_data(summary),
        attempts=attempts,
        timings=timings(rows),
        came_in=rollouts(rows),
        failures=[
            [kind.replace("_", " "), f"{total:,.0f}"]
            for kind, _, total in run_now.counts_below(run, "rollout/failed/")
        ],
        remote=remote_models(summary),
        profile=profile,
        config=without_passwords(config_yaml),
    )


def _number(value: object, otherwise: float | None = None) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def result(rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> ReportResult:
    """The headline. Numbers that the summary lacks come from the rows."""
    scores: Mapping[str, Any] = summary.get("eval") or {}
    points = next(iter(held_out(rows).values()), [])
    first = points[0][1] if points else EvaluationMetrics(environment="")
    last = points[-1][1] if points else first
    before = _number(scores.get("before"), first.success)
    after = _number(scores.get("after"), last.success)
    random = _number(scores.get("random"), last.random)
    optimal = _number(scores.get("optimal"), last.optimal)
    cold = _number(scores.get("cold_start_before"))
    number = _number(scores.get("n"), last.n)

    if before is None or after is None:
        return ReportResult(before, after, random, optimal, True, "", [])

    low, high = wilson_interval(after, number) if number else (after, after)
    tasks = f"{number:.0f} held-out tasks" if number else "held-out tasks"
    what = "supervised fine-tuning" if summary.get("command") == "sft" else "RL"
    words = [
        f"success on {tasks} before and after {what}"
        + (f" (95% interval of the latter: {low:.0%} to {high:.0%})" if number else "")
    ]
    words += [f"before the cold start it was {cold:.0%}"] if cold is not None else []
    words += [f"a random player reaches {random:.0%}"] if random is not None else []
    words += [f"an optimal player {optimal:.0%}"] if optimal is not None else []

    reason = not_comparable([first], [last])
    caveats = [reason] if reason else []
    if random is not None and low <= random:
        caveats.append("The result can't be distinguished from random play.")

    return ReportResult(before, after, random, optimal, not reason, "; ".join(words), caveats)


def facts(rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The (label, value, unit) of the run's costs."""
    tokens: Mapping[str, Any] = summary.get("tokens") or {}
    best: Mapping[str, Any] = summary.get("best") or {}
    wall = _number(summary.get("wall_s"))
    best_value = _number(best.get("value"))
    steps = summary.get("steps", max((row["step"] or 0 for row in rows), default=0))
    label = "optimizer steps" if summary.get("command") == "sft" else "RL steps"
    entries = [
        (label, f"{steps}"),
        ("wall time", "" if wall is None else format_duration(wall)),
        ("tokens generated", f"{tokens['generated']:,}" if "generated" in tokens else ""),
        ("tokens trained on", f"{tokens['trained']:,}" if "trained" in tokens else ""),
        ("best evaluation", _best(best_value, best, summary)),
    ]
    return [(label, value, "") for label, value in entries if value]


def _best(value: float | None, best: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """A success rate. For a run without an environment, the held-out loss, below 0 so that the best
    is the highest."""
    if value is None:
        return ""
    if kept := summary.get("kept"):
        return f"gap of {100 * value:.1f} points (pass@{kept['attempts']}) at step {kept['step']}"
    loss = summary.get("command") == "sft" and not summary.get("environment")
    return f"{f'loss {-value:.3f}' if loss else f'{value:.0%}'} at step {best.get('step')}"


def rows_of_data(summary: Mapping[str, Any]) -> list[Table]:
    """How the rows of `agentevo sft` were used, and how well the held-out conversations are
    predicted."""
    kinds: Mapping[str, Any] = summary.get("data") or {}
    if not kinds:
        return []

    body = [[kind, "used", str(counts["used"]), ""] for kind, counts in kinds.items()]
    body += [
        [kind, reason.replace("_", " "), str(left_out["count"]), ", ".join(left_out["first"])]
        for kind, counts in kinds.items()
        for reason, left_out in counts["left_out"].items()
    ]
    tables: list[Table] = [(["data", "what became of them", "rows", "the first"], body)]
    held_out_summary: Mapping[str, Any] = summary.get("held_out") or {}
    if held_out_summary.get("after"):
        measured = [
            [when, *(f"{held_out_summary[when][key]:.4g}" for key in held_out_summary[when])]
            for when in ("before", "after")
            if held_out_summary.get(when)
        ]
        header = [
            f"{held_out_summary['conversations']} held-out conversations",
            *(key.replace("_", " ") for key in held_out_summary["after"]),
        ]
        tables.append((header, measured))

    return tables


def evaluations(rows: Sequence[MetricsRow]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(environment, header, rows): each evaluation of the agent, with the reference players."""
    tables = []
    for environment, points in held_out(rows).items():
        measured = [
            (row["step"] or 0, evaluated)
            for row in rows
            for evaluated in read_evaluations(row)
            if evaluated.environment == environment
        ]
        some_failed = any(
            evaluated.failed_greedy or evaluated.failed_sampled for _, evaluated in measured
        )
        columns = 8 if some_failed else 7
        body = [
            [
                f"{step:.0f}" if (step, evaluated) in points else "before the cold start",
                _percent(evaluated.success_greedy),
                _percent(evaluated.success_sampled),
                "" if evaluated.reward_greedy is None else f"{evaluated.reward_greedy:.3f}",
                "" if evaluated.reward_sampled is None else f"{evaluated.reward_sampled:.3f}",
                _percent(evaluated.random),
                _percent(evaluated.optimal),
                _percent(max(evaluated.failed_greedy or 0.0, evaluated.failed_sampled or 0.0)),
            ][:columns]
            for step, evaluated in measured
        ]
        header = [
            "step",
            "agent greedy",
            "agent sampled",
            "reward greedy",
            "reward sampled",
            "random player",
            "optimal player",
            "failed attempts",
        ][:columns]
        tables.append((environment, header, body))

    return tables


def timings(rows: Sequence[MetricsRow]) -> Table | None:
    """Seconds per phase of the step: the mean and the longest over the steps that had the phase,
    and its share of the total time."""
    spent: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("timing_s/") and value:
                spent.setdefault(key.removeprefix("timing_s/"), []).append(value)

    if not spent:
        return None

    total_s = sum(sum(values) for name, values in spent.items() if name != "step") or 1.0
    body = [
        [
            name,
            str(len(values)),
            f"{statistics.fmean(values):.3f}",
            f"{max(values):.3f}",
            format_duration(sum(values)),
            "" if name == "step" else f"{sum(values) / total_s:.1%}",
        ]
        for name, values in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    return ["part", "times", "mean [s]", "longest [s]", "total", "share"], body


def remote_models(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]], str] | None:
    """The requests of each role to each remote model, and the remaining budgets."""
    usage_rows: Sequence[Mapping[str, Any]] = (summary.get("remote_models") or {}).get(
        "asked"
    ) or ()
    if not usage_rows:
        return None

    body = [
        [
            row["model"],
            row["role"],
            f"{row['answers']:,}",
            f"{row['from_cache']:,}",
            f"{row['failed_requests']:,}",
            f"{row['tokens']:,}",
            f"{row['cost']:.4g}",
        ]
        for row in usage_rows
    ]
    header = ["model", "asked by", "answers", "from the cache", "failed requests", "tokens", "cost"]
    budgets: Mapping[str, Any] = summary["remote_models"].get("budget_left") or {}
    budget_texts = [
        f"{name}: " + ", ".join(f"{value:,.4g} {what}" for what, value in budget.items())
        for name, budget in budgets.items()
    ]
    return header, body, "; ".join(budget_texts)


def rollouts(rows: Sequence[MetricsRow]) -> tuple[str, list[str], list[list[str]]] | None:
    """The number of trajectories of the whole run, and why some were not trained on."""
    total = sum(row.get("rollout/in") or 0.0 for row in rows)
    if not total:
        return None

    reasons: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("rollout/dropped/"):
                reason = key.removeprefix("rollout/dropped/")
                reasons[reason] = reasons.get(reason, 0.0) + (value or 0.0)

    dropped = sorted(((count, reason) for reason, count in reasons.items() if count), reverse=True)
    masked = sum(row.get("staleness/masked_trajectories") or 0.0 for row in rows)
    trained = total - sum(count for count, _ in dropped) - masked
    body = [["trained on", f"{trained:,.0f}", f"{trained / total:.1%}"]]
    body += [
        [f"dropped: {reason.replace('_', '-')}", f"{count:,.0f}", f"{count / total:.1%}"]
        for count, reason in dropped
    ]
    if masked:
        body.append(["masked: every token too old", f"{masked:,.0f}", f"{masked / total:.1%}"])

    return f"{total:,.0f}", ["what became of them", "number", "share"], body
