"""`agentevo tools inspect` lists and calls a server's tools."""

import json
import sys
from pathlib import Path

import pytest

from agentevo.cli.server_words import server_section
from agentevo.errors import ConfigError

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("npx -y server --dir a.json", ["npx", "-y", "server", "--dir", "a.json"]),
        ("python 'my server.py' \"a b\"", ["python", "my server.py", "a b"]),
        ("npx mcp-remote http://127.0.0.1/mcp", ["npx", "mcp-remote", "http://127.0.0.1/mcp"]),
        ("  server  ", ["server"]),
    ],
)
def test_a_command_in_one_text_is_the_same_words(text, words):
    assert server_section([text]) == server_section(words)
    assert (server_section([text]).command, *server_section([text]).args) == tuple(words)


def test_urls_and_paths_are_not_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my server").touch()
    (tmp_path / "my tools.json").write_text("{}")
    assert server_section(["my server"]).command == "my server"
    assert server_section(["my tools.json"]).file.name == "my tools.json"
    assert server_section(["http://127.0.0.1/mcp?it's"]).url == "http://127.0.0.1/mcp?it's"
    for text, problem in {"": "empty", "python 'a": "No closing quotation"}.items():
        with pytest.raises(ConfigError, match=problem):
            server_section([text])


@pytest.mark.slow
def test_tools_are_listed_with_their_parameters(agentevo):
    code, out, _ = agentevo("tools", "inspect", *SERVER)
    assert code == 0
    assert out.splitlines()[0].startswith("add(number: integer)  Adds a number to the count.")
    code, out, _ = agentevo("tools", "inspect", "--schemas", *SERVER)
    assert json.loads(out.splitlines()[0])["function"]["name"] == "add"


@pytest.mark.slow
def test_a_tool_is_called_by_hand(agentevo):
    code, out, _ = agentevo(
        "tools", "inspect", "--call", "add", "--arguments", '{"number": 3}', *SERVER
    )
    assert (code, out) == (0, "3\n")
    code, out, _ = agentevo("tools", "inspect", "--call", "refuse", *SERVER)
    assert code == 1 and out.startswith("Error: ")


@pytest.mark.slow
def test_prompts_and_resources_are_listed_and_read(agentevo):
    out = agentevo("tools", "inspect", *SERVER).out.splitlines()
    assert [line for line in out if line.startswith(("prompt ", "resource "))] == [
        "prompt rules(tone, length?)  How to count.",
        "resource count://now  The count.",
        "resource count://{number}/half  Half of a number.",
    ]

    shown = agentevo(
        "tools", "inspect", "--prompt", "rules", "--arguments", '{"tone": "low"}', *SERVER
    ).out
    assert shown == "Count in a low voice, and be short.\n"
    assert agentevo("tools", "inspect", "--resource", "count://7/half", *SERVER).out == "3.5\n"

    code, out, _ = agentevo("tools", "inspect", "--resource", "count://nowhere", *SERVER)
    assert code == 1 and out.startswith("Error: ")

    code, _, err = agentevo("tools", "inspect", "--prompt", "rule", *SERVER)
    assert code == 1 and "rules(tone, length?)" in err
    for words in (["--call", "add", "--prompt", "rules"], ["--prompt", "x", "--arguments", "[]"]):
        assert agentevo("tools", "inspect", *words, *SERVER).code == 2

    url = "http://127.0.0.1:9/mcpapi"
    code, _, err = agentevo("tools", "inspect", "--prompt", "x", url)
    assert code == 2 and "no prompts" in err


NEEDS_A_TASK = """
import agentevo

@agentevo.tool("account")
class Account:
    def __init__(self, task):
        self.goal = float(task.metadata["goal"])
    def ask(self) -> float:
        return self.goal
"""


@pytest.mark.slow
def test_tools_that_need_a_task_are_given_one(agentevo, tmp_path):
    (tmp_path / "account.py").write_text(NEEDS_A_TASK)
    source = Path(__file__).parents[2] / "src"
    words = ["env", f"PYTHONPATH={source}", sys.executable, "-m", "agentevo", "tools", "serve"]
    server = [*words, "account", "--import", str(tmp_path / "account.py")]
    code, _, err = agentevo("tools", "inspect", *server)
    assert code != 0 and "KeyError" in err and "there is no task" in err and "--task JSON" in err

    told = ["--task", '{"metadata": {"goal": 90}}', "--call", "ask"]
    assert agentevo("tools", "inspect", *told, *server) == (0, "90.0\n", "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--task", "[1]", "x"], "--task: a task is an object"),
        (["--task", "{", "x"], "--task: "),
        (["--task", '{"anser": 1}', "x"], "a task has no 'anser': it has id"),
        (["--task", '{"seed": "a"}', "x"], "--task: Expected `int`"),
        (["--task", '{"answer": 1}', "x"], "the server does not receive the answer"),
        (["--task", "{}", "http://127.0.0.1:9/mcpapi"], "no prompts, resources and tasks"),
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["no_such.json"], "no_such.json"),
        (["ftp://a/b"], "is not the URL of a server"),
        (["--call", "add", "--arguments", "{number: 3}", *SERVER], "write an object of JSON"),
    ],
)
def test_what_is_no_server_is_refused(words, problem, agentevo):
    code, _, err = agentevo("tools", "inspect", *words)
    assert code == 2 and problem in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["search", "corpus=no.jsonl", "--http"], "the corpus no.jsonl: can't be read"),
        (["files", "root=/nonexistent"], "'/nonexistent' is not a folder"),
        (["database", "file=no.db"], "give a database of SQLite"),
    ],
)
def test_tools_that_could_not_be_made_are_not_served(words, problem, agentevo):
    code, out, err = agentevo("tools", "serve", *words)
    assert (code, out) == (2, "") and problem in err and "serving" not in err


@pytest.mark.slow
def test_control_characters_are_shown_and_not_sent_to_the_terminal(agentevo):
    odd = [sys.executable, str(Path(__file__).parents[1] / "support" / "odd_mcp_server.py")]
    words = ["tools", "inspect", "--call", "give", "--arguments", '{"what": "controls"}', *odd]
    shown = "\\u001b[2Jred\\u0007\\u000d\\u202e\\u009b1m\ttab\n诗\n"
    assert agentevo(*words) == (0, shown, "")
    assert "Clears \\u001b[2J it." in agentevo("tools", "inspect", *odd).out


def test_tools_test_shows_control_characters(agentevo, tmp_path):
    path = tmp_path / "mcp.json"
    server = str(Path(__file__).parents[1] / "support" / "odd_mcp_server.py")
    path.write_text(
        json.dumps({"mcpServers": {"s": {"command": sys.executable, "args": [server]}}})
    )
    call = ["--call", "give", "--arguments", '{"what": "controls"}']
    out = agentevo("tools", "inspect", "--test", *call, str(path)).out
    assert "\x1b" not in out and "    \\u001b[2Jred\\u0007\\u000d\\u202e" in out
