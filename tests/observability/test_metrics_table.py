"""metrics.jsonl as columns while it is written, and its lines in charts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentevo.observability.chart_lines import MOST_POINTS, line_of, places, thin_peaks
from agentevo.observability.metrics_table import MetricsTable
from agentevo.observability.report_charts import together


@dataclass
class Run:
    table: MetricsTable
    num_rows: int


def read(path: Path) -> MetricsTable:
    table = MetricsTable(path)
    while table.read_more():
        pass
    return table


def test_only_whole_lines_are_read_and_each_one_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = MetricsTable(path)
    assert not table.read_more()

    path.write_bytes(b'{"step": 1, "a": 2.0}\n{"step": 2, "a"')
    table.read_more()
    assert (table.num_rows, table.last_step) == (1, 1)

    with path.open("ab") as file:
        file.write(b": null}\n")

    table.read_more()
    assert table.num_rows == 2

    rows, values = table.series("a")
    assert list(rows) == [0, 1]
    assert values[0] == 2.0
    assert math.isnan(values[1])


@pytest.mark.parametrize("change", ["shorter", "another", "gone"])
def test_a_file_that_was_replaced_is_read_no_further(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    table = read(path)

    if change == "shorter":
        path.write_text('{"step": 9}\n')
    elif change == "another":
        (tmp_path / "new").write_text('{"step": 7}\n' * 9)
        os.replace(tmp_path / "new", path)
    else:
        path.unlink()

    assert not table.read_more()
    assert table.is_replaced
    assert table.num_rows == 2


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = [b"[1]", b'{"a": 1}', b'{"step": 1.5}', b'{"step": 1e30}', b"\xff\xfe", b'{"step": "x"}']
    path.write_bytes(b'{"step": 1}\n' + b"\n".join(bad) + b'\n\n{"step": 2}\n')
    table = read(path)
    assert (table.num_rows, table.num_bad_lines, table.first_bad_line) == (2, len(bad), 2)


def test_a_pipe_in_the_place_of_the_file_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="is not a file"):
        MetricsTable(tmp_path / "metrics.jsonl").read_more()


def test_lines_stand_by_step_tokens_and_hours(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "time": 0, "a": 1, "trainer/trained_tokens": 10}\n'
        '{"step": 2, "time": 3600, "a": 2}\n'
        '{"step": 3, "time": 360000, "a": 3, "trainer/trained_tokens": 5}\n'
    )
    table = read(path)
    run = Run(table, 3)
    assert list(places(run, "step")) == [1, 2, 3]
    assert list(places(run, "tokens")) == [10, 10, 15]

    hours = list(places(run, "time"))
    assert hours[:2] == [0, 1]
    assert hours[2] < 24, "a pause of days is a run that was stopped"
    assert line_of(Run(table, 2), "a") == ([1, 2], [1, 2])
    assert line_of(run, "none") is None


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(4, 40))
def test_thinned_lines_keep_every_peak_and_both_ends(values: list[float], most: int) -> None:
    x, kept = thin_peaks([float(i) for i in range(len(values))], values, most)
    assert len(kept) <= max(most + 4, min(len(values), most))
    assert x == sorted(x)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [value for value in kept if math.isfinite(value)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_lines_of_one_chart_keep_rare_values_and_peaks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = []
    for step in range(10_000):
        more = ', "rare": 4' if step % 1999 == 7 else ""
        lines.append(f'{{"step": {step}, "often": {9 if step == 4321 else 1}{more}}}\n')

    path.write_text("".join(lines))
    table = read(path)
    chart = together(Run(table, table.num_rows), "t", [("often", "often"), ("rare", "rare")])
    assert chart is not None and len(chart.x) < 2 * MOST_POINTS
    often, rare = (line.values for line in chart.lines)
    assert sum(map(math.isfinite, rare)) == 5 and max(often) == 9
