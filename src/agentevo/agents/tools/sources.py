"""Makes the toolsets of an entry of `agent.tools`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

from agentevo.agents.tools.functions import FunctionTools
from agentevo.agents.tools.mcp_connection import McpServer
from agentevo.agents.tools.mcp_file import read_servers
from agentevo.agents.tools.mcp_manager import MCPManager
from agentevo.agents.tools.mcp_servers import MCPServer
from agentevo.agents.tools.tool import Toolset
from agentevo.agents.tools.verl_tools import VerlTools
from agentevo.config.mcp import MCPFileSection, MCPManagerSection, MCPServerSection
from agentevo.config.tools import FunctionToolSection, ToolSection, VerlToolsSection
from agentevo.environments.sandbox.programs import sandbox_command
from agentevo.errors import ConfigError, SandboxError
from agentevo.runtime.credentials import REFERENCE, without_password


def make_toolsets(section: ToolSection) -> Sequence[Toolset]:
    """The toolsets of an entry: one, or one for each server of a file. No server is started here.
    Raises ConfigError for a toolset that can't be made."""
    match section:
        case FunctionToolSection():
            return [FunctionTools(section)]
        case VerlToolsSection():
            return [VerlTools(section)]
        case MCPManagerSection():
            return [MCPManager(section, _key(section.api_key, f"agent.tools: {section.name}"))]
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
    key = _key(section.api_key, where)
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


def _key(api_key: str | None, where: str) -> str | None:
    """The key in the environment variable that `${env:NAME}` names."""
    if api_key is None:
        return None

    reference = REFERENCE.fullmatch(api_key)
    if reference is None:
        raise ConfigError(f"{where}: api_key: write ${{env:NAME}}, not the key itself")

    key = _variable(reference[1], f"{where}: api_key")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{where}: api_key: the environment variable {reference[1]} holds a line break or a "
            "character that is not ASCII, which no HTTP header can carry: set it to the key alone"
        )

    return key


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
