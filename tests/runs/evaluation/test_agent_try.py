"""One attempt in the terminal: every call is shown, in its order, as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from remote_server import RemoteServer, chat, fails, gives

import agentevo
from agentevo.cli.main import main
from agentevo.config import tools as tool_config


@pytest.fixture
def shout():
    @agentevo.tool("shout")
    def shout(text: str) -> str:
        """Shouts."""
        if not text:
            raise ValueError("nothing to shout")
        return text.upper() + "\x1b[31m\n!"

    yield
    tool_config.tools._items.pop("shout")


def calls(text: str):
    function = {"name": "shout", "arguments": json.dumps({"text": text})}
    call = {"type": "function", "id": "x", "function": function}
    return gives(chat(None, tool_calls=[call], usage=(15, 8)))


def tried(server, *words, code=0):
    models = f"remote_models.far={{base_url: '{server.base_url}', model: m, max_tries: 1}}"
    assert main(["chat", "far", models, *words]) == code


def test_calls_and_results_are_shown_in_their_order(shout, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = gives({"data": [{"id": "m"}]})
    with RemoteServer(listed, calls("hey"), calls(""), gives(chat("HEY", usage=(30, 2)))) as server:
        tried(
            server,
            "agent.type=tool_agent",
            "agent.tools=[shout]",
            "rewards=[exact_match, tool_use]",
            "--task",
            "Shout hey.",
            "--answer",
            "HEY",
        )

    out = capsys.readouterr().out
    expected = [
        "user: Shout hey.",
        "[calls shout as x]",
        "tool shout ...",
        'arguments: {"text": "hey"}',
        "result: HEY\\x1b[31m",
        "!",
        "remote far, turn 1",
        "nothing to shout",
        "assistant: HEY",
        "scorer exact_match",
        "reward 1.5 (exact_match 1, tool_use 0.5), success; 3 turns",
    ]
    at = -1
    for text in expected:
        assert (at := out.find(text, at + 1)) >= 0, f"{text}\n{out}"

    assert "\x1b" not in out, "nobody drives the terminal"
    assert list(tmp_path.iterdir()) == []


def test_without_an_answer_nothing_judges(capsys):
    with RemoteServer(gives({"data": [{"id": "m"}]}), gives(chat("hello"))) as server:
        tried(server, "--task", "Hi.", "rewards=[exact_match]")
    assert "completed, but not scored" in capsys.readouterr().out


@pytest.mark.slow
def test_a_failure_is_shown_and_ends_with_1(capsys):
    with RemoteServer(gives({"data": [{"id": "m"}]}), fails(400, "no such thing")) as server:
        tried(server, "--task", "Hi.", code=1)
        out = capsys.readouterr().out
        assert "remote far: failed" in out and "no such thing" in out
        tried(server, "--task", "Hi.", "--answer", "x", code=2)
        assert "nothing judges the task" in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipe_plays_its_own_held_out_task(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(
        "environment: {type: coins}\nsampling: {max_new_tokens: 3}\nevaluation: {tasks: 2}\n"
        "model: {name: tiny, tiny: {hidden_size: 32, num_layers: 1, num_heads: 2}}\n"
    )
    assert main(["chat", "small.yaml", "--number", "1"]) == 0

    out = capsys.readouterr().out
    assert "policy generate, turn 0" in out and "reward " in out
    assert main(["chat", "small.yaml", "--number", "2"]) == 2
    assert "the number of held-out tasks is 2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
