"""The run as pictures: PNG files for READMEs and papers.

Drawn with matplotlib's Agg canvas on free-standing figures: no display and no pyplot state. A
picture or panel whose metrics were never logged is left out. Values that are not finite leave gaps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentevo.errors import MissingExtraError
from agentevo.observability.curves import has_numbers, held_out, series
from agentevo.observability.learning_curve import draw_learning_curve
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.panels import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    STYLE,
    as_rate,
    finish,
    fonts,
    leave_room,
    legend_below,
    noisy_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        "learning_curve": draw_learning_curve,
        "supervised": _draw_supervised,
        "optimisation": _optimisation,
        "lengths": _lengths,
        "throughput": _throughput,
    }
    written = []
    installed = {font.name for font in fontManager.ttflist}
    words = [*map(str, summary.values()), *(held_out(metrics_rows))]
    with matplotlib.rc_context({**STYLE, "font.family": fonts(installed, words)}):
        for name, draw in pictures.items():
            figure = Figure(figsize=(8, 4.6), layout="constrained")
            FigureCanvasAgg(figure)
            if draw(figure, metrics_rows, summary):
                path = folder / f"{name}.png"
                figure.savefig(path, metadata={"Software": "agentevo"})
                written.append(path)

    return written


def _draw_supervised(
    figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]
) -> bool:
    """Draws a run of `agentevo sft`: the loss of the batches and of the held-out conversations, and
    the share of held-out tokens that the model ranks first."""
    loss = series(rows, "sft/loss")
    held_out_loss = series(rows, "sft/eval/loss")
    right = series(rows, "sft/eval/token_accuracy")

    if not has_numbers(loss[1]):
        return False

    panels = figure.subplots(1, 1 + has_numbers(right[1]), squeeze=False)[0]
    noisy_line(panels[0], loss, SKY, "batches")
    if has_numbers(held_out_loss[1]):
        panels[0].plot(
            *held_out_loss,
            color=BLUE,
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label="held-out conversations",
            zorder=4,
        )

    panels[0].set_ylim(bottom=0)
    panels[0].legend(loc="upper right")
    finish(panels[0], "loss", "nats per token")

    if has_numbers(right[1]):
        panels[1].plot(*right, color=GREEN, marker="o", markersize=6, markeredgecolor="white")
        as_rate(panels[1])
        finish(panels[1], "held-out tokens ranked first", "share of tokens")

    return True


def _optimisation(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    shown = [
        ("actor/grad_norm", "gradient norm", "L2 norm before clipping", RED, 0.0),
        ("actor/entropy", "entropy", "nats per token", BLUE, 0.01),
        ("actor/ppo_kl", "KL from the sampling policy", "nats per token", PURPLE, 1e-3),
        ("actor/pg_clipfrac", "clipped tokens", "share of tokens", ORANGE, 0.01),
        ("group/reward_std/mean", "reward spread inside groups", "standard deviation", GREEN, 0.0),
        (
            "group/zero_std_ratio",
            "groups whose rewards are all equal",
            "share of groups",
            GREY,
            0.1,
        ),
        (
            "critic/vf_explained_var",
            "returns that the critic predicts",
            "share of variance",
            PURPLE,
            0.1,
        ),
        (
            "process_reward/accuracy",
            "outcomes that the process reward predicts",
            "share of attempts",
            PURPLE,
            0.1,
        ),
        (
            "preference/rewards/accuracies",
            "pairs in the right order",
            "share of pairs",
            PURPLE,
            0.1,
        ),
    ]
    shown = [panel for panel in shown if has_numbers(series(rows, panel[0])[1])]
    if not shown:
        return False

    columns = min(2, len(shown))
    figure.set_size_inches(8, 0.3 + 2.1 * math.ceil(len(shown) / columns))
    grid = figure.subplots(math.ceil(len(shown) / columns), columns, squeeze=False).flatten()
    for index, (axes, panel) in enumerate(zip(grid, shown, strict=False)):
        key, title, unit, color, least = panel
        noisy_line(axes, series(rows, key), color, title)
        leave_room(axes, least)
        finish(axes, title, unit, steps=index >= len(shown) - columns)

    for axes in grid[len(shown) :]:
        axes.remove()

    limits = [axes.get_xlim() for axes in grid[: len(shown)]]
    for axes in grid[: len(shown)]:  # a step without an update has no gradient, but it is a step
        axes.set_xlim(min(lower for lower, _ in limits), max(upper for _, upper in limits))

    return True


def _lengths(figure: Figure, rows: Sequence[MetricsRow], summary: Mapping[str, Any]) -> bool:
    response = series(rows, "response_length/mean")
    if not has_numbers(response[1]):
        return False

    other_panels = [
        ("prompt_length/mean", "prompt", "tokens", PURPLE),
        ("num_turns/mean", "turns per attempt", "turns", GREEN),
        ("response_length/clip_ratio", "cut by the token limit", "share of completions", RED),
    ]
    other_panels = [panel for panel in other_panels if has_numbers(series(rows, panel[0])[1])]
    figure.set_size_inches(8, 2.9 + (2.1 if other_panels else 0))
    mosaic: Any = [["main"] * max(len(other_panels), 1)] + (
        [[key for key, *_ in other_panels]] if other_panels else []
    )
    grid = figure.subplot_mosaic(mosaic, height_ratios=[1.35, 1] if other_panels else [1])
    low = series(rows, "response_length/min")
    high = series(rows, "response_length/max")
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

    noisy_line(grid["main"], response, BLUE, "mean")
    grid["main"].set_ylim(bottom=0)
    grid["main"].legend(loc="upper right", ncols=2)
    finish(grid["main"], "response length", "tokens", steps=not other_panels)

    for key, title, unit, color in other_panels:
        noisy_line(grid[key], series(rows, key), color, title)
        leave_room(grid[key], 0.01)
        finish(grid[key], title, unit)

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
    speeds = [speed for speed in speeds if has_numbers(series(rows, speed[0])[1])]
    if not (parts or speeds):
        return False

    panels = figure.subplots(1, bool(parts) + bool(speeds), squeeze=False)[0]
    if parts:
        _stack_times(panels[0], rows, parts)

    if speeds:
        for key, label, color in speeds:
            steps, values = series(rows, key)
            noisy_line(
                panels[-1], (steps, [value or math.nan for value in values]), color, label
            )  # no work is no speed

        panels[-1].set_ylim(bottom=0)
        legend_below(panels[-1])
        finish(panels[-1], "throughput", "tokens per second")

    return True


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

    legend_below(axes)
    finish(axes, "where the time goes", "seconds per step")
