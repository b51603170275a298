"""The entry of `agent.tools` for a manager of MCP servers that speaks AgentDock's HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentevo.config.mcp import checked_url
from agentevo.config.tools import ToolSection

PATH = "/mcpapi"
"""The end of the URL of a node's API."""


class MCPManagerSection(ToolSection):
    """Many MCP servers behind one URL: the nodes and the manager of AgentDock (MCP-Docker), which
    is AgentRL's `mcp_manager_url`. `include` and `exclude` take tools as TOOL and as
    SERVER.TOOL."""

    type: Literal["mcp_manager"] = "mcp_manager"
    name: str = Field(default="manager", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """The manager's name in this recipe. It distinguishes tools of the same name."""
    url: str
    """A node's API, such as http://host:8014/mcpapi or http://host:8080/container/ID/mcpapi; or,
    with `image`, the manager's own, such as http://host:8080."""
    servers: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of the servers whose tools the policy gets. Default: all."""
    api_key: str | None = None
    """`${env:NAME}`, the environment variable that holds a key, sent as Authorization: Bearer."""
    image: str | None = None
    """The image of the containers that the manager starts as new nodes, such as
    agentdock-node:explore. They are released at the end."""
    creator: str | None = None
    """The name that the manager gets as the creator of the nodes. It allows three nodes at once per
    creator; without a name there is no such limit."""
    session: Literal["shared", "attempt"] = "shared"
    """With `image`: `shared`: all attempts of a process share one node; `attempt`: each attempt has
    its own node, made at its first call."""
    max_sessions: int = Field(default=3, ge=1)
    """Maximum number of attempts' nodes at once in one process. Further attempts wait, and the wait
    does not count as their time."""
    start_timeout_s: float = Field(default=180.0, gt=0)
    """The time limit for making a node, and for listing its tools."""

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
                    "the manager at this url makes"
                )

            if self.session == "attempt" or self.creator is not None:
                raise ValueError(
                    "session=attempt and creator are for nodes that the manager makes: give their "
                    "`image`, or leave out session and creator"
                )
        elif self.url.endswith(PATH):
            raise ValueError(
                f"{self.url} is an existing node, but `image` makes new ones: give the "
                "manager's url, such as http://127.0.0.1:8080, or leave image out"
            )

        return self
