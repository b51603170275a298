"""`agentevo top`: on folders of runs, on a terminal with keys, and without one."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentevo.observability.top_view import RunLine, draw, plain_lines


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


def test_the_choice_stays_on_the_screen_and_shows_its_calls() -> None:
    from rich.console import Console

    runs = [RunLine(f"run-{number}", "running", calls=(f"call {number}",)) for number in range(60)]
    console = Console(width=120, height=24, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(draw(runs, 59, calls=True, height=24))
    shown = console.export_text()
    assert "run-59" in shown
    assert "call 59" in shown
    assert len(shown.splitlines()) <= 24
    assert plain_lines([]) == [plain_lines([])[0]]


@pytest.mark.slow
def test_keys_on_a_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "one", 2)
    make_run(tmp_path / "runs", "two", 3)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentevo", "top", str(tmp_path / "runs"), "--every", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(theirs)
    seen = b""

    def wait_for(words: bytes) -> None:
        nonlocal seen
        until = time.monotonic() + 300
        while words not in seen:
            assert time.monotonic() < until, seen
            seen += os.read(ours, 65536)

    try:
        wait_for(b"two")
        os.write(ours, b"j\x1b[A\n")
        wait_for(b"nothing is running")

        os.write(ours, b"q")
        until = time.monotonic() + 300
        while process.poll() is None:
            assert time.monotonic() < until
            try:
                os.read(ours, 65536)
            except OSError:  # the other side is closed
                break

        assert process.wait(300) == 0, process.stderr.read()
    finally:
        process.kill()
        os.close(ours)
