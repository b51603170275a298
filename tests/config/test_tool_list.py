"""`agent.tools` in a recipe: paths as the recipe means them, and what is wrong with an entry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentevo.config import build_config, config_keys, load_config
from agentevo.config.tool_entries import KINDS
from agentevo.errors import ConfigError

BASE = {"model": {"name": "tiny"}, "tasks": "tasks.jsonl", "rewards": ["numeric"]}


def loaded(folder, *tools, agent=None, **sections):
    (folder / "tasks.jsonl").write_text('{"query": "1 + 1", "answer": 2}\n')
    section = {"type": "tool_agent", "tools": list(tools)} | (agent or {})
    (folder / "recipe.yaml").write_text(json.dumps({**BASE, **sections, "agent": section}))
    return load_config(str(folder / "recipe.yaml")).agent


@pytest.mark.parametrize("agent", ["tool_agent", "code_agent"])
def test_paths_of_tools_are_those_beside_the_recipe(agent, tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    elsewhere = tmp_path / "elsewhere"
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
        (
            {"name": "f", "timeout_s": "soon"},
            r"\[0\].timeout_s: got 'soon'; needs a number, above 0 \(default 60.0\)",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "args": "tools serve booking"},
            r"\[0\].args: .*; needs a list of texts, as in \[tools, serve, booking\]",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "args": "-c 'import x'"},
            r"\[0\].args: .*; needs a list of texts, in \[brackets\]",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "session": "sharde"},
            r"\[0\].session: got 'sharde'; did you mean shared\? needs one of attempt, shared",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "env": {"A": True}},
            r"\[0\].env.A: got true; needs a text: write it in quotes",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "args": ["b", ["c"]]},
            r"\[0\].args\[1\]: got \['c'\]; needs a text",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "sandbox": {"netwrk": True}},
            r"\[0\].sandbox.netwrk: unknown key; did you mean sandbox.network\?",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "sandbox": {"memory_mib": "much"}},
            r"\[0\].sandbox.memory_mib: got 'much'; needs a whole number, at least 64",
        ),
        (
            {"type": "mcp", "name": "a", "command": "x", "sandbox": 5},
            r"\[0\].sandbox: got 5; needs a mapping with keys such as network",
        ),
        ({"name": "a", "command": "x"}, r"\[0\]: .* has no command: add type: mcp$"),
        ({"name": "a", "url": "http://h/mcp"}, r"\[0\]: .* has no url: add type: mcp$"),
        ({"url": "http://h:80/mcpapi"}, r"\[0\]: .* has no url: add type: mcp_manager$"),
        ({"file": "mcp.json"}, r"\[0\]: .* has no file: add type: mcp_file$"),
        ({"file": "tools.yaml"}, r"\[0\]: .* has no file: add type: verl_tools$"),
        ({"servers": ["github"]}, r"\[0\]: .* has no servers: add type: mcp_file$"),
        ({"type": "mcp", "name": "a"}, r"\[0\]: a server has a `command` that starts it or"),
        (
            {"type": "mcp_manager", "url": "http://h:80"},
            r"\[0\].url: got 'http://h:80'; the url of a node's API ends with",
        ),
        ({"options": {}}, r"\[0\].name: missing; "),
        (5, r"\[0\]: got 5; needs the name of a tool"),
        ({"type": ["mcp"]}, r"\[0\].type: got \['mcp'\]; choose one of function"),
    ],
)
def test_a_wrong_entry_is_named_with_its_place_and_key(entry, problem, tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.tools" + problem) as caught:
        loaded(tmp_path, entry)
    for words in ("Section", "Input should", "unable to parse", "valid tuple"):
        assert words not in str(caught.value)


@pytest.mark.parametrize("sandbox", [True, {"read_only": ["data", "/none/such"]}])
def test_a_server_in_a_sandbox_has_no_folder_of_the_recipes(sandbox, tmp_path):
    (tmp_path / "data").mkdir()
    entry = {"type": "mcp", "name": "a", "command": "./serve", "sandbox": sandbox}
    (read,) = loaded(tmp_path, entry).tools
    assert read.cwd is None and read.command == str(tmp_path / "serve")

    shown = () if sandbox is True else (tmp_path / "data", Path("/none/such"))
    assert read.sandbox.read_only == shown

    (again,) = loaded(tmp_path, read.model_dump(mode="json")).tools
    assert again == read, "as a run's config.yaml has it"

    (plain,) = loaded(tmp_path, {**entry, "sandbox": False}).tools
    assert (plain.cwd, plain.sandbox) == (tmp_path, None)
    with pytest.raises(ConfigError, match="leave out cwd"):
        loaded(tmp_path, {**entry, "cwd": "data"})


def test_an_agent_without_its_tools_is_told_how_to_write_some(tmp_path):
    tree = {**BASE, "tasks": "tasks.jsonl", "agent": {"type": "tool_agent"}}
    with pytest.raises(ConfigError, match=r"agent\.tools: missing; give a list of names") as caught:
        build_config(tree, folder=tmp_path)
    assert "{type: mcp, name: shop" in str(caught.value) and "Section" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "kinds", "words"),
    [
        ("agent.tools.timeout_s", [], "number, above 0"),
        ("agent.tools.start_timeout_s", ["mcp", "mcp_file"], "number, above 0"),
        ("agent.tools.servers", ["mcp_file"], "list of texts"),
        ("agent.tools.command", ["mcp"], "text, or null"),
        ("agent.tools.sandbox.network", ["mcp"], "true or false"),
        ("agent.tools.type", ["function"], "one of function"),
    ],
)
def test_the_keys_of_an_entry_are_explained(key, kinds, words):
    one = config_keys().explain(key)[0]
    assert (one.key, list(one.option_of), one.type) == (key, kinds, words)


def test_the_kinds_of_entries_are_explained_with_their_keys():
    (section,) = config_keys().explain("agent.tools")
    keys = {one.key for one in section.keys}
    for model in KINDS.values():
        assert {f"agent.tools.{key}" for key in model.model_fields} <= keys


def test_other_agents_tools_are_their_own(tmp_path):
    with pytest.raises(ConfigError, match=r"agent\.tools: unknown key for agent\.type=single_turn"):
        loaded(tmp_path, "multiply", agent={"type": "single_turn"})
    with pytest.raises(ConfigError, match=r"agent\.tools: got 'multiply'; needs a list"):
        loaded(tmp_path, agent={"tools": "multiply"})


@pytest.mark.parametrize("agent", ["tool_agent", "code_agent"])
def test_one_of_several_agents_can_not_be_the_one_that_uses_tools(agent, tmp_path):
    with pytest.raises(ConfigError, match=f"agent.type={agent}: not supported in a run with"):
        loaded(tmp_path, "multiply", agent={"type": agent}, agents={"solver": {}, "critic": {}})
