"""A node of an MCP manager on loopback, as AgentDock's HTTP API is: its servers and tools, and all
that a tool may give back."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from remote_server import LoopbackServer, breaks_off, gives, pours


def schema(name: str, **properties: str) -> dict[str, Any]:
    """A tool as a node describes it."""
    given = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": given, "required": list(given)}
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = {
    "web": [schema("search", query="string"), schema("fetch_url", url="string")],
    "python": [schema("execute_code", code="string"), schema("search", query="string")],
    "state": [schema("count"), schema("give", what="string")],
}
GIVES: dict[str, Any] = {
    "text": "a text",
    "json": {"title": "a page", "hits": [1, 2]},
    "number": 42,
    "parts": [
        {"type": "text", "text": {"caption": "a cat"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAABBBB"}},
    ],
    "no parts": [],
    "nothing": {},
    "null": None,
    "error": {"error": "the page is gone", "detail": "404"},
    "status": {"status": "error", "message": "no luck"},
    "blank": "",
}
"""What the tool `give` answers as its content."""


class Manager(LoopbackServer):
    """`bare`: tools are listed without their servers. `key`: whoever has another one is refused.
    `asleep`: so many requests for the tools are refused first."""

    def __init__(self, *, bare: bool = False, key: str | None = None, asleep: int = 0) -> None:
        super().__init__()
        self.bare = bare
        self.key = key
        self.asleep = asleep
        self.count = 0
        """How often the tool `count` was called."""
        self.calls: list[tuple[str, Any]] = []
        self.places: list[str] = []
        """Headers that tell of a place in a trace."""
        self._lock = threading.Lock()

    @property
    def node_url(self) -> str:
        """The URL of the node's API."""
        return f"{self.url}/mcpapi"

    def respond(self, body: Any, headers: dict[str, str], handler: BaseHTTPRequestHandler) -> None:
        """See LoopbackServer."""
        self.places += [headers["traceparent"]] if "traceparent" in headers else []
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            gives({"detail": f"{headers.get('authorization')} is not known"}, 401)(body, handler)
            return

        words = [unquote(one) for one in urlsplit(handler.path).path.strip("/").split("/")]
        assert words[0] == "mcpapi"
        if words[1] == "tool":
            self._call(words[2], body, handler)
            return

        with self._lock:
            self.asleep -= 1

        if self.asleep >= 0:
            gives({"detail": "still starting"}, 503)(body, handler)
        elif words[1] == "servers":
            gives({"servers": list(TOOLS)})(body, handler)
        elif words[1] == "server":
            gives({"server": words[2], "tools": TOOLS[words[2]]})(body, handler)
        else:
            tools = [self._listed(server, one) for server in TOOLS for one in TOOLS[server]]
            gives({"tools": tools})(body, handler)

    def _listed(self, server: str, tool: dict[str, Any]) -> dict[str, Any]:
        if self.bare:
            return tool
        function = tool["function"]
        return {**tool, "function": {**function, "name": f"{server}.{function['name']}"}}

    def _call(self, tool: str, body: Any, handler: BaseHTTPRequestHandler) -> None:
        self.calls.append((tool, body))
        name = tool.rpartition(".")[2]
        if name == "count":
            with self._lock:
                self.count += 1
            gives({"content": self.count})(body, handler)
        elif name == "give":
            self._give(body, handler)
        elif name == "search" and "query" not in body:
            why = "'query' is a required property\n\nFailed validating 'required' in schema"
            gives({"status_code": 500, "detail": why, "headers": None})(body, handler)
        elif name in ("search", "fetch_url", "execute_code"):
            gives({"content": f"{tool} of {json.dumps(body)}"})(body, handler)
        else:
            gives({"status_code": 500, "detail": f"404: Tool not found: {tool}"})(body, handler)

    def _give(self, body: Any, handler: BaseHTTPRequestHandler) -> None:
        what = body["what"]
        if what in GIVES:
            gives({"content": GIVES[what]})(body, handler)
        elif what == "half":
            breaks_off(body, handler)
        elif what == "flood":
            pours(4 * 2**20)(body, handler)
        elif what == "no json":
            gives(b"<html>busy</html>")(body, handler)
        elif what == "no object":
            gives([1])(body, handler)
        elif what == "proxy":
            gives({"detail": "Error connecting to node"}, 503)(body, handler)
        elif what == "hang":
            self._ended.wait()
        else:
            gives({"status_code": 500, "detail": f"no {what}", "headers": None})(body, handler)
