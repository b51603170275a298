"""A pipeline of runs: what each stage begins with, what it is trained on, and a kill within one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentevo.observability.sweep_view import SweepView
from agentevo.runs.folder.run_folder import read_store
from agentevo_evolve.pipeline import build_pipeline, read_state, run_pipeline

DEADLINE_S = 400.0
TREE: dict[str, Any] = {
    "config": {
        "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
        "environment": {"type": "coins", "rule": "hidden", "num_coins": 3},
        "agent": {"format": "plain", "max_turns": 1},
        "sampling": {"max_new_tokens": 3},
        "evaluation": {"tasks": 4, "samples": 0, "every": 0},
        "checkpoint": {"every": 1},
        "tracking": {"tensorboard": False, "report": False},
    },
    "held_out": {"tasks": 8},
    "stages": {
        "warm": {
            "kind": "sft",
            "config": {
                "data": {"demonstrations": 60, "random_action_rate": 0.5},
                "sft": {"batch_conversations": 8, "learning_rate": 2e-3},
            },
        },
        "sample": {
            "kind": "sample",
            "model": "${stages.warm.checkpoint}",
            "config": {"trainer": {"steps": 2, "groups_per_step": 4, "group_size": 4}},
        },
        "best": {
            "kind": "filter",
            "options": {"source": "${stages.sample.folder}", "min_reward": 0.0},
        },
        "pairs": {"kind": "preferences", "options": {"source": "${stages.sample.folder}"}},
        "spin": {
            "repeat": 2,
            "model": "${previous.checkpoint|stages.warm.checkpoint}",
            "reference": "${stages.warm.checkpoint}",
            "optimizer": "carried",
            "config": {
                "algorithm": {"name": "spin", "reference": "frozen"},
                "trainer": {"steps": 12, "groups_per_step": 2, "group_size": 2},
            },
        },
        "out": {
            "kind": "command",
            "options": {
                "run": ["cp", "-r", "${stages.spin.checkpoint}", "${stage.folder}/model"],
                "checkpoint": "model",
            },
        },
    },
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished pipeline whose runner was killed with its stage in the middle of `spin.1`."""
    folder = tmp_path_factory.mktemp("pipelines") / "p"
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump({**TREE, "dir": str(folder)}))
    words = [sys.executable, "-m", "agentevo", "pipeline", str(file)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    began = time.monotonic()
    steps = folder / "stages/spin.1/checkpoints"
    while not list(steps.glob("step-*")) and process.poll() is None:
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[0].decode()

    own = read_state(folder).stages["spin.1"]
    assert (own.status, own.starts) == ("running", 1)
    for child in subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split():
        os.kill(int(child), signal.SIGKILL)

    process.kill()
    process.wait(timeout=DEADLINE_S)
    run = subprocess.run(
        [*words, "--resume"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "spin.1: resumed" in run.stdout
    return folder


@pytest.mark.soak
def test_after_a_kill_only_the_stage_under_way_has_a_second_process(whole: Path):
    state = read_state(whole)
    assert state.status == "finished"
    starts = {name: stage.starts for name, stage in state.stages.items()}
    assert starts.pop("spin.1") == 2
    assert set(starts.values()) == {1}
    steps = [json.loads(line)["step"] for line in (whole / "stages/spin.1/metrics.jsonl").open()]
    assert sorted(set(steps)) == list(range(13))


@pytest.mark.slow
def test_each_model_is_measured_and_its_lineage_kept(whole: Path):
    state = read_state(whole)
    for name in ("start", "warm", "spin.1", "spin.2"):
        numbers = state.stages[f"{name}@held_out"].numbers
        assert 0 <= numbers["success_low"] <= numbers["success"] <= numbers["success_high"] <= 1

    gained = state.stages["spin.2@held_out"].numbers
    successes = [state.stages[f"spin.{n}@held_out"].numbers["success"] for n in (1, 2)]
    assert gained["gain"] == pytest.approx(successes[1] - successes[0])

    used = {(one.stage, one.key): one.sha256 for one in state.stages["spin.2"].inputs}
    assert used["spin.1", "checkpoint"] == state.stages["spin.1"].outputs["checkpoint"].sha256
    assert used["warm", "checkpoint"] == state.stages["warm"].outputs["checkpoint"].sha256

    page = (whole / "report.html").read_text()
    assert "Lineage" in page
    assert used["warm", "checkpoint"][:10] in page


@pytest.mark.slow
def test_a_stage_that_samples_trains_on_nothing_and_keeps_every_attempt(whole: Path):
    state = read_state(whole)
    began, ended = (
        (whole / state.stages[name].outputs["checkpoint"].path / "model.safetensors").read_bytes()
        for name in ("warm", "sample")
    )
    assert began == ended

    async def count(store: Any) -> tuple[int, int]:
        kept = await store.summaries(split="train")
        return len(kept), len(
            [trajectory async for trajectory in store.trajectories(trained_step=1)]
        )

    assert read_store(whole / "stages/sample", count) == (2 * 4 * 4, 0)

    summary = json.loads((whole / "stages/sample/summary.json").read_text())
    assert not [text for text in summary["warnings"] if "trained on no token" in text]

    rows = (whole / "stages/best/rows.jsonl").read_text().splitlines()
    assert len(rows) == state.stages["best"].numbers["rows"] > 0


@pytest.mark.slow
def test_a_change_runs_what_it_touches_again_and_nothing_else(whole: Path):
    stream = io.StringIO()
    tree = {**TREE, "dir": str(whole)}
    overrides = ["best.options.per_task=2"]
    pipeline = build_pipeline(tree, overrides)
    run_pipeline(pipeline, resume=True, view=SweepView("p", stream=stream, plain=True))

    state = read_state(whole)
    assert "best: runs again: options.per_task" in stream.getvalue()
    assert {name for name, stage in state.stages.items() if stage.starts > 1} == {"best", "spin.1"}
