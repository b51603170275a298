"""`agent.tools` in a recipe: paths as the recipe means them, and what is wrong with an entry."""

from __future__ import annotations

import json

import pytest

from agentevo.config import load_config
from agentevo.errors import ConfigError

BASE = {"model": {"name": "tiny"}, "tasks": "tasks.jsonl", "rewards": ["numeric"]}


def loaded(folder, *tools, agent=None, **sections):
    (folder / "tasks.jsonl").write_text('{"query": "1 + 1", "answer": 2}\n')
    section = {"type": "tool_agent", "tools": list(tools)} | (agent or {})
    (folder / "recipe.yaml").write_text(json.dumps({**BASE, **sections, "agent": section}))
    return load_config(str(folder / "recipe.yaml")).agent


@pytest.mark.parametrize("agent", ["tool_agent", "code_agent"])
def test_paths_of_tools_are_those_beside_the_recipe(agent, tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "recipes", tmp_path / "elsewhere"
    for one in (folder / "sub", elsewhere):
        one.mkdir(parents=True)
    (folder / "mcp.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    entries = [
        "multiply",
        {"type": "mcp", "name": "here", "command": "python"},
        {"type": "mcp", "name": "below", "command": "python", "cwd": "sub"},
        {"type": "mcp", "name": "far", "url": "http://127.0.0.1:1/mcp"},
        {"type": "mcp_file", "file": "mcp.json"},
    ]
    name, here, below, far, file = loaded(folder, *entries, agent={"type": agent}).tools
    assert (name.type, name.name) == ("function", "multiply")
    assert (here.cwd, below.cwd, far.cwd) == (folder, folder / "sub", None)
    assert file.file == folder / "mcp.json"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": "mpc", "name": "a"}, r"\[0\].type: got 'mpc'; did you mean mcp\?"),
        ({"type": "mcp", "name": "a", "comand": "x"}, r"\[0\].comand: unknown key; did you mean c"),
        ({"name": "f", "timeout_s": "soon"}, r"\[0\].timeout_s: got 'soon'; "),
        ({"type": "mcp", "name": "a"}, r"\[0\]: a server has a `command` that starts it or"),
        (
            {"type": "mcp_manager", "url": "http://h:80"},
            r"\[0\]: the url of a node's API ends with",
        ),
        ({"options": {}}, r"\[0\].name: missing; "),
        (5, r"\[0\]: got 5; needs the name of a tool"),
        ({"type": ["mcp"]}, r"\[0\].type: got \['mcp'\]; choose one of function"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place_and_key(entry, problem, tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.tools" + problem) as caught:
        loaded(tmp_path, entry)
    assert "FunctionToolSection" not in str(caught.value)


def test_other_agents_tools_are_their_own(tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.tools: unknown key for agent\.type=single_turn"):
        loaded(tmp_path, "multiply", agent={"type": "single_turn"})
    with pytest.raises(ConfigError, match=r"agent\.tools: got 'multiply'; needs a list"):
        loaded(tmp_path, agent={"tools": "multiply"})


@pytest.mark.parametrize("agent", ["tool_agent", "code_agent"])
def test_one_of_several_agents_can_not_be_the_one_that_uses_tools(agent, tmp_path):
    with pytest.raises(ConfigError, match=f"agent.type={agent}: not in a run with named agents"):
        loaded(tmp_path, "multiply", agent={"type": agent}, agents={"solver": {}, "critic": {}})
