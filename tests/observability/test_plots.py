from __future__ import annotations

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
from agentevo.observability.metrics import MetricsRow, wilson_interval
from agentevo.observability.pages.charts import Chart
from agentevo.observability.plots import STYLE, fonts
from agentevo.observability.report_charts import columns_of, report_charts

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


def test_the_curve_holds_the_held_out_points_and_both_reference_levels(
    rows: list[MetricsRow], summary: Mapping[str, Any]
) -> None:
    cold: MetricsRow = {"step": 0, "val-core/frozen_lake/success/greedy": 0.02}
    rows = [cold, *rows]
    charts = report_charts(columns_of(rows), rows, summary).learning
    figure = Figure()
    plots.draw(figure, charts, 2)
    lines = {str(line.get_label()): line for line in figure.axes[0].lines}
    greedy = [
        (row["step"], row["val-core/frozen_lake/success/greedy"])
        for row in rows[1:]
        if "val-core/frozen_lake/success/greedy" in row
    ]
    drawn = lines["greedy"]
    assert list(zip(drawn.get_xdata(), drawn.get_ydata(), strict=True)) == greedy
    assert set(lines["random player"].get_ydata()) == {0.06}
    assert set(lines["optimal player"].get_ydata()) == {0.78}
    assert len({str(line.get_color()) + str(line.get_linestyle()) for line in lines.values()}) == 4
    assert figure.axes[0].collections, "the 95% interval"


def test_the_title_says_what_ran_and_what_it_reached(
    tmp_path: Path, summary: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = []

    def write(charts: list[Chart], title: str) -> bytes:
        titles.append(title)
        return b""

    monkeypatch.setattr(plots, "_png", write)
    rows: list[MetricsRow] = [
        {"step": 0, "val-core/frozen_lake/success/greedy": 0.16},
        {"step": 9, "val-core/frozen_lake/success/greedy": 0.63},
    ]
    about = {"environment": "frozen_lake", "model": "/home/me/models/a-model-1.5B"}
    plots.write_plots(rows, about, tmp_path)
    rows[1]["val-aux/frozen_lake/failed/greedy"] = 0.25
    plots.write_plots(rows, about, tmp_path)
    words = "frozen_lake, a-model-1.5B, held-out success 16% → 63%"
    assert titles == [words, f"{words} (not comparable)"]


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
    assert title_of("critic/score/mean") == "Reward in training"
    assert (
        title_of("val-core/frozen_lake/success/greedy") == "Held-out success, greedy: frozen_lake"
    )
    assert title_of("a/metric/of/yours") == "a/metric/of/yours"
