"""Files that list MCP servers, in the format of Claude, Cursor and others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from agentevo.agents.tools.mcp_connection import McpServer
from agentevo.config.mcp import MCPFileSection
from agentevo.errors import ConfigError
from agentevo.runtime.parsing import ParseError, parse_json, read_text
from agentevo.runtime.registry import nearest

_VARIABLE = re.compile(r"\$\{(?:env:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
_INPUT = re.compile(r"\$\{input:[^}]*\}")
_HTTP = {"http", "streamable-http", "streamable_http", "streamableHttp"}


class _McpFileEntry(msgspec.Struct, rename="camel"):
    """One server of such a file. Keys of other programs are ignored."""

    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    server_url: str | None = None
    type: str | None = None
    transport: str | None = None
    headers: dict[str, str] = {}
    disabled: bool = False


def read_servers(section: MCPFileSection) -> list[McpServer]:
    """The servers of an entry of `agent.tools`. `${NAME}`, `${env:NAME}` and `${NAME:-DEFAULT}` are
    environment variables of this process. Raises ConfigError."""
    where = f"agent.tools: {section.file}"
    try:
        tree = parse_json(read_text(section.file.expanduser()))
    except ParseError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"agent.tools: {error}") from error

    entries = isinstance(tree, Mapping) and next(
        (tree[key] for key in ("mcpServers", "servers", "mcp_servers") if key in tree), None
    )
    if not isinstance(entries, Mapping) or not entries:
        raise ConfigError(
            f'{where} has no servers: write {{"mcpServers": {{NAME: {{"command": ..., "args": '
            "[...]}}}"
        )

    unknown = next((name for name in section.servers if name not in entries), None)
    if unknown is not None:
        guess = nearest(unknown, list(entries))
        hint = f"did you mean {guess!r}? " if guess else ""
        raise ConfigError(f"{where} has no server {unknown!r}: {hint}it has {', '.join(entries)}")

    selected = section.servers or [
        name
        for name, entry in entries.items()
        if not (isinstance(entry, Mapping) and entry.get("disabled"))
    ]
    if not selected:
        raise ConfigError(f"{where}: every server is disabled: name some under `servers`")

    # The other servers are not read: their variables need not be set.
    return [_server(f"{where}: {name}", name, entries[name], section) for name in selected]


def _server(where: str, name: str, raw_entry: Any, section: MCPFileSection) -> McpServer:
    try:
        entry = msgspec.convert(raw_entry, _McpFileEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error

    url = entry.url or entry.server_url
    if (entry.command is None) == (url is None):
        raise ConfigError(f"{where}: a server has a `command` or a `url`: give one of them")

    kind = entry.type or entry.transport or ("stdio" if url is None else "http")
    if url is not None and kind not in {"sse", *_HTTP}:
        raise ConfigError(f"{where}: type is {kind!r}: use http or sse for a server at a url")

    secrets: list[str] = []

    def value(match: re.Match[str]) -> str:
        variable = os.environ.get(match["name"], match["default"])
        if variable is None:
            raise ConfigError(
                f"{where}: the environment variable {match['name']} is not set: set it"
            )
        secrets.append(variable)
        return variable

    def fill_variables(text: str) -> str:
        input_match = _INPUT.search(text)
        if input_match is not None:
            raise ConfigError(
                f"{where}: {input_match[0]} asks for input, which is not supported here: write "
                "${{env:NAME}} for an environment variable of this process"
            )
        return _VARIABLE.sub(value, text)

    server = McpServer(
        name=re.sub(r"[^A-Za-z0-9_-]", "_", name)[:40],
        command=None if entry.command is None else fill_variables(entry.command),
        args=[fill_variables(arg) for arg in entry.args],
        env={key: fill_variables(text) for key, text in entry.env.items()},
        cwd=None
        if entry.cwd is None
        else section.file.expanduser().parent / fill_variables(entry.cwd),
        url=None if url is None else fill_variables(url),
        transport="sse" if kind == "sse" else "http",
        headers={key: fill_variables(header) for key, header in entry.headers.items()},
        start_timeout_s=section.start_timeout_s,
        shown=f"of {section.file.name}",
    )
    return replace(server, secrets=[*secrets, *_values(server)])


def _values(server: McpServer) -> list[str]:
    """Values that can hold secrets in addition to variables; httpx quotes a URL in its messages."""
    headers = [word for text in server.headers.values() for word in text.split()]
    return [*server.env.values(), *headers, *([server.url] if server.url else [])]
