"""The hunt as an MCP server over stdio: one for each attempt, told its task by the environment."""

import json
import os
from types import SimpleNamespace

from mcp.server.mcpserver import MCPServer

from hunt import Hunt

server = MCPServer("hunt")
task = json.loads(os.environ["AGENTEVO_TASK"])
hunt = Hunt(SimpleNamespace(metadata=task["metadata"]))


@server.tool()
def open_box(colour: str) -> str:
    """Opens the box of a colour."""
    return hunt.open_box(colour)


if __name__ == "__main__":
    server.run("stdio")
