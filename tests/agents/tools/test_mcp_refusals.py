"""Files and entries of MCP servers that are refused before a server is started."""

from __future__ import annotations

import json

import pytest

from agentevo.agents.tools.toolbox import Toolbox
from agentevo.config.mcp import MCPFileSection, MCPServerSection
from agentevo.errors import ConfigError

pytest.importorskip("mcp", reason="the SDK of MCP is not installed")


@pytest.mark.parametrize(
    ("tree", "servers", "problem"),
    [
        ({}, (), "has no servers"),
        ({"mcpServers": {"a": {}}}, (), "a: a server has a `command` or a `url`"),
        ({"mcpServers": {"a": {"command": 3}}}, (), "a: Expected `str"),
        ({"mcpServers": {"abc": {"command": "x"}}}, ("abd",), "did you mean 'abc'"),
        ({"mcpServers": {"a": {"command": "no-such-program"}}}, (), "there is no program"),
        ({"mcpServers": {"a": {"url": "u", "type": "ws"}}}, (), "type is 'ws'"),
        ({"mcpServers": {"a": {"command": "${NO_SUCH}"}}}, (), "NO_SUCH is not set"),
        (
            {"mcpServers": {"a": {"url": "${input:key}"}}},
            (),
            "asks for input, which is not supported",
        ),
        ({"mcpServers": {"a": 3}}, (), "a: Expected `object`"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(tree, servers, problem, tmp_path):
    path = tmp_path / "mcp_config.json"
    path.write_text(json.dumps(tree))
    entry = MCPFileSection(file=path, servers=servers)
    with pytest.raises(ConfigError, match=problem):
        Toolbox([entry])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": "x", "url": "http://a/b"}, "give one of them"),
        ({}, "give one of them"),
        ({"url": "ftp://a/b"}, "is not the URL of a server"),
        ({"url": "http://me:pw@a/b"}, "without a password"),
        ({"url": "http://a/b", "env": {"A": "b"}}, "are for a `command`"),
        ({"command": "x", "api_key": "${env:K}"}, "api_key is for a `url`"),
        ({"command": "x", "send_task": True, "session": "shared"}, "needs session=attempt"),
    ],
)
def test_a_wrong_entry_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        MCPServerSection(name="a", **options)
