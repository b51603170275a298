"""`agentevo top`: on folders of runs, and on a run that plays meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from agentevo.store import open_store
from agentevo.store.call_log import AttemptCalls, call_log


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


def play(url: str, playing: threading.Event, end: threading.Event, name: str) -> None:
    async def scenario() -> None:
        async with await open_store(url), call_log(url) as log:
            calls = AttemptCalls(log, name)
            with calls.attempt("Player"):
                with calls.call("tool", "over", results=2):
                    pass
                async with calls.call("tool", "search"):
                    playing.set()
                    await asyncio.to_thread(end.wait, 60)

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_runs_is_seen_and_then_how_it_ended(agentevo, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("{}")
    playing = threading.Event()
    end = threading.Event()
    url = f"sqlite:///{folder / 'store.sqlite'}"
    player = threading.Thread(target=play, args=(url, playing, end, "task/train@1#0"))
    player.start()
    try:
        assert playing.wait(300)
        for _ in range(300):
            out = agentevo("top", str(folder), "--once").out
            if "tool search" in out:
                break
            end.wait(0.1)

        assert "task/train@1#0" in out and "tool search" in out, out
    finally:
        end.set()
        player.join()

    assert "tool search" not in agentevo("top", str(folder), "--once").out


@pytest.mark.parametrize("every", ["often", "nan", "inf", "-1", "1e9", "9" * 5000])
def test_what_no_clock_can_wait_is_refused_in_one_line(agentevo, tmp_path: Path, every) -> None:
    code, _, err = agentevo("top", str(tmp_path), f"--every={every}")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "give seconds, from 0 to 86,400 (a day)" in err
