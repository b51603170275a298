"""`agentevo config --changed`: what differs from the defaults is a recipe of the same run."""

import pytest
import yaml

from agentevo.config import build_config, changed_to_yaml, load_config

DOORS = {"environment": {"type": "test_doors"}}
MANY = {
    "environment": {"type": "test_doors", "num_doors": 3},
    "agent": {"type": "environment", "max_turns": 3},
    "remote_models": {"judge": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}},
    "rewards": ["numeric", {"name": "format", "pattern": "a", "weight": 0.1}],
    "algorithm": {"name": "dapo", "clip_high": 0.3},
    "model": {"name": "tiny", "tiny": {"hidden_size": 64}},
    "tracking": {"backends": ["wandb", {"name": "mlflow", "tracking_uri": "file:x"}]},
    "trainer": {"betas": [0.9, 0.99]},
}


def same_run(config):
    tree = yaml.safe_load(changed_to_yaml(config)) or {}
    return build_config(tree, needs_environment=False).model_dump() == config.model_dump()


def test_only_what_differs_is_shown():
    config = build_config(DOORS, ["trainer.steps=3", "trainer.group_size=8", "run.name=run"])
    assert yaml.safe_load(changed_to_yaml(config)) == {
        "environment": {"type": "test_doors"},
        "trainer": {"steps": 3},
    }
    preset = build_config(DOORS, ["algorithm.name=dapo", "algorithm.kl_coef=0"])
    assert yaml.safe_load(changed_to_yaml(preset))["algorithm"] == {"name": "dapo"}


@pytest.mark.parametrize("name", ["coins", "frozen_lake", "frozen_lake_sft", "sokoban"])
def test_a_packaged_recipe_is_the_same_run(name):
    assert same_run(load_config(name))


@pytest.mark.parametrize(
    "tree",
    [
        MANY,
        {"tasks": {"train": ["/x/t.jsonl"]}, "rewards": ["em"]},
        {
            "tasks": {"train": ["/x/t.jsonl"]},
            "rewards": ["em"],
            "agent": {"type": "tool_agent", "tools": ["calculator"]},
        },
        {**DOORS, "algorithm": {"name": "dpo", "beta": 0.2}, "trainer": {"steps": 2}},
        {**DOORS, "engine": {"type": "vllm"}},
        {"agent": {"type": "function"}, "agents": {"solver": {"train": False}, "critic": {}}},
        {**DOORS, "critic": {"clip": None}, "algorithm": {"name": "ppo"}},
    ],
)
def test_a_tree_of_many_kinds_is_the_same_run(tree):
    assert same_run(build_config(tree, needs_environment=False))
