"""Rows of verl's tool agent loop and its tool configuration file train as they are."""

from __future__ import annotations

import json

import pytest
import yaml

from agentevo.cli.main import main

TOOL = """
class Check:
    def __init__(self, config, tool_schema):
        self.truths = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths["i"] = ground_truth
        return "i"

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters.get("answer") == self.truths[instance_id]
        return str(right), float(right), {}
"""


def row(number):
    ask = {"role": "user", "content": f"What is {number} + 1?"}
    kwargs = {"check": {"create_kwargs": {"ground_truth": str(number + 1)}}}
    return {
        "data_source": "sums",
        "prompt": [ask],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "agent_name": "tool_agent_loop",
        "extra_info": {"split": "train", "index": number, "tools_kwargs": kwargs},
    }


@pytest.mark.slow
def test_verls_rows_and_tools_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl_check_tool.py").write_text(TOOL)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(5)))
    parameters = {"type": "object", "properties": {"answer": {"type": "string"}}}
    function = {"name": "check", "description": "Checks.", "parameters": parameters}
    entry = {
        "class_name": "verl_check_tool.Check",
        "config": {"type": "native"},
        "tool_schema": {"type": "function", "function": function},
    }
    (tmp_path / "tool_config.yaml").write_text(yaml.safe_dump({"tools": [entry]}))

    recipe = {
        "import": ["./verl_check_tool.py"],
        "model": {"name": "tiny"},
        "tasks": "rows.jsonl",
        "rewards": ["numeric"],
        "agent": {
            "type": "tool_agent",
            "max_turns": 2,
            "tools": [{"type": "verl_tools", "file": "tool_config.yaml"}],
        },
        "sampling": {"max_new_tokens": 6},
        "trainer": {"steps": 1, "groups_per_step": 2, "group_size": 2},
        "evaluation": {"tasks": 1, "samples": 0},
        "run": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    assert (
        main(
            ["tools", "inspect", "recipe.yaml", "--arguments", '{"answer": "1"}', "--call", "check"]
        )
        == 0
    )
    assert main(["train", "recipe.yaml"]) == 0

    (metrics,) = [
        one
        for one in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if one.get("group/num")
    ]
    assert metrics["group/num"] == 2 and "agent/num_tool_calls" in metrics
