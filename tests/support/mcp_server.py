"""An MCP server with a state, which breaks in every way that it is asked to.

python mcp_server.py [stdio | http PORT | sse PORT] [--slow SECONDS]
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
told = json.loads(os.environ.get("AGENTEVO_TASK", "{}"))
state = {"count": int(told.get("metadata", {}).get("count", 0))}


@server.tool()
def add(number: int) -> str:
    """Adds a number to the count.

    Args:
        number: What is added.
    """
    state["count"] += number
    return str(state["count"])


@server.tool()
def worth() -> str:
    """What the attempt is worth."""
    return json.dumps({"count": state["count"]})


@server.tool()
def refuse() -> str:
    """Raises."""
    raise ValueError("not today")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits, and answers others meanwhile."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def hang() -> str:
    """Answers nobody any more."""
    time.sleep(600)
    return "never"


@server.tool()
def die() -> str:
    """Ends the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def flood(megabytes: int) -> str:
    """Says a lot."""
    return "x" * (megabytes * 2**20)


@server.tool()
def garbage() -> str:
    """Writes what is no JSON."""
    sys.stdout.buffer.write(b"\xff\xfe{]\n" * 3)
    sys.stdout.buffer.flush()
    return "done"


@server.tool()
def echo(value: Any) -> str:
    """Gives it back."""
    return json.dumps(value)


@server.tool()
def grow() -> str:
    """Gets a new tool."""
    server.add_tool(lambda: "new", name="new", description="A new one.")
    return "grown"


@server.prompt()
def rules(tone: str, length: str = "short") -> str:
    """How to count."""
    return f"Count in a {tone} voice, and be {length}."


@server.resource("count://now", description="The count.")
def now() -> str:
    """The count."""
    return str(state["count"])


@server.resource("count://{number}/half", description="Half of a number.")
def half(number: str) -> str:
    """Half of a number."""
    return str(int(number) / 2)


if __name__ == "__main__":
    words = sys.argv[1:] or ["stdio"]
    if "--slow" in words:
        time.sleep(float(words[words.index("--slow") + 1]))
    if words[0] == "stdio":
        server.run("stdio")
    elif words[0] == "sse":
        server.run("sse", port=int(words[1]))
    else:
        server.run("streamable-http", port=int(words[1]))
