"""Servers for tools.py, each with a tool that adds two numbers: a small one that speaks MCP over
stdio or streamable HTTP, one of the official SDK, and a manager with AgentDock's API.

A server at a URL says it on stdout. HTTP connections stay open; requests are read whole.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
METHOD_NOT_FOUND = -32601


def answer(message: dict[str, Any]) -> bytes | None:
    """To a message of MCP; None where it wants none."""
    if "id" not in message:
        return None

    method = message.get("method")
    given = message.get("params") or {}
    result: dict[str, Any]
    if method == "initialize":
        result = {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "adder", "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": [{"name": "add", "description": "Adds.", "inputSchema": SCHEMA}]}
    elif method == "tools/call":
        total = given["arguments"]["a"] + given["arguments"]["b"]
        result = {"content": [{"type": "text", "text": str(total)}]}
    else:
        error = {"code": METHOD_NOT_FOUND, "message": f"no method {method}"}
        return msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "error": error})

    return msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "result": result})


def stdio() -> None:
    """A message a line."""
    for line in sys.stdin.buffer:
        content = answer(msgspec.json.decode(line))
        if content is not None:
            sys.stdout.buffer.write(content + b"\n")
            sys.stdout.buffer.flush()


def sdk() -> None:
    """The same tool, by the official SDK."""
    from mcp.server.mcpserver import MCPServer

    app = MCPServer("adder", log_level="ERROR")

    @app.tool()
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    app.run("stdio")


def over_mcp(method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Streamable HTTP, with an answer to each request and no stream."""
    if method != "POST":
        return 405, b""
    content = answer(msgspec.json.decode(body))
    return (202, b"") if content is None else (200, content)


def as_manager(method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """A node of AgentDock."""
    if path.endswith("/servers"):
        return 200, b'{"servers": ["math"]}'
    if path.endswith("/tools"):
        function = {"name": "math.add", "description": "Adds.", "parameters": SCHEMA}
        return 200, msgspec.json.encode({"tools": [{"type": "function", "function": function}]})
    given = msgspec.json.decode(body)
    return 200, msgspec.json.encode({"content": given["a"] + given["b"]})


async def serve(handle: Any, path: str) -> None:
    """HTTP/1.1 on a free port of loopback."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, where, _ = first.split(" ")
                status, content = handle(method, where, body)
                writer.write(
                    f"HTTP/1.1 {status} OK\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        stdio()
    elif sys.argv[1] == "sdk":
        sdk()
    elif sys.argv[1] == "http":
        asyncio.run(serve(over_mcp, "/mcp"))
    else:
        asyncio.run(serve(as_manager, "/mcpapi"))
