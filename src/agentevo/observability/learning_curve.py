"""The picture of the learning curve: success of training attempts and of held-out evaluations, with
the random and optimal players as levels, and the reward below."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentevo.observability.curves import has_numbers, held_out, series, wilson_interval
from agentevo.observability.metrics import EvaluationMetrics, MetricsRow, not_comparable
from agentevo.observability.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    as_rate,
    finish,
    leave_room,
    noisy_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_TITLE = 108


def draw_learning_curve(
    figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]
) -> bool:
    success = series(rows, "train/success")
    reward = series(rows, "critic/score/mean")
    evaluations = held_out(rows)
    rates = bool(evaluations) or has_numbers(success[1])
    rewards = has_numbers(reward[1])
    if not (rates or rewards):
        return False

    figure.set_size_inches(8, 4.6 + (1.8 if rates and rewards else 0))
    panels = figure.subplots(
        1 + (rates and rewards),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=[2.4, 1] if rates and rewards else [1],
    )
    if rates:
        top = panels[0][0]
        if has_numbers(success[1]):
            noisy_line(top, success, SKY, "training attempts (sampled)")

        for color, (environment, points) in zip(
            (BLUE, GREEN, PURPLE, RED, ORANGE), evaluations.items(), strict=False
        ):
            _draw_held_out(top, points, color, environment if len(evaluations) > 1 else "", summary)

        if len(evaluations) == 1:
            _annotate_before_after(top, next(iter(evaluations.values())), summary)

        as_rate(top)
        finish(top, _title(summary), "success rate", steps=not rewards)
        top.legend(
            loc="upper left",
            bbox_to_anchor=(0, -0.02 if rewards else -0.16),
            ncols=4,
            borderaxespad=0,
            handlelength=1.6,
        )

    if rewards:
        noisy_line(panels[-1][0], reward, ORANGE, "mean reward of training attempts")
        leave_room(panels[-1][0])
        finish(panels[-1][0], "" if rates else _title(summary), "mean reward")

    if evaluations:
        steps = [float(row["step"] or 0) for row in rows]
        _make_room(panels[0][0], min(steps), max(steps))

    return True


def _title(summary: Mapping[str, Any]) -> str:
    """The title, in lines of at most 36 characters, since the right half has the before and after
    numbers. A model that is a path has the name of its folder."""
    named = [str(summary[key]) for key in ("environment", "model") if summary.get(key)]
    parts = [part.rstrip("/").rpartition("/")[2] or part for part in named]
    title = ", ".join(parts) or str(summary.get("name", "learning curve"))
    return textwrap.fill(title[:LONGEST_TITLE], 36, break_on_hyphens=False)


def _draw_held_out(
    axes: Axes,
    points: list[tuple[float, EvaluationMetrics]],
    color: str,
    name: str,
    summary: Mapping[str, Any],
) -> None:
    """Greedy points with 95% intervals, sampled ones hollow, and the random and optimal players as
    labelled levels."""
    of = f" {name}" if name else ""
    number = (summary.get("eval") or {}).get("n")
    _draw_greedy(axes, points, color, of, float(number or 0))
    _draw_sampled(axes, points, color, of)
    _draw_players(axes, points[-1][1], color if name else GREY, of)


def _draw_greedy(
    axes: Axes, points: list[tuple[float, EvaluationMetrics]], color: str, of: str, number: float
) -> None:
    """`number`: the number of tasks, for evaluations that do not record it."""
    greedy = [
        (step, result.success_greedy, result.n)
        for step, result in points
        if result.success_greedy is not None
    ]
    if greedy:
        steps, rates, numbers = zip(*greedy, strict=True)
        axes.plot(
            steps,
            rates,
            color=color,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label=f"held-out{of}, greedy",
            zorder=4,
        )
        counts = [float(n or number) for n in numbers]
        if all(counts):
            bounds = [wilson_interval(rate, n) for rate, n in zip(rates, counts, strict=True)]
            lows, highs = zip(*bounds, strict=True)
            axes.vlines(
                steps,
                lows,
                highs,
                color=color,
                alpha=0.35,
                linewidth=2.5,
                zorder=3,
                label=f"95% interval{of}",
            )


def _draw_sampled(
    axes: Axes, points: list[tuple[float, EvaluationMetrics]], color: str, of: str
) -> None:
    sampled = [
        (step, result.success_sampled)
        for step, result in points
        if result.success_sampled is not None
    ]
    if sampled:
        axes.scatter(
            [step for step, _ in sampled],
            [rate for _, rate in sampled],
            s=34,
            facecolors="white",
            edgecolors=color,
            label=f"held-out{of}, sampled",
            zorder=5,
        )


def _draw_players(axes: Axes, last: EvaluationMetrics, color: str, of: str) -> None:
    for player, dashes, level in (
        ("random", (1, 2), last.random),
        ("optimal", (5, 2), last.optimal),
    ):
        if level is not None:
            axes.axhline(level, color=color, dashes=dashes, linewidth=1.4, zorder=2)
            axes.annotate(
                f" {player} player{of}\n {level:.0%}",
                (1.0, level),
                xycoords=axes.get_yaxis_transform(),
                va="center",
                color="#5B616A",
                fontsize=9,
            )


def _annotate_before_after(
    axes: Axes, points: list[tuple[float, EvaluationMetrics]], summary: Mapping[str, Any]
) -> None:
    measured = [(step, result.success) for step, result in points if result.success is not None]
    if not measured:
        return

    cold = (summary.get("eval") or {}).get("cold_start_before")
    if isinstance(cold, (int, float)):
        axes.plot(
            [measured[0][0]],
            [cold],
            color=BLUE,
            marker="D",
            markersize=6,
            markerfacecolor="white",
            linestyle="",
            zorder=5,
        )
        axes.annotate(
            f"before the cold start {cold:.0%}",
            (measured[0][0], cold),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )

    ends = (
        [("before", measured[0]), ("after", measured[-1])]
        if len(measured) > 1
        else [("held-out", measured[0])]
    )
    for label, (step, rate) in ends:
        side = -1 if label == "before" else 1  # outside the curve, where nothing else is drawn
        axes.annotate(
            f"{label}\n{rate:.0%}",
            (step, rate),
            (8 * side, 0),
            textcoords="offset points",
            ha="right" if side < 0 else "left",
            va="center",
            fontweight="bold",
            color=BLUE,
            bbox={
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.85,
            },
            zorder=6,
        )

    number = (summary.get("eval") or {}).get("n")
    if len(measured) > 1:
        tasks = f" on {number} task{'s' * (number != 1)}" if number else ""
        text = f"held-out success {measured[0][1]:.0%} → {measured[-1][1]:.0%}{tasks}"
        if not_comparable([points[0][1]], [points[-1][1]]):
            text += " (not comparable)"
        axes.set_title(text, loc="right", color=BLUE)


def _make_room(axes: Axes, x_min: float, x_max: float) -> None:
    """Widens the x axis for the labels at both ends, and keeps its ticks to steps that exist."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    room = 0.13 * max(x_max - x_min, 1)
    axes.set_xlim(x_min - room, x_max + room)
    ticks = [
        tick
        for tick in MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True).tick_values(
            x_min, x_max
        )
        if x_min <= tick <= x_max
    ]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
