"""`agentevo tools inspect --test`: the calls of a recipe's tools by hand, and their exit code."""

from __future__ import annotations

import json

import pytest
from mcp_manager import Manager

from agentevo.cli.main import main


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe with these tools; its path."""

    def write(*tools):
        (tmp_path / "tasks.jsonl").write_text('{"query": "q", "answer": 4}\n')
        tree = {
            "model": {"name": "tiny"},
            "tasks": "tasks.jsonl",
            "rewards": ["numeric"],
            "agent": {"type": "tool_agent", "tools": list(tools)},
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(tree))
        return str(path)

    return write


def test_every_tool_is_called_and_one_that_breaks_fails_the_command(recipe, capsys):
    with Manager() as manager:
        entry = {"type": "mcp_manager", "url": manager.node_url, "include": ["count", "web.*"]}
        assert main(["tools", "inspect", "--test", recipe(entry)]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert [line.split("(")[0] for line in lines[::2]] == [
            "answered web__search",
            "answered fetch_url",
            "answered count",
        ]
        assert lines[3] == '    web.fetch_url of {"url": "test"}'

        words = ["--call", "give", "--arguments", '{"what": "half"}']
        path = recipe({"type": "mcp_manager", "url": manager.node_url})
        assert main(["tools", "inspect", "--test", *words, path]) == 1
        assert capsys.readouterr().out.startswith('broken   give({"what": "half"})')

        made = len(manager.calls)
        assert main(["tools", "inspect", "--test", path, "--dry-run", "--call", "give"]) == 0
        assert capsys.readouterr().out == 'give({"what": "test"})\n'
        assert len(manager.calls) == made


def test_what_can_not_be_called_is_refused(recipe, capsys, tmp_path):
    with Manager() as manager:
        path = recipe({"type": "mcp_manager", "url": manager.node_url})
        assert main(["tools", "inspect", "--test", path, "--call", "cont"]) == 2
        assert "there is no tool 'cont': did you mean count?" in capsys.readouterr().err

    assert main(["tools", "inspect", "--test", path, "--arguments", "{}"]) == 2
    assert main(["tools", "inspect", "--test", "coins"]) == 2
    assert "agent.type=environment has no tools" in capsys.readouterr().err
    assert main(["tools", "inspect", "--test", str(tmp_path / "no.json")]) == 2


def test_a_server_that_is_away_and_wrong_arguments_are_told_with_what_to_do(recipe, capsys):
    path = recipe({"type": "mcp", "name": "shop", "url": "http://127.0.0.1:9/mcp"})
    assert main(["tools", "inspect", "--test", path]) == 1
    told = capsys.readouterr().err
    assert "http://127.0.0.1:9/mcp" in told and "start the server, or correct the URL" in told
    for given in ("{amount: 5}", "[5]"):
        assert (
            main(["tools", "inspect", "--test", path, "--call", "pay", "--arguments", given]) == 2
        )
        assert "write an object of JSON" in capsys.readouterr().err
