"""Entries of `agent.tools` for MCP servers: programs that are started, servers at a URL, and many
servers behind the URL of AgentDock's HTTP API."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentevo.config.tools import ToolSection
from agentevo.environments.sandbox.section import ProgramSandboxSection

PATH = "/mcpapi"
"""The end of the URL of a node's API."""


def checked_url(url: str, example: str) -> str:
    """The URL of a server, unchanged. Raises ValueError if it is invalid or has a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(
            f"{url!r} is not the URL of a server: give one such as {example}, without a password"
        )
    return url


class MCPSection(ToolSection):
    """The options of every MCP server."""

    session: Literal["attempt", "shared"] = "attempt"
    """`attempt`: each attempt has its own session, with its own state; `shared`: all attempts of a
    process share one session, for servers without a state."""
    max_sessions: int = Field(default=64, ge=1)
    """Maximum number of attempts' sessions that are open at once in one process. Further attempts
    wait, and the wait does not count as their time."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """The time limit for starting or connecting to a server and listing its tools."""
    prompt: str | None = None
    """A prompt of the server, which the policy reads before the task, in the system message."""
    prompt_arguments: Mapping[str, str] = Field(default_factory=dict)
    """Arguments of `prompt`."""
    resources: bool = False
    """Whether the policy can read the server's resources, with the tools list_resources and
    read_resource."""
    outcome: str | None = None
    """A tool that scores an attempt by its final state. It is called at the end of the attempt,
    without arguments, and the policy does not see it. Its text is a number, or a JSON object of
    named numbers."""
    send_task: bool = False
    """Whether the server gets the attempt's task: a started program in the variable AGENTEVO_TASK,
    a server at a URL in the headers agentevo-task and agentevo-seed. The task's `answer`, and
    `state_checks` and `solved_by_calls` of its metadata, are left out, because the policy can find
    out what a server knows. Check what else the metadata says."""

    @model_validator(mode="after")
    def _one_task_for_one_session(self) -> Self:
        if self.send_task and self.session == "shared":
            raise ValueError("send_task needs session=attempt: set it, or leave out send_task")
        return self


class MCPServerSection(MCPSection):
    """One MCP server: a `command`, which is started and communicates over stdin and stdout, or a
    `url`."""

    type: Literal["mcp"] = "mcp"
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """The server's name in this recipe. It distinguishes tools of the same name."""
    command: str | None = None
    """The program that runs the server."""
    args: tuple[str, ...] = ()
    """Arguments of `command`, which runs without a shell."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables for the server. Of this process's own variables, it gets only PATH,
    HOME and the like. The run's folder stores the values of `env`: use pass_env for secrets."""
    pass_env: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of this process's variables that the server also gets, such as [GITHUB_TOKEN]."""
    cwd: Path | None = None
    """The folder that the server runs in. Default: the recipe's."""
    sandbox: ProgramSandboxSection | None = None
    """Run the server in a sandbox (bubblewrap) with its own work folder and no network: `true`, or
    a section with what else it can see and use."""

    @field_validator("sandbox", mode="before")
    @classmethod
    def _true_is_a_section(cls, value: object) -> object:
        return {} if value is True else None if value is False else value

    url: str | None = None
    """The URL of a running server, such as http://127.0.0.1:8000/mcp."""
    transport: Literal["http", "sse"] = "http"
    """The protocol of a server at a `url`: streamable HTTP, or the older SSE."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds the key for a server at a `url`, sent as
    Authorization: Bearer."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        return None if url is None else checked_url(url, "http://127.0.0.1:8000/mcp")

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> MCPServerSection:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server has a `command` that starts it or a `url`: give one of them")

        if self.url is not None and (
            self.args or self.env or self.pass_env or self.cwd or self.sandbox
        ):
            raise ValueError(
                "args, env, pass_env, cwd and sandbox are for a `command`: leave them out"
            )

        if self.sandbox is not None and self.cwd is not None:
            raise ValueError("a server in a sandbox runs in its own folder: leave out cwd")
        if self.command is not None and self.api_key is not None:
            raise ValueError("api_key is for a `url`: give a command its key by pass_env")

        return self


class MCPFileSection(MCPSection):
    """The servers of a file as Claude, Cursor and others write it: {"mcpServers": {NAME:
    {"command": ..., "args": [...], "env": {...}} or {"url": ..., "type": "http" or "sse",
    "headers": {...}}}}. `include` and `exclude` choose tools. The content of the file is not
    written into the run's folder."""

    type: Literal["mcp_file"] = "mcp_file"
    file: Path
    """The file, such as mcp_config.json."""
    servers: tuple[str, ...] = ()
    """Names of the servers that are used. Default: all that are not `disabled`."""


class MCPManagerSection(ToolSection):
    """Many MCP servers behind one URL: a node of AgentDock (MCP-Docker), which is AgentRL's
    `mcp_manager_url`. `include` and `exclude` take tools as TOOL and as SERVER.TOOL."""

    type: Literal["mcp_manager"] = "mcp_manager"
    name: str = Field(default="manager", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """The manager's name in this recipe. It distinguishes tools of the same name."""
    url: str
    """A node's API, such as http://host:8014/mcpapi or http://host:8080/container/ID/mcpapi."""
    servers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the servers whose tools the policy gets. Default: all."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds a key, sent as Authorization: Bearer."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """The time limit for listing the tools of a node, which may be starting."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        url = checked_url(url, f"http://127.0.0.1:8014{PATH}").rstrip("/")
        if not url.endswith(PATH):
            raise ValueError(
                f"the url of a node's API ends with {PATH}, such as http://127.0.0.1:8014{PATH}: "
                "add it"
            )
        return url
