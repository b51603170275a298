"""The point of it all: from reward alone the policy gets better. One run, start to end, in well under a minute."""

from __future__ import annotations

import pytest

from agentevo.config import build_config
from agentevo.observability import read_metrics
from agentevo.orchestration.run import train


@pytest.mark.parametrize("seed", [0])
def test_reward_rises(seed, tmp_path, quiet_view):
    """The lamp's colour says which coin is best, by a rule that is never told. Demonstrations name coins at random: they teach to name one, and
    nothing of the rule."""
    config = build_config(
        {
            "environment": {"type": "coins", "rule": "hidden", "num_coins": 3, "other_credit": 0.0},
            "model": {"name": "tiny", "tiny": {"hidden_size": 48, "num_layers": 2, "num_heads": 2}},
            "agent": {"format": "plain", "max_turns": 1},
            "sampling": {"max_new_tokens": 3},
            "algorithm": {"entropy_coef": 0.01},
            "trainer": {"steps": 40, "groups_per_step": 16, "group_size": 8, "learning_rate": 2e-3},
            "cold_start": {"episodes": 256, "random_action_rate": 1.0, "learning_rate": 3e-3},
            "evaluation": {"tasks": 32, "every": 0, "samples": 2},
            "tracking": {"tensorboard": False, "report": False},
            "run": {"seed": seed, "dir": str(tmp_path / "run"), "threads": 1},
        }
    )
    run = train(config, view=quiet_view())
    found = run.summary["eval"]
    assert found["random"] == pytest.approx(1 / 3)
    assert found["sampled"]["before"] < 0.55, "the cold start does not give the rule away"
    assert found["sampled"]["after"] > 0.85
    assert found["after"] > found["before"] + 0.25
    rewards = [row["critic/score/mean"] for row in read_metrics(run.dir / "metrics.jsonl") if "critic/score/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
