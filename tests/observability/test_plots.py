from __future__ import annotations

import math
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from agentevo.observability import plots
from agentevo.observability.chart_lines import title_of
from agentevo.observability.curves import smooth, wilson_interval
from agentevo.observability.learning_curve import _title, draw_learning_curve
from agentevo.observability.metrics import MetricsRow
from agentevo.observability.panels import STYLE, fonts

ALL = ["learning_curve.png", "optimisation.png", "lengths.png", "throughput.png"]


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


@pytest.mark.slow
def test_a_whole_run_gives_four_pictures_at_150_dpi(
    tmp_path: Path, rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    written = plots.write_plots(rows, summary, tmp_path / "plots")
    assert [path.name for path in written] == ALL
    assert all(png_size(path)[0] == 8 * 150 for path in written)


@pytest.mark.slow
def test_pictures_without_data_are_left_out(tmp_path: Path, rows: list[MetricsRow]) -> None:
    assert plots.write_plots([], {}, tmp_path) == []

    evaluations = [row for row in rows if "training/global_step" not in row]
    assert [path.name for path in plots.write_plots(evaluations, {}, tmp_path)] == [
        "learning_curve.png",
        "throughput.png",
    ]

    only_norm: list[MetricsRow] = [{"step": 1, "actor/grad_norm": 1.0}]
    assert [path.name for path in plots.write_plots(only_norm, {}, tmp_path)] == [
        "optimisation.png"
    ]


@pytest.mark.slow
def test_a_run_of_broken_numbers_draws_nothing_and_one_step_draws_all(
    tmp_path: Path, rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    broken: list[MetricsRow] = [
        {key: value if key == "step" else None for key, value in row.items()} for row in rows
    ]
    assert plots.write_plots(broken, {}, tmp_path) == []
    assert [path.name for path in plots.write_plots(rows[:2], summary, tmp_path)] == ALL


def drawn_curve(rows: list[MetricsRow], summary: Mapping[str, Any]) -> Figure:
    figure = Figure()
    assert draw_learning_curve(figure, rows, summary)
    return figure


def test_the_curve_holds_the_held_out_points_and_both_reference_levels(
    rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    axes = drawn_curve(rows, summary).axes[0]
    lines = {str(line.get_label()): line for line in axes.lines}
    greedy = [
        (row["step"], row["val-core/frozen_lake/success/greedy"])
        for row in rows
        if "val-core/frozen_lake/success/greedy" in row
    ]
    held_out = lines["held-out, greedy"]
    assert list(zip(held_out.get_xdata(), held_out.get_ydata(), strict=True)) == greedy

    levels = {tuple(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 2}
    assert {(0.06, 0.06), (0.78, 0.78)} <= levels

    texts = " ".join(text.get_text() for text in axes.texts)
    for part in (
        "before\n",
        "after\n",
        "random player",
        "optimal player",
        "before the cold start 2%",
    ):
        assert part in texts, part

    assert axes.get_title(loc="right").startswith("held-out success")


def test_success_and_reward_have_axes_of_their_own(
    rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    figure = drawn_curve(rows, summary)
    assert [axes.get_ylabel() for axes in figure.axes] == ["success rate", "mean reward"]
    rewards_only: list[MetricsRow] = [
        {"step": 1, "critic/score/mean": -3.0},
        {"step": 2, "critic/score/mean": -2.0},
    ]
    assert [axes.get_ylabel() for axes in drawn_curve(rewards_only, {}).axes] == ["mean reward"]


def test_the_evaluation_before_the_cold_start_is_not_taken_for_the_one_before_rl(
    rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    cold: MetricsRow = {
        "step": 0,
        "val-core/frozen_lake/success/greedy": 0.02,
        "val-core/frozen_lake/random": 0.06,
    }
    axes = drawn_curve([cold, {"step": 0, "cold_start/loss": 0.4}, *rows], summary).axes[0]
    assert "held-out success 16% →" in axes.get_title(loc="right")


def test_two_environments_are_told_apart() -> None:
    rows: list[MetricsRow] = [
        {
            "step": step,
            **{f"val-core/{name}/success/greedy": step / 20, f"val-core/{name}/random": 0.1},
        }
        for step in (0, 10)
        for name in ("coins", "sokoban")
    ]
    labels = {str(line.get_label()) for line in drawn_curve(rows, {}).axes[0].lines}
    assert {"held-out coins, greedy", "held-out sokoban, greedy"} <= labels


def test_times_of_one_step_in_two_rows_are_added(rows: list[MetricsRow]) -> None:
    figure = Figure()
    assert plots._throughput(figure, rows, {})

    heights = {
        container.get_label(): {
            round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in container
        }
        for container in figure.axes[0].containers
    }
    assert [heights["evaluation"][step] for step in (0, 5, 10)] == [4.0, 0.0, 3.5]
    assert heights["generation"][0] == 0.0
    assert heights["generation"][10] == next(
        row["timing_s/gen"] for row in rows if row["step"] == 10
    )


@pytest.mark.slow
def test_no_global_plotting_state_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys, matplotlib; from agentevo.observability import write_plots; before = "
        "matplotlib.rcParams['font.size'];"
        f"write_plots([{{'step': 1, 'actor/entropy': 1.0}}], {{}}, {str(tmp_path)!r});"
        "assert 'matplotlib.pyplot' not in sys.modules; assert matplotlib.rcParams['axes.grid'] "
        "is False;"
        "assert matplotlib.rcParams['font.size'] == before; assert before != "
        f"{STYLE['axes.titlesize']}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_smoothing_is_centred_and_leaves_gaps() -> None:
    assert smooth([1.0, math.nan, 2.0, 9.0]) == pytest.approx(
        [1.5, math.nan, 4.0, 5.5], nan_ok=True
    )
    step = smooth([0.0] * 10 + [1.0] * 10)
    assert sum(step) == pytest.approx(10.0)
    assert step[9] < 0.5 < step[10]


def test_a_step_without_an_update_has_no_speed(rows: list[MetricsRow]) -> None:
    idle = [
        {**row, "perf/tokens_per_s_logical": 0.0}
        if row["step"] == 20 and "perf/tokens_per_s_logical" in row
        else row
        for row in rows
    ]
    figure = Figure()
    assert plots._throughput(figure, idle, {})

    line = next(line for line in figure.axes[1].lines if line.get_label() == "trainer")
    assert math.isnan(dict(zip(line.get_xdata(), line.get_ydata(), strict=True))[20])


def test_all_panels_of_the_optimisation_span_the_same_steps(rows: list[MetricsRow]) -> None:
    early = [
        {
            key: value
            for key, value in row.items()
            if key != "actor/grad_norm" or (row["step"] or 0) < 20
        }
        for row in rows
    ]
    figure = Figure()
    assert plots._optimisation(figure, early, {})
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_wilson_interval_has_the_published_values() -> None:
    assert wilson_interval(0.0, 10) == pytest.approx(
        (0.0, 0.2775), abs=1e-4
    )  # Newcombe 1998, table of method 3: 0/10 and 81/263
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


@given(st.integers(1, 2000), st.data())
def test_wilson_interval_holds_the_rate_and_stays_a_rate(n: int, data: st.DataObject) -> None:
    rate = data.draw(st.integers(0, n)) / n
    low, high = wilson_interval(rate, n)
    assert 0.0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1.0


def test_characters_that_latin_fonts_lack_come_from_another_one_or_are_warned_of() -> None:
    assert fonts({"DejaVu Sans", "Noto Sans CJK JP"}, ["湖"]) == ["DejaVu Sans", "Noto Sans CJK JP"]
    with pytest.warns(UserWarning, match="fonts-noto-cjk"):
        assert fonts({"DejaVu Sans"}, ["frozen", "凍った湖"]) == ["DejaVu Sans"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fonts({"DejaVu Sans"}, ["frozen", "é"]) == ["DejaVu Sans"]


def test_a_chart_has_a_title_in_words_and_none_is_cut():
    assert title_of("critic/score/mean") == "Reward"
    assert (
        title_of("val-core/frozen_lake/success/greedy") == "Held-out success, greedy: frozen_lake"
    )
    assert title_of("a/metric/of/yours") == "a/metric/of/yours"

    model = "/srv/models/an-organisation/a-rather-long-name-of-a-model-1.5B"
    title = _title({"environment": "frozen_lake", "model": model})
    assert title.replace("\n", " ") == "frozen_lake, a-rather-long-name-of-a-model-1.5B"
    assert max(map(len, title.split("\n"))) <= 36
