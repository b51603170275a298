"""The run as pictures: PNG files for READMEs, papers and `report.html`.

Drawn with matplotlib's Agg canvas on free-standing figures: no display and no pyplot state. A
picture or panel whose metrics were never logged is left out. Values that are not finite leave gaps.
Colours are Okabe and Ito's, which colour-blind readers tell apart; line style and labels never
leave it to colour alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.errors import MissingExtraError
from agentevo.observability.metrics import Evaluation, MetricsRow, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, INK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8A8F98",
    "#22262B",
)
FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")
"""In order of preference; matplotlib brings the last one along."""
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#B8BDC4",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E8EB",
    "grid.linewidth": 0.8,
    "xtick.color": "#5B616A",
    "ytick.color": "#5B616A",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}
SMOOTHING = 2
"""A smoothed curve is the mean over this many neighbours on each side."""

Series = tuple[list[float], list[float]]
"""Steps and values, equally long; NaN is a gap."""


def write_plots(
    metrics_rows: Sequence[MetricsRow], summary: Mapping[str, Any], folder: Path | str
) -> list[Path]:
    """Draws what the rows allow and returns the files written: learning_curve, supervised,
    optimisation, lengths, throughput (.png)."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise MissingExtraError(
            "plots need matplotlib: pip install matplotlib, or set tracking.report=false"
        ) from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Figure, Sequence[MetricsRow], Mapping[str, Any]], bool]] = {
        "learning_curve": _learning_curve,
        "supervised": _supervised,
        "optimisation": _optimisation,
        "lengths": _lengths,
        "throughput": _throughput,
    }
    written = []
    installed = {font.name for font in fontManager.ttflist}
    with matplotlib.rc_context(
        {**STYLE, "font.sans-serif": [name for name in FONTS if name in installed]}
    ):
        for name, draw in pictures.items():
            figure = Figure(figsize=(8, 4.6), layout="constrained")
            FigureCanvasAgg(figure)
            if draw(figure, metrics_rows, summary):
                path = folder / f"{name}.png"
                figure.savefig(path, metadata={"Software": "agentevo"})
                written.append(path)
    return written


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
            other
            for other in values[max(index - SMOOTHING, 0) : index + SMOOTHING + 1]
            if math.isfinite(other)
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


def held_out(rows: Sequence[MetricsRow]) -> dict[str, list[tuple[float, Evaluation]]]:
    """Evaluations that have a success rate, by environment, as (step, evaluation) in the order of
    the steps.

    Of several at one step the last counts: at step 0 an earlier one was measured before the cold
    start.
    """
    by_environment: dict[str, dict[float, Evaluation]] = {}
    for row in rows:
        for result in read_evaluations(row):
            if result.success is not None:
                by_environment.setdefault(result.environment, {})[float(row["step"] or 0)] = result
    return {environment: list(points.items()) for environment, points in by_environment.items()}


def _has_numbers(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def _noisy_line(axes: Axes, line: Series, color: str, label: str) -> None:
    """The values as a faint line, their running mean as a strong one."""
    steps, values = line
    axes.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
    axes.plot(steps, smooth(values), color=color, label=label)


def _finish(axes: Axes, title: str, unit: str, *, steps: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title)
    axes.set_ylabel(unit)
    left, right = axes.get_xlim()
    if right - left < 1:  # one step only
        axes.set_xlim(left - 1, right + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if steps:
        axes.set_xlabel("step")


def _learning_curve(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    success = series(rows, "train/success")
    reward = series(rows, "critic/score/mean")
    evaluations = held_out(rows)
    rates, rewards = bool(evaluations) or _has_numbers(success[1]), _has_numbers(reward[1])
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
        if _has_numbers(success[1]):
            _noisy_line(top, success, SKY, "training attempts (sampled)")
        for color, (environment, points) in zip(
            (BLUE, GREEN, PURPLE, RED, ORANGE), evaluations.items(), strict=False
        ):
            _draw_held_out(top, points, color, environment if len(evaluations) > 1 else "", summary)
        if len(evaluations) == 1:
            _annotate_before_after(top, next(iter(evaluations.values())), summary)
        _as_rate(top)
        _finish(top, _title(summary), "success rate", steps=not rewards)
        top.legend(
            loc="upper left",
            bbox_to_anchor=(0, -0.02 if rewards else -0.16),
            ncols=4,
            borderaxespad=0,
            handlelength=1.6,
        )
    if rewards:
        _noisy_line(panels[-1][0], reward, ORANGE, "mean reward of training attempts")
        _finish(panels[-1][0], "" if rates else _title(summary), "mean reward")
    if evaluations:
        steps = [float(row["step"] or 0) for row in rows]
        _make_room(panels[0][0], min(steps), max(steps))
    return True


def _title(summary: Mapping[str, Any]) -> str:
    """At most 36 characters: the right half of the line says before and after."""
    parts = [str(summary[key]) for key in ("environment", "model") if summary.get(key)]
    title = ", ".join(parts) or str(summary.get("name", "learning curve"))
    return title if len(title) <= 36 else title[:35] + "…"


def _as_rate(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-0.06, 1.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_held_out(
    axes: Axes,
    points: list[tuple[float, Evaluation]],
    color: str,
    name: str,
    summary: Mapping[str, Any],
) -> None:
    """Greedy points with 95% intervals, sampled ones hollow, and the random and optimal players as
    labelled levels."""
    of = f" {name}" if name else ""
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
        number = (summary.get("eval") or {}).get("n")
        counts = [float(n or number or 0) for n in numbers]
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
    for player, dashes, level in (
        ("random", (1, 2), points[-1][1].random),
        ("optimal", (5, 2), points[-1][1].optimal),
    ):
        if level is not None:
            axes.axhline(
                level, color=color if name else GREY, dashes=dashes, linewidth=1.4, zorder=2
            )
            axes.annotate(
                f" {player} player{of}\n {level:.0%}",
                (1.0, level),
                xycoords=axes.get_yaxis_transform(),
                va="center",
                color="#5B616A",
                fontsize=9,
            )


def _annotate_before_after(
    axes: Axes, points: list[tuple[float, Evaluation]], summary: Mapping[str, Any]
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
        tasks = f" on {number} tasks" if number else ""
        text = f"held-out success {measured[0][1]:.0%} → {measured[-1][1]:.0%}{tasks}"
        axes.set_title(text, loc="right", color=BLUE)


def _make_room(axes: Axes, left: float, right: float) -> None:
    """Widens the x axis for the labels at both ends, and keeps its ticks to steps that exist."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    room = 0.13 * max(right - left, 1)
    axes.set_xlim(left - room, right + room)
    ticks = [
        tick
        for tick in MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True).tick_values(left, right)
        if left <= tick <= right
    ]
    axes.xaxis.set_major_locator(FixedLocator(ticks))


def _supervised(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    """Of `agentevo sft`: the loss of the batches and of the held-out conversations, and how many of
    their tokens come first."""
    loss = series(rows, "sft/loss")
    held = series(rows, "sft/eval/loss")
    right = series(rows, "sft/eval/token_accuracy")
    if not _has_numbers(loss[1]):
        return False
    panels = figure.subplots(1, 1 + _has_numbers(right[1]), squeeze=False)[0]
    _noisy_line(panels[0], loss, SKY, "batches")
    if _has_numbers(held[1]):
        panels[0].plot(
            *held,
            color=BLUE,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label="held-out conversations",
            zorder=4,
        )
    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="upper right")
    _finish(panels[0], "loss", "nats per token")
    if _has_numbers(right[1]):
        panels[1].plot(*right, color=GREEN, marker="o", markersize=6, markeredgecolor="white")
        _as_rate(panels[1])
        _finish(panels[1], "held-out tokens that come first", "share of tokens")
    return True


def _optimisation(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    shown = [
        ("actor/grad_norm", "gradient norm", "L2 norm before clipping", RED),
        ("actor/entropy", "entropy", "nats per token", BLUE),
        ("actor/ppo_kl", "KL from the sampling policy", "nats per token", PURPLE),
        ("actor/pg_clipfrac", "clipped tokens", "share of tokens", ORANGE),
        ("group/reward_std/mean", "reward spread inside groups", "standard deviation", GREEN),
        ("group/zero_std_ratio", "groups without spread", "share of groups", GREY),
        (
            "critic/vf_explained_var",
            "returns that the critic foresees",
            "share of variance",
            PURPLE,
        ),
        (
            "process_reward/accuracy",
            "outcomes that the process reward tells",
            "share of attempts",
            PURPLE,
        ),
        ("preference/rewards/accuracies", "pairs in the right order", "share of pairs", PURPLE),
    ]
    shown = [panel for panel in shown if _has_numbers(series(rows, panel[0])[1])]
    if not shown:
        return False
    columns = min(2, len(shown))
    figure.set_size_inches(8, 0.3 + 2.1 * math.ceil(len(shown) / columns))
    grid = figure.subplots(math.ceil(len(shown) / columns), columns, squeeze=False).flatten()
    for index, (axes, (key, title, unit, color)) in enumerate(zip(grid, shown, strict=False)):
        _noisy_line(axes, series(rows, key), color, title)
        _finish(axes, title, unit, steps=index >= len(shown) - columns)
    for axes in grid[len(shown) :]:
        axes.remove()
    limits = [axes.get_xlim() for axes in grid[: len(shown)]]
    for axes in grid[: len(shown)]:  # a step without an update has no gradient, but it is a step
        axes.set_xlim(min(left for left, _ in limits), max(right for _, right in limits))
    return True


def _lengths(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    response = series(rows, "response_length/mean")
    if not _has_numbers(response[1]):
        return False
    others = [
        ("prompt_length/mean", "prompt", "tokens", PURPLE),
        ("num_turns/mean", "turns per attempt", "turns", GREEN),
        ("response_length/clip_ratio", "cut by the token limit", "share of completions", RED),
    ]
    others = [panel for panel in others if _has_numbers(series(rows, panel[0])[1])]
    figure.set_size_inches(8, 2.9 + (2.1 if others else 0))
    mosaic: Any = [["main"] * max(len(others), 1)] + (
        [[key for key, *_ in others]] if others else []
    )
    grid = figure.subplot_mosaic(mosaic, height_ratios=[1.35, 1] if others else [1])
    low, high = series(rows, "response_length/min"), series(rows, "response_length/max")
    if low[0] == high[0] and low[0]:
        grid["main"].fill_between(
            low[0],
            low[1],
            high[1],
            color=BLUE,
            alpha=0.12,
            linewidth=0,
            label="shortest to longest",
        )
    _noisy_line(grid["main"], response, BLUE, "mean")
    grid["main"].set_ylim(bottom=0)
    grid["main"].legend(loc="upper right", ncols=2)
    _finish(grid["main"], "response length", "tokens", steps=not others)
    for key, title, unit, color in others:
        _noisy_line(grid[key], series(rows, key), color, title)
        _finish(grid[key], title, unit)
    return True


def _throughput(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    parts = [
        ("timing_s/gen", "generation", BLUE),
        ("timing_s/adv", "advantages", PURPLE),
        ("timing_s/update_actor", "policy update", ORANGE),
        ("timing_s/update_weights", "weight publishing", SKY),
        ("timing_s/save_checkpoint", "checkpoints", GREY),
        ("timing_s/testing", "evaluation", GREEN),
    ]
    speeds = [
        ("perf/throughput", "whole step", INK),
        ("engine/tokens_per_s", "engine, new tokens", BLUE),
        ("perf/tokens_per_s_logical", "trainer", ORANGE),
    ]
    totals = {key: sum(row.get(key) or 0.0 for row in rows) for key, *_ in parts}
    parts = [part for part in parts if totals[part[0]] > 0.005 * sum(totals.values())]
    speeds = [speed for speed in speeds if _has_numbers(series(rows, speed[0])[1])]
    if not (parts or speeds):
        return False
    panels = figure.subplots(1, bool(parts) + bool(speeds), squeeze=False)[0]
    if parts:
        _stack_times(panels[0], rows, parts)
    if speeds:
        for key, label, color in speeds:
            steps, values = series(rows, key)
            _noisy_line(
                panels[-1], (steps, [value or math.nan for value in values]), color, label
            )  # no work is no speed
        panels[-1].set_ylim(bottom=0)
        _legend_below(panels[-1])
        _finish(panels[-1], "throughput", "tokens per second")
    return True


def _legend_below(axes: Axes) -> None:
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2, borderaxespad=0, handlelength=1.4
    )


def _stack_times(axes: Axes, rows: Sequence[MetricsRow], parts: list[tuple[str, str, str]]) -> None:
    """One bar per step, its parts in the order in which they run; several rows of one step are
    added up."""
    spent = {key: defaultdict[float, float](float) for key, *_ in parts}
    for row in rows:
        for key, total in spent.items():
            total[float(row["step"] or 0)] += row.get(key) or 0.0
    steps = sorted({float(row["step"] or 0) for row in rows if any(row.get(key) for key in spent)})
    bottom = [0.0] * len(steps)
    for key, label, color in parts:
        heights = [spent[key][step] for step in steps]
        axes.bar(steps, heights, width=1.0, bottom=bottom, color=color, label=label, linewidth=0)
        bottom = [base + height for base, height in zip(bottom, heights, strict=True)]
    _legend_below(axes)
    _finish(axes, "where the time goes", "seconds per step")
