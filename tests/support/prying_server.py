"""An MCP server that tries to reach what a sandbox should keep from it."""

import json
import mmap
import os
import socket
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("prying")


@server.tool()
def read(path: str) -> str:
    """Reads a file."""
    with open(path) as file:
        return file.read()


@server.tool()
def write(path: str) -> str:
    """Writes a file."""
    with open(path, "w") as file:
        file.write("written")
    return "written"


@server.tool()
def connect(port: int) -> str:
    """Connects to a port of this machine."""
    socket.create_connection(("127.0.0.1", port), 5).close()
    return "connected"


@server.tool()
def who() -> str:
    """Who it is, and whom it sees."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return json.dumps(
        {
            "user": os.getuid(),
            "processes": len(processes),
            "variables": sorted(os.environ),
            "folder": os.getcwd(),
            "host": os.path.exists(os.path.expanduser("~root/.bashrc")),
        }
    )


@server.tool()
def fill(mebibytes: int) -> str:
    """Takes memory."""
    return str(len(b"x" * (mebibytes * 2**20)))


@server.tool()
def share(mebibytes: int) -> str:
    """Takes memory that it could share with children, and keeps it."""
    kept.append(mmap.mmap(-1, mebibytes * 2**20))
    for place in range(0, mebibytes * 2**20, 4096):
        kept[-1][place] = 1
    return "taken"


@server.tool()
def breed(number: int, mebibytes: int) -> str:
    """Starts children that take memory and leave their parent."""
    for _ in range(number):
        if os.fork() == 0:
            os.setsid()
            kept.append(b"x" * (mebibytes * 2**20))
            time.sleep(600)
            os._exit(0)
    time.sleep(600)
    return "bred"


kept: list[object] = []


if __name__ == "__main__":
    server.run("stdio")
