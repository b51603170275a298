"""What `print` says of runs, trajectories and turns."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentevo.api.run import Run
from agentevo.config import build_config, to_yaml
from agentevo.observability.current_activity import Moment
from agentevo.runs.folder.run_words import run_words
from agentevo.types import Message, Trajectory, Turn

SUMMARY: dict[str, Any] = {
    "name": "lake",
    "seed": 0,
    "steps": 40,
    "planned_steps": 40,
    "wall_s": 1.0,
    "eval": {"before": 0.125, "after": 0.75, "n": 64},
    "best": {"step": 30, "value": 0.8},
}


def run_in(folder: Path, summary: dict[str, Any] | None, moment: Moment | None = None) -> Run:
    config = build_config(
        {"environment": {"type": "coins"}}, [f"run.dir={folder}", "run.name=lake"]
    )
    folder.mkdir()
    (folder / "config.yaml").write_text("# agentevo train\n" + to_yaml(config))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if moment is not None:
        (folder / "now.json").write_text(
            json.dumps({name: getattr(moment, name) for name in moment.__struct_fields__})
        )
    return Run(config)


@pytest.mark.parametrize(
    ("summary", "moment", "expected"),
    [
        (
            SUMMARY,
            None,
            "finished, 40 of 40 steps, held-out success 12.5% before, 75.0% after (64 tasks), "
            "best at step 30",
        ),
        (
            SUMMARY | {"steps": 12, "stopped_early": "it stands still", "best": {}},
            None,
            "finished early (it stands still), 12 of 40 steps, held-out success 12.5% before, "
            "75.0% after (64 tasks)",
        ),
        (
            SUMMARY
            | {
                "eval": {"before": None, "after": None},
                "held_out": {"before": {"loss": 2.5}, "after": {"loss": 1.25}},
                "best": {},
            },
            Moment(step=40, ended="stopped"),
            "stopped, 40 of 40 steps, held-out loss 2.5 before, 1.25 after",
        ),
        (
            None,
            Moment(phase="sampling", step=3, planned=9, heartbeat_at=time.time() + 1e6),
            "running (sampling), 3 of 9 steps",
        ),
        (None, Moment(step=3, planned=9), "interrupted, 3 of 9 steps"),
        (None, Moment(ended="failed", reason="no disk"), "failed (no disk), 0 steps"),
        (None, None, "interrupted, 0 steps"),
        ({"name": 3}, None, "can't be read ("),
    ],
)
def test_a_run_says_what_it_is(tmp_path, summary, moment, expected):
    run = run_in(tmp_path / "run", summary, moment)
    assert str(run).startswith(f"<Run 'lake' in {tmp_path / 'run'}: {expected}")
    assert run_words(tmp_path / "nothing") == "not begun"


def test_an_attempt_says_what_it_is_without_its_tokens():
    turn = Turn(
        index=1,
        parent=0,
        prompt_ids=range(5000),
        completion_ids=[7] * 3000,
        logprobs=[-0.5] * 3000,
        versions=[1] * 3000,
        finish_reason="stop",
        messages=[Message("assistant", "word " * 1000)],
    )
    assert str(turn).startswith(
        "<Turn 1 after turn 0: 5000 new prompt tokens, 3000 sampled (stop), said 'word word"
    )
    attempt = Trajectory(id="t#0", task_id="t", group_id="g", turns=[turn], reward=0.5)
    assert str(attempt) == (
        "<Trajectory 't#0': reward 0.5, no success, 1 turn, 3000 tokens sampled>"
    )
    failed = Trajectory(id="t#1", task_id="t", group_id="g", status="failed", error="late " * 999)
    assert "failed: 'late late" in str(failed)
    assert max(len(str(one)) for one in (turn, attempt, failed)) < 1000
