"""The examples of `agentevo evolve`: a policy and a server that it knows nothing of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "evolve"
SQLITE = ROOT / "build" / "sqlite"
"""An environment of its own for the server: it needs an older `mcp` than we test with."""
FEW = ["--tasks", "24", "--held-out", "4", "--demonstrations", "16", "--steps", "1"]


def evolved(example, folder, *words):
    done = subprocess.run(
        [sys.executable, FOLDER / f"{example}.py", "--out", str(folder), *FEW, *words],
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return (folder / "evolved" / "tasks" / "train.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.examples
@pytest.mark.timeout(1800)
def test_a_booking_office(tmp_path):
    rows = [json.loads(line) for line in evolved("booking", tmp_path)]
    assert all("state_checks" in row for row in rows)
    assert (tmp_path / "evolved" / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.examples
@pytest.mark.timeout(1800)
def test_a_server_that_others_wrote(tmp_path):
    """Every task is a question, and the curriculum's harder ones have further conditions."""
    if not SQLITE.is_dir():
        subprocess.run([sys.executable, "-m", "venv", SQLITE], check=True, timeout=300)
        install = [SQLITE / "bin" / "pip", "install", "--quiet", "mcp-server-sqlite", "mcp<2"]
        subprocess.run(install, check=True, timeout=600)

    server = str(SQLITE / "bin" / "mcp-server-sqlite")
    rows = [json.loads(line) for line in evolved("sqlite_server", tmp_path, "--server", server)]
    asked = [row["solved_by_calls"][-1]["question"] for row in rows]
    assert sum(one is not None for one in asked) > len(rows) / 2
