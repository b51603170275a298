"""The example that trains with the tools that ship runs from the cold start to its table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentevo

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
pytest.importorskip("mcp", reason="the SDK of MCP is not installed")


@pytest.mark.examples
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tool_that_ships_is_trained_with_through_mcp(tmp_path):
    words = ["database", "--out", tmp_path, "--steps", "1"]
    words += ["--conversations", "48", "--held-out", "4", "--solved", "24"]
    done = subprocess.run(
        [sys.executable, FOLDER / "tool_servers.py", *map(str, words)],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    result = json.loads((tmp_path / "database" / "result.json").read_text())
    assert result.keys() >= {"untrained", "read", "before", "after", "steps"}

    run = agentevo.load_run(tmp_path / "database" / "run")
    attempts = run.trajectories(split="train")
    assert len(attempts) == 64 and {attempt.status for attempt in attempts} == {"completed"}
    assert all("database" in attempt.reward_parts for attempt in attempts if attempt.reward_parts)

    held_out = (tmp_path / "database" / "eval.jsonl").read_text().splitlines()
    told = {json.loads(line)["query"] for line in held_out}
    for name in ("demonstrations", "reading", "cold_start"):
        shown = (tmp_path / "database" / f"{name}.jsonl").read_text()
        assert shown and not any(query in shown for query in told)


def test_the_table_keeps_what_was_not_trained(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import tool_servers_table as tables

    (tmp_path / "files").mkdir()
    sampled = {"before": 0.25, "after": 0.5}
    result = {"untrained": 0.0, "read": 0.5, "before": 0.125, "after": 0.75, "sampled": sampled}
    result |= {"steps": 8, "minutes": 1.25}
    (tmp_path / "files" / "result.json").write_text(json.dumps(result))

    stands = "| `python tool_servers.py search` | kept |"
    lines = tables.table(tmp_path, stands).splitlines()
    name = "`python tool_servers.py files`"
    shares = "0% | 50% | 12% | 75% | +62 | 25% | 50% | +25"
    made = f"| {name} | {shares} | 8 | 1.2 |"
    assert lines[2:] == [made, stands]
