"""Tools of a verl configuration file: made with what a row says, called, paid and released."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.tools import VerlToolsSection
from agentevo.errors import ConfigError
from agentevo.runtime.event_loop import run_coroutine
from agentevo.types import Task, ToolCall

SCHEMA = {
    "type": "function",
    "function": {
        "name": "check",
        "description": "Checks an answer.",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}},
    },
}
events = []


class Check:
    """As verl's GSM8K tool: an answer that is right earns."""

    def __init__(self, config, tool_schema):
        self.config = config
        self.schema = tool_schema
        self.truths = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        events.append("create")
        self.truths["i"] = ground_truth
        return "i", SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["answer"] == "break":
            raise RuntimeError("no luck")
        right = parameters["answer"] == self.truths[instance_id]
        text = f"{self.config['says']}{right}{kwargs.get('mark', '')}"
        return SimpleNamespace(text=text), 0.5 if right else -0.05, {}

    async def release(self, instance_id, **kwargs):
        events.append("release")
        raise RuntimeError("late")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file of tools; the entry."""
    module = ModuleType("my_verl_tools")
    module.Check = Check
    module.Broken = SimpleNamespace
    monkeypatch.setitem(sys.modules, "my_verl_tools", module)
    events.clear()

    def write(*rows):
        (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": list(rows)}))
        return VerlToolsSection(file=tmp_path / "tools.yaml")

    return write


def row(**other):
    return {
        "class_name": "my_verl_tools.Check",
        "config": {"type": "native", "says": "right: "},
        "tool_schema": SCHEMA,
        **other,
    }


def test_a_tool_is_made_with_its_row_called_paid_and_released(written, capsys):
    kwargs = {"check": {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": {"mark": "!"}}}
    task = Task(id="t", metadata={"extra_info": {"tools_kwargs": kwargs}})

    async def work():
        box = Toolbox([written(row())], [].append)
        async with box.open(task, 0) as tools:
            given = [{"answer": one} for one in ("3", "4", "break")]
            results = await tools.call([ToolCall("check", json.dumps(one)) for one in given])

        async with box.open(Task(id="other"), 0):
            pass

        await box.close()
        return results, tools.metrics, tools.schemas

    results, metrics, schemas = run_coroutine(work())
    assert [(result.text, result.reward) for result in results[:2]] == [
        ("right: False!", -0.05),
        ("right: True!", 0.5),
    ]
    assert results[2].is_error and "no luck" in results[2].text
    assert schemas == [SCHEMA] and metrics["num_tool_calls"] == 2
    assert events == ["create", "release"]
    assert "release failed: RuntimeError: late" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "needs a list `tools`"),
        ([row(class_name="Check")], "give MODULE.CLASS"),
        ([row(tool_schema={"type": "function"})], "needs a `function` with its name"),
        ([row(class_name="no_such_module.Check")], "No module named 'no_such_module'"),
        ([row(class_name="my_verl_tools.Broken")], "has no `create` and `execute`"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused(written, given, said):
    with pytest.raises(ConfigError) as refusal:
        Toolbox([written(*given)])
    assert said in str(refusal.value) and "tools.yaml" in str(refusal.value)
