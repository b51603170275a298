"""Small runs that are made to have each finding say so by step 3, in summary.json too; one that
learns says nothing."""

from __future__ import annotations

import json

import pytest

from agentevo.api.run import train
from agentevo.config import build_config
from agentevo.runs.folder.run_folder import read_store

pytestmark = pytest.mark.slow


def codes_of(folder):
    """Code -> the step at which the finding began."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["warnings"] or not summary["findings"]
    return {entry["code"]: entry["begin"] for entry in summary["findings"]}


def test_a_run_that_cannot_learn_says_all_its_reasons_by_step_three(
    tmp_path, small_config, quiet_view
):
    """Random weights that may say one token of a format with tags: nothing is understood."""
    config = small_config(
        tmp_path / "run",
        "cold_start.episodes=0",
        "evaluation.every=0",
        "agent.format=answer",
        "agent.format_penalty=0",
        "trainer.steps=3",
        "sampling.max_new_tokens=1",
    )
    train(config, view=quiet_view())
    codes = codes_of(config.run_dir)
    assert codes == {"all_failed": 3, "malformed_calls": 3, "truncated_answers": 3}

    (warning,) = [
        text
        for text in json.loads((config.run_dir / "warnings.json").read_text())["warnings"]
        if "token limit" in text
    ]
    assert warning.startswith("step 3: ") and "sampling.max_new_tokens" in warning

    async def recorded(store):
        return [step.record["attempt_facts"]["attempts"] for step in await store.steps()]

    assert read_store(config.run_dir, recorded) == [12, 12, 12]


def test_a_policy_without_chance_and_a_gradient_without_size(tmp_path, small_config, quiet_view):
    config = small_config(
        tmp_path / "run",
        "evaluation.every=0",
        "sampling.temperature=0.001",
        "trainer.steps=3",
        "trainer.max_grad_norm=1e-6",
        "algorithm.drop_zero_variance=false",
    )
    train(config, view=quiet_view())
    codes = codes_of(config.run_dir)
    assert codes.get("gradient_clipped") == 3
    assert {"no_exploration", "all_solved"} & set(codes)


QUESTIONS = [{"question": f"{n} + 1 = ?", "solution": str(n + 1)} for n in range(8)]
REWARDS = """
import agentevo


@agentevo.reward("wordy")
def wordy(trajectory) -> float:
    return agentevo.Score(trajectory.num_completion_tokens() / 8, success=False)


@agentevo.reward("spoken")
def spoken(trajectory, task) -> float:
    return agentevo.Score(float(trajectory.attempt % 2), success=bool(trajectory.attempt % 2))
"""


def questions_config(folder, *overrides):
    rows = folder / "questions.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "my_rewards.py").write_text(REWARDS)
    tree = {
        "tasks": str(rows),
        "import": [str(folder / "my_rewards.py")],
        "model": {"name": "tiny", "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2}},
        "sampling": {"max_new_tokens": 8},
        "trainer": {"steps": 3, "groups_per_step": 4, "group_size": 4},
        "evaluation": {"tasks": 2, "samples": 0, "every": 0},
        "tracking": {"tensorboard": False, "report": False},
        "run": {"seed": 5, "threads": 1, "dir": str(folder / "run")},
    }
    return build_config(tree, list(overrides), needs_environment=False)


def test_a_reward_for_length_and_an_answer_cut_by_the_limit(tmp_path, quiet_view):
    config = questions_config(tmp_path, "rewards=[wordy]", "sampling.stop=['e', 'a', 'i']")
    train(config, view=quiet_view())
    assert codes_of(config.run_dir).get("reward_beside_success") == 3


def test_a_run_that_learns_says_nothing(tmp_path, quiet_view):
    config = questions_config(tmp_path, "rewards=[spoken]", "trainer.steps=4")
    train(config, view=quiet_view())
    assert codes_of(config.run_dir) == {}
