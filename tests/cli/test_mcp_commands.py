"""`agentevo mcp inspect` lists and calls a server's tools."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")
SERVER = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_server.py")]


def test_tools_are_listed_with_their_parameters(agentevo):
    code, out, _ = agentevo("mcp", "inspect", *SERVER)
    assert code == 0
    assert out.splitlines()[0].startswith("add(number: integer)  Adds a number to the count.")
    code, out, _ = agentevo("mcp", "inspect", "--schemas", *SERVER)
    assert json.loads(out.splitlines()[0])["function"]["name"] == "add"


def test_a_tool_is_called_by_hand(agentevo):
    code, out, _ = agentevo(
        "mcp", "inspect", "--call", "add", "--arguments", '{"number": 3}', *SERVER
    )
    assert (code, out) == (0, "3\n")
    code, out, _ = agentevo("mcp", "inspect", "--call", "refuse", *SERVER)
    assert code == 1 and out.startswith("Error: ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["no_such.json"], "no_such.json"),
        (["ftp://a/b"], "is no URL of a server"),
    ],
)
def test_what_is_no_server_is_refused(words, problem, agentevo):
    code, _, err = agentevo("mcp", "inspect", *words)
    assert code == 2 and problem in err
