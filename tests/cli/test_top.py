"""`agentevo top`: on folders of runs."""

from __future__ import annotations

import json
from pathlib import Path


def make_run(folder: Path, name: str, steps: int, planned: int = 4) -> Path:
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"run: {{name: {name}}}\ntrainer: {{steps: {planned}}}\n")
    rows = [
        {
            "step": step,
            "time": 1.0 * step,
            "critic/score/mean": step / 8,
            "train/success": 0.5,
            "perf/throughput": 1234.0,
            "staleness/mean": 0.5,
            "rollout/failed/timeout": 2.0,
        }
        for step in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return run


def test_once_prints_every_run(agentevo, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "half", 2)
    done = make_run(tmp_path / "runs", "done", 4)
    summary = {
        "name": "done",
        "eval": {"before": 0.1, "after": 0.5},
        "steps": 4,
        "planned_steps": 4,
        "warnings": ["it \x1b[31mcollapsed"],
    }
    (done / "summary.json").write_text(json.dumps(summary))
    code, out, err = agentevo("top", str(tmp_path / "runs"), "--once")
    assert code == 0, err

    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert rows["half"][1:9] == ["interrupted", "2/4", "0.250", "50%", "1,234", "0.5", "-", "2"]
    assert rows["done"][1:3] == ["finished", "4/4"]
    assert "collapsed" in out
    assert "\x1b" not in out


def test_what_is_no_folder_is_refused(agentevo, tmp_path: Path) -> None:
    code, _, err = agentevo("top", str(tmp_path / "none"), "--once")
    assert code == 2
    assert "is not a folder" in err
    (tmp_path / "empty").mkdir()
    assert agentevo("top", str(tmp_path / "empty"), "--once").out == "no run yet\n"


def test_a_url_is_refused_with_what_shows_it(agentevo) -> None:
    code, _, err = agentevo("top", "http://[", "--once")
    assert code == 2
    assert "error: http://[: runs are followed in their folders" in err
    assert "`agentevo ui` shows stores" in err
