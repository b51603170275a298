"""A policy that is paid by nothing but a judge's ranking gets better at what a rule measures."""

from __future__ import annotations

import re

import pytest
from judge_endpoint import Record, attempts_in, judge, records_in, verdict, words_of
from remote_server import RemoteServer, chat, gives

from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.environments.coins import COLOURS, METALS

RECIPE = {
    "environment": {"type": "coins", "rule": "hidden", "num_coins": 3},
    "agent": {"type": "environment", "format": "plain", "max_turns": 1, "timeout_s": 86400},
    "model": {"name": "tiny", "tiny": {"hidden_size": 64, "num_layers": 1, "num_heads": 2}},
    "cold_start": {"episodes": 64},  # it answers, and seldom rightly
    "sampling": {"max_new_tokens": 2},
    "algorithm": {"name": "grpo", "entropy_coef": 0.003},
    "trainer": {"steps": 30, "groups_per_step": 6, "group_size": 8, "learning_rate": 5e-3},
    "evaluation": {"tasks": 48, "every": 0, "samples": 0},
    "checkpoint": {"every": 0},
    "engine": {"timeout_s": 86400},
    "run": {"threads": 1, "seed": 1},
    "tracking": {"report": False, "tensorboard": False},
}


def _worth(record: Record, lamp: str) -> float:
    """What a judge who knows the coins makes of an attempt."""
    said = words_of(record).strip().lower()
    right = METALS[COLOURS.index(lamp)]
    if said == right:
        return 1.0
    return 0.5 if said in METALS else 0.3 if right in said.split() else 0.0


def _knows_coins(body, handler) -> None:
    prompt = body["messages"][0]["content"]
    told = words_of(records_in(prompt)["what all attempts begin with"])
    lamp = re.findall(r"The lamp is (\w+)\.", told)[-1]
    scores = {number: _worth(record, lamp) for number, record in attempts_in(prompt).items()}
    gives(chat(verdict(scores)))(body, handler)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_held_out_success_rises_by_ruler_alone(tmp_path, quiet_view):
    """The environment's own reward says what success is, and has the weight 0."""
    with RemoteServer(_knows_coins) as server:
        rewards = [
            {"name": "returned", "weight": 0.0},
            {"name": "ruler", "uncalibrated": True, "timeout_s": 3600},
        ]
        config = build_config(
            RECIPE | {"rewards": rewards, "remote_models": {"judge": judge(server)}},
            [f"run.dir={tmp_path / 'run'}"],
        )
        run = train(config, view=quiet_view())
        num_asked = len(server.received)

    found = run.summary["eval"]
    attempts = run.trajectories(split="train")
    assert found["before"] < 0.6 and found["after"] > found["before"] + 0.3, found
    assert num_asked > 200 and {attempt.status for attempt in attempts} == {"completed"}
    assert all(
        attempt.reward == pytest.approx(attempt.reward_parts["ruler"]) for attempt in attempts
    )
    assert len({attempt.metrics["own_reward"] for attempt in attempts}) > 1

    (row,) = run.summary["remote_models"]["asked"]
    assert (row["model"], row["role"], row["answers"]) == ("judge", "judge", num_asked)
