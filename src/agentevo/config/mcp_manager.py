"""The entry of `agent.tools` for a manager of MCP servers that speaks AgentDock's HTTP API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from agentevo.config.mcp import checked_url
from agentevo.config.tools import ToolSection

PATH = "/mcpapi"
"""The end of the URL of a node's API."""


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
