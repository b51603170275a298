"""The examples of the project's own tool agent learn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentevo

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
TASKS = [{"id": str(number), "query": "?"} for number in range(2)]
"""Whatever they are: the run is only read."""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", ["tool_agent", "mcp_agent"])
def test_an_example_trains_on_tokens_that_extend_each_other(example, tmp_path):
    words = ["--out", tmp_path / "out", "--steps", "1", "--conversations", "512", "--held-out", "4"]
    done = subprocess.run(
        [sys.executable, FOLDER / f"{example}.py", *map(str, words)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "result.json").read_text()).keys() >= {"before", "after"}

    run = agentevo.load_run(tmp_path / "out" / "run", agent=lambda task, policy: 0.0, tasks=TASKS)
    attempts = run.trajectories(split="train")
    assert {attempt.status for attempt in attempts} == {"completed"}
    assert max(attempt.metrics["num_tool_calls"] for attempt in attempts) >= 1

    for one in attempts:
        assert [turn.parent for turn in one.turns] == [None, *range(len(one.turns) - 1)]
