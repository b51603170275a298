"""The point of it all: from reward alone the policy gets better. One run of a shipped recipe on a
smaller lake."""

from __future__ import annotations

import pytest

from agentevo.api.run import train
from agentevo.config import load_config
from agentevo.observability import read_metrics


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_success_rises(tmp_path, quiet_view):
    """FrozenLake after a cold start that teaches little more than the form of an answer. It learns
    the same on a busy machine, and no episode has a time limit there."""
    overrides = [
        "environment.size=3",
        "environment.max_actions=6",
        "agent.max_turns=6",
        "trainer.steps=12",
        "trainer.groups_per_step=24",
        "trainer.learning_rate=5e-4",
        "evaluation.every=0",
        "evaluation.tasks=64",
        "evaluation.samples=0",
        "checkpoint.every=0",
    ]
    overrides += [
        "agent.timeout_s=86400",
        "engine.timeout_s=86400",
        "tracking.tensorboard=false",
        "tracking.report=false",
        "run.threads=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    run = train(load_config("frozen_lake", overrides), view=quiet_view())
    found = run.summary["eval"]
    assert found["before"] < found["random"], "the cold start does not give the task away"
    assert found["after"] > found["before"] + 0.3
    assert found["after"] > found["random"] + 0.2

    rewards = [
        row["critic/score/mean"]
        for row in read_metrics(run.dir / "metrics.jsonl")
        if "critic/score/mean" in row
    ]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
