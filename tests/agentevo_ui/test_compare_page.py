"""Runs beside each other: which are one line, its band, and where configurations differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentevo.observability.metrics_table import MetricsTable
from agentevo.runs.folder.run_state import RunView
from agentevo.runs.folder.sources import RunSource
from agentevo_ui.compare_page import chart_of, differing, settings_of


def run(key: str, values: dict[int, float], seed: int = 0, **settings: Any) -> RunView:
    table = MetricsTable(Path("metrics.jsonl"))
    for step, value in values.items():
        table.add_row(step, float(step), {"a": value})
    config = {"run": {"name": "lake", "seed": seed, "dir": key}, "trainer": settings | {"steps": 3}}
    return RunView(
        RunSource(key, key, None), 1, config=config, table=table, num_rows=table.num_rows
    )


def test_runs_that_differ_in_nothing_but_their_seed_are_one_line_with_a_band() -> None:
    views = [
        run("x", {1: 1.0, 2: 2.0}, seed=1, lr=0.1),
        run("y", {1: 3.0, 2: 6.0, 3: 9.0}, seed=2, lr=0.1),
        run("z", {1: 5.0}, seed=1, lr=0.2),
    ]
    lines = settings_of(views, "setting")
    assert [[view.key for view in line.views] for line in lines] == [["x", "y"], ["z"]]
    assert [line.seeds for line in lines] == [["1", "2"], ["1"]]
    assert [line.name for line in lines] == ["x", "z"]  # one name for two lines: folders tell

    chart = chart_of(lines, "a", "step")
    assert chart is not None
    assert list(chart.x) == [1, 2, 3]

    both = chart.lines[0]
    assert list(both.values)[:2] == [2.0, 4.0]
    assert both.low is not None and list(both.low)[:2] == [1.0, 2.0]
    assert both.high is not None and list(both.high)[:2] == [3.0, 6.0]
    assert both.values[2] != both.values[2], "a mean over fewer runs would be another line"
    assert chart.lines[1].low is None

    differences, same = differing(lines)
    assert differences == [("trainer.lr", ["0.1", "0.2"])]
    assert same == 1, "trainer.steps"


def test_each_run_can_have_its_own_line() -> None:
    views = [run("x", {1: 1.0}, seed=1), run("y", {1: 2.0}, seed=2)]
    lines = settings_of(views, "run")
    assert [line.name for line in lines] == ["x, seed 1", "y, seed 2"]
    assert differing(lines)[0] == [("run.seed", ["1", "2"])]

    alike = settings_of([run("x", {1: 1.0}), run("y", {1: 2.0})], "run")
    assert [line.name for line in alike] == ["x", "y"] and differing(alike)[0] == []
    assert chart_of(lines, "nothing", "step") is None


@pytest.mark.parametrize("by", ["setting", "run"])
def test_nothing_to_compare_is_no_line(by: str) -> None:
    assert settings_of([], by) == []
    assert differing([]) == ([], 0)
