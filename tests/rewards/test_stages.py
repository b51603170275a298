"""Rewards that change by stages: which count at a step, in a run as in its replay, and which never
leave a step without a judge."""

from __future__ import annotations

import pytest

from agentevo.config import build_config
from agentevo.errors import ConfigError
from agentevo.rollout.sampler import BASELINE, group_name
from agentevo.rollout.scoring import Scoring, step_of
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Message, Task, Trajectory, Turn, group_of_agent

STAGES = [
    {"name": "format", "pattern": "<a>.*", "until_step": 5},
    {"name": "exact_match", "from_step": 3},
]


def config_of(rewards):
    return build_config({"environment": {"type": "coins"}, "rewards": rewards})


def judged(group: str, reply: str = "<a> no", scorer: str | None = None) -> Trajectory:
    turn = Turn(
        index=0,
        prompt_ids=[1],
        completion_ids=[2],
        logprobs=[0.0],
        versions=[0],
        finish_reason="stop",
        messages=[Message("user", "?"), Message("assistant", reply)],
    )
    attempt = Trajectory(id=f"{group}#0", task_id="t", group_id=group, turns=[turn])
    task = Task(id="t", answer="yes", scorer=scorer)
    scoring = Scoring(config_of(STAGES).rewards)
    (found,) = run_coroutine(scoring.score([attempt], [True], {}, task=task))
    return found


@pytest.mark.parametrize(
    ("label", "step", "parts", "success"),
    [
        ("train", 1, {"format": 1.0}, True),
        ("train", 4, {"format": 1.0, "exact_match": 0.0}, True),
        (BASELINE, 4, {"format": 1.0, "exact_match": 0.0}, True),
        ("train", 6, {"exact_match": 0.0}, False),
        ("greedy", 1, {"exact_match": 0.0}, False),
        ("untaught-sampled", 0, {"exact_match": 0.0}, False),
        ("eval", 0, {"exact_match": 0.0}, False),
    ],
)
def test_what_counts_follows_from_the_groups_id(label, step, parts, success):
    group = group_name("t", label, step)
    for name in (group, group_of_agent(group, "solver")):
        found = judged(name)
        assert (found.reward_parts, found.success) == (parts, success)


def test_a_tasks_own_scorer_counts_at_every_step():
    assert judged(group_name("t", "train", 1), "yes", "exact_match").reward == 1.0


def test_ids_of_tasks_do_not_pass_for_steps():
    assert step_of("a/train@7/train@3") == 3
    assert step_of("whatever") is None and step_of("a/train@x") is None


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([{"name": "tool_use", "until_step": 5}], "no reward counts at the end"),
        ([{"name": "tool_use", "from_step": 2}], "no reward counts at step 1"),
        (
            [{"name": "tool_use", "until_step": 5}, {"name": "returned", "from_step": 7}],
            "no reward counts at step 6",
        ),
        (
            [{"name": "tool_use", "from_step": 5, "until_step": 4}, "returned"],
            r"rewards\[0\].until_step: 4 is before",
        ),
    ],
)
def test_no_step_is_without_a_judge(rewards, problem):
    with pytest.raises(ConfigError, match=problem):
        config_of(rewards)
