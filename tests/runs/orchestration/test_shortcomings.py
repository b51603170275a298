"""A run that has not done what its numbers suggest says so at its end."""

from __future__ import annotations

import math

import pytest
from byte_policy import byte_policy

from agentevo.agents import Outcome
from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.runs.orchestration.run_record import RunProgress
from agentevo.types import Message, Task


def progress(num_steps: int = 3, **more: float) -> RunProgress:
    one = RunProgress()
    for step in range(1, num_steps + 1):
        metrics = {"group/num": 2.0, "group/zero_std_ratio": 0.5} | more
        one.count_step(
            step, [], metrics, {f"{step}": "zero-variance"}, updated=bool(more.get("updated", 1))
        )
    return one


def test_a_healthy_run_has_nothing_to_say():
    assert progress().shortcomings(3) == []


def test_a_run_that_was_stopped_says_nothing_yet():
    assert progress(2, updated=0.0).shortcomings(3) == []


@pytest.mark.parametrize(
    ("step", "num_steps", "command", "expected"),
    [
        (
            105,
            6,
            "train",
            "105 steps are committed and trainer.steps=6 is less, so nothing is "
            "trained: give trainer.steps above 105 to continue",
        ),
        (
            6,
            6,
            "train",
            "6 steps are committed and trainer.steps=6 is no more, so nothing is "
            "trained: give trainer.steps above 6 to continue",
        ),
        (
            6,
            6,
            "learn",
            "6 steps are committed and trainer.steps=6 is no more, so nothing is "
            "trained: give --resume and trainer.steps above 6 to continue",
        ),
        (6, 7, "train", None),
        (0, 0, "train", None),
        (6, math.inf, "loop", None),
        (3, 3, "sft", "3 steps are committed of 3, so nothing is trained"),
    ],
)
def test_a_run_without_steps_left_says_so(step, num_steps, command, expected):
    assert RunProgress(step=step).nothing_left(num_steps, command) == expected


def test_a_run_that_trained_on_nothing():
    (words,) = progress(updated=0.0).shortcomings(3)
    assert "trained on no token in 3 steps" in words and "3 zero-variance" in words


def test_a_run_whose_every_group_had_equal_rewards():
    (words,) = progress(**{"group/zero_std_ratio": 1.0}).shortcomings(3)
    assert "In every one of 6 groups all attempts had the same reward" in words
    assert progress(**{"group/zero_std_ratio": 1.0}).shortcomings(3, compares=False) == []


def test_a_comparison_that_is_none():
    one = progress()
    one.before = {"val-aux/agent/failed/greedy": 0.0}
    one.after = {"val-aux/agent/failed/greedy": 0.5}
    (words,) = one.shortcomings(3)
    assert "can't be compared" in words


@pytest.mark.slow
@pytest.mark.parametrize("reward", [0.5, None])
def test_a_whole_run_puts_it_into_its_summary(tmp_path, quiet_view, reward):
    """Equal rewards; and half of the attempts without any."""

    async def agent(task, policy):
        await policy.generate([Message("user", task.query)])
        return 0.5 if policy.name.endswith("#0") else Outcome(reward=reward)

    tree = {
        "model": byte_policy(context_length=128),
        "sampling": {"max_new_tokens": 2},
        "trainer": {"steps": 2, "groups_per_step": 2, "group_size": 2},
        "evaluation": {"tasks": 1, "every": 0, "samples": 0},
        "tracking": {"tensorboard": False, "report": False},
    }
    config = build_config(tree, [f"run.dir={tmp_path / 'run'}"], needs_environment=False)
    tasks = [Task(id=f"t{n}", query="x" * n) for n in range(1, 6)]
    run = train(config, agent=agent, tasks=tasks, view=quiet_view())
    assert "trained on no token in 2 steps" in "\n".join(run.summary["warnings"])
    assert run.summary["eval"]["failed"] == {"before": 0.0, "after": 0.0}
