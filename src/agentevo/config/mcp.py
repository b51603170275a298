"""Entries of `agent.tools` for MCP servers: programs that are started, and servers at a URL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentevo.config.sandbox import ProgramSandboxSection
from agentevo.config.tools import ToolSection


def checked_url(url: str, example: str) -> str:
    """The URL of a server. Raises ValueError for what is none, and for one with a password."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(
            f"{url!r} is no URL of a server: give one such as {example}, without a password"
        )
    return url


class MCPSection(ToolSection):
    """What every MCP server has."""

    session: Literal["attempt", "shared"] = "attempt"
    """Who has a session: every `attempt` its own, with a state of its own, or all attempts of a
    process one that is `shared`, for servers without a state."""
    max_sessions: int = Field(default=64, ge=1)
    """Sessions of attempts that are open at once in one process; further attempts wait, which is no
    part of their time."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time until a server that was started, or connected to, has named its tools."""
    prompt: str | None = None
    """A prompt of the server's, which the policy reads before the task, in the system message."""
    prompt_arguments: Mapping[str, str] = Field(default_factory=dict)
    """Its arguments."""
    resources: bool = False
    """Whether the policy may read the server's resources: by the tools list_resources and
    read_resource."""
    outcome: str | None = None
    """A tool that says what the attempt is worth by the state that it left: called at its end,
    without arguments, and not shown to the policy. Its text is a number, or a JSON object of named
    ones."""
    send_task: bool = False
    """Whether the server is told of the attempt's task: one that is started by the variable
    AGENTEVO_TASK, one at a URL by the headers agentevo-task and agentevo-seed. The task's `answer`
    is left out, as are `state_checks` and `solved_by_calls` of its metadata: what a server knows,
    the policy may find out. So mind what else the metadata says."""

    @model_validator(mode="after")
    def _one_task_for_one_session(self) -> Self:
        if self.send_task and self.session == "shared":
            raise ValueError("send_task is for a session for each attempt: leave one of them out")
        return self


class MCPServerSection(MCPSection):
    """One MCP server: a `command` that is started and spoken to over stdin and stdout, or a
    `url`."""

    type: Literal["mcp"] = "mcp"
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """What it is called here; tells its tools from others of the same name."""
    command: str | None = None
    """The program that is the server."""
    args: tuple[str, ...] = ()
    """Its arguments. No shell reads them."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Variables for it, beside PATH, HOME and the like, which are all that it gets of this
    process's own. They are kept in the run's folder: secrets go by pass_env."""
    pass_env: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of variables of this process that it gets as well, such as [GITHUB_TOKEN]."""
    cwd: Path | None = None
    """Folder in which it runs. Default: the recipe's."""
    sandbox: ProgramSandboxSection | None = None
    """Run it in a sandbox (bubblewrap) with a work folder of its own and no network: `true`, or a
    section that says what it may see and use beside that."""

    @field_validator("sandbox", mode="before")
    @classmethod
    def _true_is_a_section(cls, value: object) -> object:
        return {} if value is True else None if value is False else value

    url: str | None = None
    """Where it is, such as http://127.0.0.1:8000/mcp."""
    transport: Literal["http", "sse"] = "http"
    """How a server at a `url` speaks: streamable HTTP, or the older SSE."""
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
            raise ValueError("in a sandbox it runs in a folder of its own: leave out cwd")
        if self.command is not None and self.api_key is not None:
            raise ValueError("api_key is for a `url`: give a command its key by pass_env")

        return self


class MCPFileSection(MCPSection):
    """The servers of a file as Claude, Cursor and others write it: {"mcpServers": {NAME:
    {"command": ..., "args": [...], "env": {...}} or {"url": ..., "type": "http" or "sse",
    "headers": {...}}}}. `include` and `exclude` choose tools; what the file holds is not written
    into the run's folder."""

    type: Literal["mcp_file"] = "mcp_file"
    file: Path
    """The file, such as mcp_config.json."""
    servers: tuple[str, ...] = ()
    """Names of the servers that are used. Default: all that are not `disabled`."""
