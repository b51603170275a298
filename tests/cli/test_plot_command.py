"""`agentevo report --plot`: several runs in one picture, the seeds of a setting as one line with a
band."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from agentevo.config import build_config, to_yaml
from agentevo.observability import plots
from agentevo.observability.pages.charts import Chart, ChartLine
from agentevo.observability.plots import LOOKS, write_comparison

HELD_OUT = "val-core/coins/success/greedy"


def run(folder: str, values: Mapping[int, float | None], *, seed: int, lr: float = 1e-3) -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    config = build_config(
        {
            "environment": {"type": "coins"},
            "model": {"name": "tiny"},
            "run": {"name": "coins", "seed": seed},
            "trainer": {"learning_rate": lr},
        }
    )
    (path / "config.yaml").write_text(to_yaml(config))
    rows = [
        {
            "step": step,
            "time": 10.0 * step * (1 + seed / 10),
            "train/success": value,
            HELD_OUT: value,
        }
        for step, value in values.items()
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Chart]:
    """The charts that were drawn."""
    charts: list[Chart] = []

    def write(given: list[Chart], path: Path) -> None:
        charts.extend(given)
        write_comparison(given, path)

    monkeypatch.setattr(plots, "write_comparison", write)
    return charts


@pytest.mark.slow
def test_seeds_are_one_line_with_a_band_and_settings_are_lines(agentevo, drawn):
    run("a1", {1: 0.0, 2: 0.5, 3: None}, seed=1)
    run("a2", {1: 0.5, 2: 1.0, 3: 1.0}, seed=2)
    run("b", {1: 0.25}, seed=1, lr=1e-4)
    told = agentevo("report", "a1", "a2", "b", "a1", "--plot", "runs.png")
    assert told == (0, "runs: 3, lines: 2, metrics: 2; runs.png\n", "")
    titles = [chart.title for chart in drawn]
    assert titles == ["Held-out success, greedy: coins", "Success in training"]

    both, single = drawn[0].lines
    assert list(both.values)[:2] == [0.25, 0.75] and math.isnan(both.values[2])
    assert (list(both.low or [])[:2], list(both.high or [])[:2]) == ([0.0, 0.5], [0.5, 1.0])
    assert (single.low, single.name) == (None, "b"), "two settings of one name"

    pixels = imread("runs.png")[:, :, :3].reshape(-1, 3)
    for color, _ in LOOKS[:1]:
        assert (abs(pixels - to_rgb(color)).max(axis=1) < 0.02).sum() > 100


@pytest.mark.slow
def test_each_run_over_time_and_one_metric(agentevo, drawn):
    sweep = Path("sweep")
    run("sweep/x", {1: 0.0, 721: 1.0}, seed=1)
    run("sweep/y", {1: 0.0, 721: 1.0}, seed=2)
    (sweep / "sweep.yaml").write_text("variants: {}\n")

    words = ["report", "sweep", "--each", "--x", "time", "--metric", "train/success"]
    words += ["--plot", "runs.png"]
    assert agentevo(*words).code == 0
    assert [line.name for line in drawn[0].lines] == ["sweep/x", "sweep/y"]
    assert drawn[0].name_of_x == "hours"
    assert list(drawn[0].x) == pytest.approx([0.0, 2.2, 2.4])
    assert list(drawn[0].lines[0].values)[:2] == [0.0, 1.0]
    assert agentevo(*[word for word in words if word != "--each"]).code == 0

    (line,) = drawn[1].lines
    assert list(line.values)[:2] == pytest.approx([0.0, (1.0 + 11 / 12) / 2])
    assert math.isnan(line.values[2]), "only one of the runs took so long"
    assert Path("runs.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_can_not_be_drawn_is_refused_and_writes_nothing(agentevo):
    run("a", {1: 0.5}, seed=1)
    run("empty", {}, seed=1)
    for words, expected in (
        (["a", "--metric", "train/sucess"], "did you mean train/success"),
        (["a", "--x", "hours"], "there are step, tokens, time"),
        (["a", "--plot", "p.jpg"], "must end in .png"),
        (["a", "--plot", "nowhere/p.png"], "its folder does not exist"),
        (["a", "nix"], "nix: is not the folder of a run"),
        (["a", "empty"], "empty: the run has no numbers yet"),
        (["a", *["--metric", "train/success"] * 13], "a picture has 1 to 12"),
    ):
        code, out, err = agentevo("report", "--plot", "p.png", *words)
        assert (code, out) == (2, ""), words
        assert expected in err

    assert not list(Path().glob("*.png"))
    for words, option in ((["a", "--x", "time"], "--x"), (["a", "--each"], "--each")):
        code, _, err = agentevo("report", *words)
        assert code == 2 and f"{option} is for" in err


@pytest.mark.slow
def test_names_are_no_formulas_and_every_line_can_be_told_apart(tmp_path: Path) -> None:
    names = ["_hidden", "$\\frac", "", *(f"n{place}" for place in range(len(LOOKS) - 3))]
    lines = [ChartLine(name, [0.0, 1.0]) for name in names]
    write_comparison([Chart("$x", [1, 2], lines)], tmp_path / "all.png")
    with pytest.raises(Exception, match="tells 28 apart"):
        write_comparison([Chart("x", [1, 2], [*lines, lines[0]])], tmp_path / "more.png")
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".png"] == ["all.png"]


@pytest.mark.slow
def test_a_line_goes_over_the_steps_at_which_only_others_have_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn = []
    plot = Axes.plot

    def noted(axes: Axes, x: list[float], values: list[float], **look: Any) -> Any:
        drawn.append((x, values, look["marker"]))
        return plot(axes, x, values, **look)

    monkeypatch.setattr(Axes, "plot", noted)
    gap = float("nan")
    lines = [ChartLine("a", [0.0, 0.5, gap, 1.0]), ChartLine("b", [0.25, gap, 0.75, gap])]
    write_comparison([Chart("x", [0, 3, 5, 8], lines)], tmp_path / "both.png")
    assert drawn == [([0, 3, 8], [0.0, 0.5, 1.0], None), ([0, 5], [0.25, 0.75], "o")]
