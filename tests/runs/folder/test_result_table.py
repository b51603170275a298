"""The arithmetic and the text of the table of results, on summaries written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agentevo.errors import ConfigError
from agentevo.runs.folder.result_table import (
    as_json,
    make_rows,
    markdown,
    read_results,
    write_sweep_table,
    write_table,
)


def finished(
    folder: Path,
    *,
    name: str = "grpo",
    seed: int = 0,
    before: float = 0.25,
    after: float | None = 0.75,
    **more,
) -> Path:
    """A run's folder with only what a table reads."""
    folder.mkdir(parents=True)
    steps = more.get("steps", 30)
    planned = more.get("planned", 30)
    config = {
        "run": {"name": name, "dir": str(folder), "seed": seed, "threads": more.get("threads", 1)},
        "trainer": {"steps": planned, "learning_rate": more.get("learning_rate", 0.1)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {
        "name": name,
        "environment": more.get("environment", "coins"),
        "seed": seed,
        "eval": {
            "before": before,
            "after": after,
            "n": 64,
            "random": more.get("random", 0.25),
            "optimal": 1.0,
            "sampled": {"before": 0.1, "after": more.get("sampled", 0.5)},
            "failed": {"before": 0.0, "after": more.get("failed", 0.0)},
        },
        "wall_s": more.get("wall_s", 30.0),
        "steps": steps,
    }
    (folder / "summary.json").write_text(json.dumps(summary))

    return folder


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_mean_and_spread_over_the_seeds(tmp_path):
    afters = [0.8, 0.9, 0.7]
    folders = [
        finished(
            tmp_path / f"{seed}",
            seed=seed,
            before=0.1 * (seed + 1),
            after=after,
            wall_s=20.0 + 10 * seed,
            threads=seed + 1,
        )
        for seed, after in enumerate(afters)
    ]
    (row,) = make_rows(read_results(reversed(folders)))
    head, _, values = cells(markdown([row]))
    found = dict(zip(head, values, strict=True))
    assert found["seeds"] == "0, 1, 2"
    assert found["before RL"] == "20.0%"
    assert found["after"] == "80.0% ± 10.0"  # sqrt((0² + 10² + 10²) / 2)
    assert found["gain, points"] == "+60.0"
    assert (found["random player"], found["optimal player"], found["time per run"]) == (
        "25.0%",
        "100.0%",
        "30 s",
    )
    assert "environment" not in found
    assert as_json([row])[0]["gain"]["mean"] == pytest.approx(0.6)
    assert [run["after"] for run in as_json([row])[0]["runs"]] == afters


def test_one_run_has_no_spread_and_a_loss_is_a_loss(tmp_path):
    (row,) = make_rows(
        read_results([finished(tmp_path / "a", before=0.5, after=0.25, wall_s=380.0)])
    )
    values = cells(markdown([row]))[2]
    assert values[:5] == ["grpo", "0", "50.0%", "25.0%", "-25.0"]
    assert values[-1] == "6.3 min"


def test_only_runs_of_one_setting_share_a_row(tmp_path):
    results = read_results(
        [
            finished(tmp_path / "a"),
            finished(tmp_path / "b", seed=1, learning_rate=0.2),
            finished(tmp_path / "c", seed=2),
            finished(tmp_path / "d", name="ppo", environment="sokoban"),
        ]
    )
    assert [[result.seed for result in row.results] for row in make_rows(results)] == [
        [0, 2],
        [1],
        [0],
    ]
    assert len(make_rows(results, each=True)) == 4
    assert [line[1] for line in cells(markdown(make_rows(results)))] == [
        "environment",
        "---",
        "coins",
        "coins",
        "sokoban",
    ]


def names(folders, **how):
    return [line[0] for line in cells(markdown(make_rows(read_results(folders), **how)))[2:]]


def test_rows_of_one_name_are_told_apart(tmp_path):
    """By the keys in which they differ; runs that differ in nothing by seed, else by folder."""
    low = finished(tmp_path / "a")
    high = finished(tmp_path / "b", learning_rate=0.2)
    other = finished(tmp_path / "c", name="ppo", learning_rate=0.3)
    assert names([low, high, other]) == [
        "grpo (trainer.learning_rate=0.1)",
        "grpo (trainer.learning_rate=0.2)",
        "ppo",
    ]

    again = finished(tmp_path / "d", seed=1)
    assert names([low, again], each=True) == ["grpo", "grpo"], "their seeds tell them apart"
    copy = finished(tmp_path / "e")
    assert names([low, copy], each=True) == [f"grpo ({low})", f"grpo ({copy})"]


def test_rows_that_differ_in_many_keys_are_told_apart_by_their_folders(tmp_path):
    first = finished(tmp_path / "a")
    second = finished(tmp_path / "b")
    tree = yaml.safe_load((second / "config.yaml").read_text())
    tree["agent"] = {"type": "tool_agent", "max_turns": 3, "final": "reply", "max_tokens": 10}
    (second / "config.yaml").write_text(yaml.safe_dump(tree))
    assert names([first, second]) == [f"grpo ({first})", f"grpo ({second})"]


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    run = finished(tmp_path / "a")
    (row,) = make_rows(read_results([run, tmp_path / "a" / ".." / "a"]))
    assert row.seeds == "0"


def test_a_figure_that_a_run_lacks_is_left_empty(tmp_path):
    results = read_results(
        [finished(tmp_path / "a", sampled=None), finished(tmp_path / "b", seed=1)]
    )
    (row,) = make_rows(results)
    head, _, values = cells(markdown([row]))
    assert values[head.index("sampled, after")] == ""
    assert as_json([row])[0]["sampled"] is None


def test_runs_that_did_not_end_are_refused_alone_and_left_out_of_a_sweep(tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.yaml").write_text("variants: {z: {}, a: {}}\n")

    early = finished(tmp_path / "sweep" / "a-0", name="a", steps=10)
    with pytest.raises(ConfigError, match="this run has not finished"):
        read_results([early])
    with pytest.raises(ConfigError, match="no run of this sweep has finished"):
        read_results([tmp_path / "sweep"])
    assert write_sweep_table(tmp_path / "sweep") is None

    for name, seed in [("a", 10), ("a", 9), ("z", 0), ("gone", 0)]:
        finished(tmp_path / "sweep" / f"{name}-{seed}", name=name, seed=seed)

    assert [(r.name, r.seed) for r in read_results([tmp_path / "sweep"])] == [
        ("z", 0),
        ("a", 9),
        ("a", 10),
        ("gone", 0),
    ]


def test_a_page_keeps_all_but_its_table(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# Zoo\n\n<!-- table -->\nold | table\n<!-- /table -->\n\nWords.\n")
    write_table(page, "| new |\n")
    assert page.read_text() == "# Zoo\n\n<!-- table -->\n| new |\n<!-- /table -->\n\nWords.\n"
    write_table(page, "| newer |\n")
    assert page.read_text() == "# Zoo\n\n<!-- table -->\n| newer |\n<!-- /table -->\n\nWords.\n"

    write_table(tmp_path / "fresh.md", "| new |\n")
    assert (tmp_path / "fresh.md").read_text() == "<!-- table -->\n| new |\n<!-- /table -->\n"


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- table -->",
        "<!-- /table -->\n<!-- table -->",
        "<!-- table --><!-- /table --><!-- table --><!-- /table -->",
    ],
)
def test_a_page_without_one_place_for_the_table_is_refused_and_stays(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(ConfigError, match="needs one line"):
        write_table(tmp_path / "README.md", "| new |\n")
    assert (tmp_path / "README.md").read_text() == text


def test_runs_whose_evaluations_failed_in_part_are_marked(tmp_path):
    fine = markdown(make_rows(read_results([finished(tmp_path / "fine", failed=0.02)])))
    assert "(!)" not in fine

    folders = [
        finished(tmp_path / "partly", name="partly", failed=0.1),
        finished(tmp_path / "wholly", name="wholly", after=None, failed=1.0),
    ]
    text = markdown(make_rows(read_results(folders)))
    partly, wholly = cells(text)[2:]
    assert "+50.0 (!)" in partly and "(!)" in wholly
    assert "(!) More than 2% of the attempts of an evaluation failed" in text
