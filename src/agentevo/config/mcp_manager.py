"""The entry of `agent.tools` for a manager of MCP servers that speaks AgentDock's HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.mcp import checked_url
from agentevo.config.tools import ToolSection

PATH = "/mcpapi"
"""What the URL of a node's API ends with."""


class MCPManagerSection(ToolSection):
    """Many MCP servers behind one URL: the nodes and the manager of AgentDock (MCP-Docker), which
    is AgentRL's `mcp_manager_url`. `include` and `exclude` take tools as TOOL and as
    SERVER.TOOL."""

    type: Literal["mcp_manager"] = "mcp_manager"
    name: str = Field(default="manager", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """What it is called here; tells its tools from others of the same name."""
    url: str
    """A node's API, such as http://host:8014/mcpapi or http://host:8080/container/ID/mcpapi; or,
    with `image`, the manager's own, such as http://host:8080."""
    servers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the servers whose tools the policy gets. Default: all."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds a key, sent as Authorization: Bearer."""
    image: str | None = None
    """Makes nodes of its own: the image of the containers that the manager starts, such as
    agentdock-node:explore. They are released at the end."""
    creator: str | None = None
    """Who the manager is told makes the nodes. It lets one creator have three of them at once;
    without a name there is no such limit."""
    session: Literal["shared", "attempt"] = "shared"
    """Who has a node, where `image` makes them: all attempts of a process one, or every `attempt`
    its own, made with its first call."""
    max_sessions: int = Field(default=3, ge=1)
    """Nodes of attempts that there are at once in one process; further attempts wait, which is no
    part of their time."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """Longest time until a node is made, and until it has named its tools."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        return checked_url(url, "http://127.0.0.1:8014/mcpapi").rstrip("/")

    @model_validator(mode="after")
    def _says_which_of_the_two(self) -> Self:
        if self.image is None:
            if not self.url.endswith(PATH):
                raise ValueError(
                    f"the url of a node's API ends with {PATH}, such as "
                    f"http://127.0.0.1:8014{PATH}: add it, or give the `image` of the nodes that "
                    "the manager at this url is to make"
                )

            if self.session == "attempt" or self.creator is not None:
                raise ValueError(
                    "session: attempt and creator are for nodes that are made: give their `image`, "
                    "or leave them out"
                )
        elif self.url.endswith(PATH):
            raise ValueError(
                f"{self.url} is a node that there is already, and `image` makes new ones: give the "
                "manager's url, such as http://127.0.0.1:8080, or leave image out"
            )

        return self
