"""Makes the toolsets of an entry of `agent.tools`. An entry can be a file that lists MCP servers,
in the format of Claude, Cursor and others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from agentevo.agents.tools.functions import FunctionTools
from agentevo.agents.tools.mcp_connection import McpServer
from agentevo.agents.tools.mcp_manager import MCPManager
from agentevo.agents.tools.mcp_servers import MCPServer
from agentevo.agents.tools.tool import Toolset
from agentevo.agents.tools.verl_tools import VerlTools
from agentevo.config.mcp import MCPFileSection, MCPManagerSection, MCPServerSection
from agentevo.config.tools import FunctionToolSection, ToolSection, VerlToolsSection
from agentevo.environments.sandbox.programs import sandbox_command
from agentevo.errors import ConfigError, SandboxError
from agentevo.runtime.credentials import REFERENCE, key_of, without_password
from agentevo.runtime.parsing import ParseError, parse_json, read_text
from agentevo.runtime.registry import nearest


def make_toolsets(section: ToolSection) -> Sequence[Toolset]:
    """The toolsets of an entry: one, or one for each server of a file. No server is started here.
    Raises ConfigError for a toolset that can't be made."""
    match section:
        case FunctionToolSection():
            return [FunctionTools(section)]
        case VerlToolsSection():
            return [VerlTools(section)]
        case MCPManagerSection():
            return [
                MCPManager(
                    section, key_of(f"agent.tools: {section.name}: api_key", section.api_key)
                )
            ]
        case MCPServerSection():
            servers = [_server_of(section)]
        case MCPFileSection():
            servers = read_servers(section)
        case _:
            raise ConfigError(f"agent.tools: {type(section).__name__} is not a kind of tools")

    for server in servers:
        if server.command is not None and shutil.which(_program(server)) is None:
            raise ConfigError(
                f"agent.tools: {server.name}: there is no program {server.command!r}: install it, "
                "or give its path"
            )

    return [
        MCPServer(
            replace(
                server,
                prompt=section.prompt,
                prompt_arguments=section.prompt_arguments,
                resources=section.resources,
            ),
            section,
        )
        for server in servers
    ]


def _server_of(section: MCPServerSection) -> McpServer:
    where = f"agent.tools: {section.name}"
    passed_env = {name: _variable(name, f"{where}: pass_env") for name in section.pass_env}
    key = key_of(f"{where}: api_key", section.api_key)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    words = [str(section.command), *section.args]

    command = section.command
    args = list(section.args)
    if section.sandbox is not None and command is not None:
        try:
            command, *args = sandbox_command(command, args, section.sandbox, section.cwd)
        except SandboxError as error:
            raise ConfigError(f"{where}: sandbox: {error}") from error

    return McpServer(
        name=section.name,
        command=command,
        args=args,
        env=dict(section.env) | passed_env,
        cwd=section.cwd,
        url=section.url,
        transport=section.transport,
        headers=headers,
        key_variable=None if section.api_key is None else REFERENCE.sub(r"\1", section.api_key),
        start_timeout_s=section.start_timeout_s,
        shown=" ".join(words) if section.url is None else without_password(section.url),
        secrets=[*passed_env.values(), *([] if key is None else [key])],
        sandbox=section.sandbox,
    )


def _program(server: McpServer) -> str:
    """The program to search for: a name with a folder is relative to `cwd`."""
    command = str(server.command)
    has_folder = os.path.dirname(command) and server.cwd is not None
    return os.path.join(server.cwd, command) if has_folder and server.cwd else command


def _variable(name: str, where: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{where}: the environment variable {name} is not set: set it")
    return value


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
