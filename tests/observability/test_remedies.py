"""Advice fits the recipe: it names keys that the recipe takes, and none that is set so already."""

import re
from dataclasses import asdict

import pytest

from agentevo.algorithms.presets import PRESETS
from agentevo.config import build_config
from agentevo.observability.finding_monitor import FindingMonitor
from agentevo.observability.findings import Recipe
from agentevo.observability.remedies import Remedies, remedies_of
from agentevo.rollout.task_source import TaskSource
from agentevo.runs.orchestration.run_findings import recipe_of
from agentevo.types import Task

ROWS = {"tasks": {"train": "rows.jsonl"}, "rewards": ["contains"]}
COINS = {"environment": {"type": "coins"}}


def advice_of(tree, *overrides):
    config = build_config(tree, overrides)
    return config, recipe_of(config).remedies


@pytest.mark.parametrize(
    ("tree", "overrides"),
    [
        (COINS, []),
        (COINS, ["cold_start.episodes=8", "algorithm.entropy_coef=0.01"]),
        (COINS, ["algorithm.clip_high=0.3", "algorithm.kl_coef=0.001", "model.dtype=float32"]),
        (ROWS, []),
        (ROWS, ["agent.type=code_agent"]),
        ({**ROWS, "agent": {"type": "command", "command": ["true"]}}, []),
        ({**ROWS, "agent": {"type": "function"}}, []),
    ],
)
def test_every_key_that_is_advised_is_one_of_the_recipe(tree, overrides):
    config, remedies = advice_of(tree, *overrides)
    for text in asdict(remedies).values():
        for section, key in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", text):
            assert hasattr(getattr(config, section), key), f"{section}.{key}"
            assert section != "cold_start" or config.environment is not None


VALUES = {"entropy_coef": "0.01", "kl_coef": "0.01", "clip_high": "0.28", "length_weight": "2"}
VALUES |= {"length_shaping": "none", "drop_zero_variance": "false"}


@pytest.mark.parametrize("name", PRESETS)
def test_no_algorithm_refuses_a_key_that_is_advised(name):
    tree = {**COINS, "algorithm": {"name": name}}
    _, remedies = advice_of(tree)
    texts = " ".join(asdict(remedies).values())
    for key in set(re.findall(r"\balgorithm\.([a-z_]+)\b", texts)):
        build_config(tree, [f"algorithm.{key}={VALUES[key]}"])


def test_advice_depends_on_what_the_recipe_has():
    _, game = advice_of(COINS)
    assert (
        "agent.system_prompt" in game.answer_shorter
        and "cold_start.episodes" in game.add_demonstrations
    )

    _, taught = advice_of(COINS, "cold_start.episodes=8")
    assert taught.add_demonstrations == "show it more demonstrations first (cold_start.episodes)"

    _, program = advice_of({**ROWS, "agent": {"type": "function"}})
    assert "system_prompt" not in program.answer_shorter + program.show_format
    assert (
        "cold_start" not in program.add_demonstrations
        and "agentevo sft" in program.add_demonstrations
    )
    assert "environment" not in program.tasks

    words = ["algorithm.entropy_coef=0.01", "algorithm.clip_high=0.28", "model.dtype=float32"]
    words += ["algorithm.kl_coef=0.01", "algorithm.drop_zero_variance=false"]
    _, careful = advice_of(COINS, *words)
    assert (
        careful.raise_entropy == "raise algorithm.entropy_coef"
        and careful.lower_entropy.endswith("_coef")
    )
    assert careful.limit_drift == "raise algorithm.kl_coef"
    assert careful.widen_clipping == careful.keep_groups == careful.raise_precision == ""


@pytest.mark.parametrize("tree", [{}, {"agent": 3}, {"agent": {}, "algorithm": [], "model": None}])
def test_a_damaged_recipe_has_the_advice_that_always_holds(tree):
    assert "agent.system_prompt" not in remedies_of(tree).answer_shorter


def test_the_monitor_advises_what_it_is_told():
    monitor = FindingMonitor(Recipe(remedies=Remedies(raise_entropy="speak up")))
    low = {"critic/score/mean": 0.3, "actor/entropy": 0.01}
    found = [
        warning.message
        for step in range(1, 40)
        for warning in monitor.observe(step, low if step > 6 else low | {"actor/entropy": 1.0})
    ]
    assert found and "Speak up" in found[0]


def test_a_step_with_fewer_groups_than_asked_is_said():
    def config_of(groups):
        words = [f"trainer.groups_per_step={groups}"]
        return build_config({"agent": {"type": "function"}}, words, needs_environment=False)

    config = config_of(50)
    tasks = [Task(id=str(n), query="q", answer="a") for n in range(12)]
    assert (
        "there are 10 tasks to train on, so each step has 10"
        in TaskSource(config, tasks).shortfall()
    )

    alone = TaskSource(config, tasks[:2]).shortfall()
    assert "there is 1 task to train on, so each step has 1 group:" in alone

    assert (
        TaskSource(config_of(10), tasks).shortfall() == TaskSource(config, None).shortfall() == ""
    )
