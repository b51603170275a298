"""The servers behind an MCP manager, by AgentDock's HTTP API. All attempts share the node.

    GET  NODE/servers              {"servers": [ID]}
    GET  NODE/tools                {"tools": [schemas in OpenAI's form, named SERVER.TOOL or TOOL]}
    GET  NODE/server/ID/tools      {"tools": [names or schemas]}
    POST NODE/tool/SERVER.TOOL     the arguments; {"content": a text, the value of a JSON text, or a
                                   list of parts}

A node reports a failed call with HTTP 200: {"status_code": 500, "detail": ...}, or content that is
an error or empty. Each of these becomes an error result. A server's answers are not trusted, so at
most MAX_ANSWER bytes are read.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from agentevo.agents.tools.mcp_connection import MAX_TOOLS, without_secrets
from agentevo.agents.tools.result_parts import limit_pixels, read_or_tell, result_of_parts
from agentevo.agents.tools.tool import ToolResult, ToolSession, Toolset, ToolSpec, object_schema
from agentevo.config.mcp import MCPManagerSection
from agentevo.errors import ConfigError, ToolArgumentsError, ToolUnavailableError, describe_error
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.http_clients import trusted_context
from agentevo.runtime.loop_thread import DedicatedLoop
from agentevo.runtime.registry import nearest
from agentevo.runtime.trace_header import trace_headers
from agentevo.types import Task
from agentevo.types.images import ImageFile

if TYPE_CHECKING:
    import httpx


CONNECT_S = 10.0
MAX_ANSWER = 64 * 2**20
"""Bytes of an answer."""
SHOWN = 300
"""The number of an answer's characters that a message shows."""
LONGEST_PAUSE_S = 5.0
_INVALID = "failed validating"
"""The messages of jsonschema for wrong arguments."""


class ManagerAPI:
    """See the module. All calls come from one event loop."""

    def __init__(self, name: str, key: str | None) -> None:
        self._name = name
        self._key = key
        self._idle: list[httpx.AsyncClient] = []
        """Clients with one connection each: a large pool searches all its connections for every
        request."""

    async def tools(self, node: str, servers: Sequence[str], within_s: float) -> list[ToolSpec]:
        """The tools of a node's servers; of all servers if `servers` is empty. Retries while a node
        does not answer yet. Raises ToolUnavailableError, and ConfigError for a server that the node
        does not have."""
        pause = 0.5
        problem = "it has not answered"
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        return await self._tools(node, servers)
                    except ToolUnavailableError as error:
                        problem = str(error).removeprefix(f"{self._name}: ")
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except TimeoutError:
            raise ToolUnavailableError(
                f"{self._name}: no tools listed within {within_s:g} s: {problem}"
            ) from None

    async def _tools(self, node: str, servers: Sequence[str]) -> list[ToolSpec]:
        server_names = _texts((await self._json("GET", f"{node}/servers")).get("servers"))
        unknown = next((server for server in servers if server not in server_names), None)
        if unknown is not None:
            guess = nearest(unknown, server_names)
            hint = f"did you mean {guess}? " if guess else ""
            raise ConfigError(
                f"agent.tools: {self._name}: servers: there is no {unknown!r}: {hint}it has "
                f"{', '.join(server_names) or 'none'}"
            )

        listed = _schemas((await self._json("GET", f"{node}/tools")).get("tools"))
        owned = {name: _owner(name, server_names) for name in listed}
        if any(owner is None for owner in owned.values()):
            tools = await self._by_server(node, servers or server_names, listed)
        else:
            tools = {
                name: schema
                for name, schema in listed.items()
                if owned[name] in (servers or server_names)
            }

        if len(tools) > MAX_TOOLS:
            raise ToolUnavailableError(f"{self._name}: it has more than {MAX_TOOLS} tools")

        return _specs(tools, server_names)

    async def _by_server(
        self, node: str, servers: Sequence[str], listed: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Mapping[str, Any]]:
        """SERVER.TOOL -> schema, if the list of all tools has bare names."""
        tools: dict[str, Mapping[str, Any]] = {}
        for server in servers:
            path = f"{node}/server/{quote(server, safe='')}/tools"
            for name, schema in _schemas((await self._json("GET", path)).get("tools")).items():
                full = name if _owner(name, [server]) else f"{server}.{name}"
                tools[full] = schema or listed.get(full) or listed.get(name) or {}
        return tools

    async def call(self, node: str, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls SERVER.TOOL. Raises ToolArgumentsError, and ToolUnavailableError if no answer
        comes."""
        try:
            content = msgspec.json.encode(arguments)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ToolArgumentsError(f"the arguments can't be sent as JSON: {error}") from None

        url = f"{node}/tool/{quote(tool, safe='')}"
        answer = await self._json("POST", url, content)
        status = answer.get("status_code")
        detail = answer.get("detail")
        if isinstance(status, int) and status >= 400:
            return _failure_result(detail if isinstance(detail, str) else json.dumps(detail))

        return await in_thread(_result, answer.get("content"))

    async def close(self) -> None:
        """Closes its connections."""
        idle = self._idle
        self._idle = []
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                await asyncio.gather(*(client.aclose() for client in idle))

    def _client(self) -> httpx.AsyncClient:
        """An idle client."""
        if self._idle:
            return self._idle.pop()

        import httpx

        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"

        # The caller sets the deadline of a call.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        return httpx.AsyncClient(headers=headers, timeout=timeout, verify=trusted_context())

    async def _json(self, method: str, url: str, content: bytes | None = None) -> dict[str, Any]:
        """The answer, a JSON object. Raises ToolUnavailableError and ToolArgumentsError."""
        response, body = await self._ask(method, url, content)
        status = response.status_code
        if status in (400, 422) and content is not None:
            raise ToolArgumentsError(self._words(_describe_answer(status, body)))
        if status >= 300:
            # A request refused with "too many requests" had no effect.
            raise ToolUnavailableError(
                self._words(_describe_answer(status, body)), was_sent=status != 429
            )

        try:
            answer = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ToolUnavailableError(
                self._words(f"its answer is not JSON ({error}): {_beginning(body)}"), was_sent=True
            ) from None

        if not isinstance(answer, dict):
            raise ToolUnavailableError(
                self._words(f"its answer is not an object: {_beginning(body)}"), was_sent=True
            )

        return answer

    async def _ask(
        self, method: str, url: str, content: bytes | None
    ) -> tuple[httpx.Response, bytes]:
        import httpx

        client = self._client()
        try:
            async with client.stream(
                method, url, content=content, headers=trace_headers()
            ) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER:
                        raise ToolUnavailableError(
                            f"{self._name}: the answer has more than {MAX_ANSWER:,} bytes",
                            was_sent=True,
                        )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ToolUnavailableError(
                self._words(
                    f"{describe_error(error)}: nothing listens at {url}: start it, or correct the "
                    "URL"
                )
            ) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise ToolUnavailableError(
                self._words(f"it broke off: {describe_error(error)}"), was_sent=True
            ) from error
        finally:
            self._idle.append(client)

        return response, bytes(body)

    def _words(self, problem: str) -> str:
        return without_secrets([self._key] if self._key else [], f"{self._name}: {problem}")


def _texts(value: Any) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _schemas(entries: Any) -> dict[str, Mapping[str, Any]]:
    """Name -> schema, which is empty if only the name is known."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for entry in entries if isinstance(entries, list) else []:
        function = entry.get("function", entry) if isinstance(entry, dict) else {"name": entry}
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name:
            schemas[name] = function if isinstance(entry, dict) else {}
    return schemas


def _owner(name: str, servers: Sequence[str]) -> str | None:
    """The server in a name SERVER.TOOL."""
    owners = [server for server in servers if name.startswith(f"{server}.")]
    return max(owners, key=len) if owners else None


def _specs(tools: Mapping[str, Mapping[str, Any]], servers: Sequence[str]) -> list[ToolSpec]:
    """The tools by bare names, except where several servers have a tool of the same name."""
    bare = {full: full.removeprefix(f"{_owner(full, servers)}.") for full in tools}
    counts = Counter(bare.values())
    specs = []
    for full, schema in tools.items():
        about = schema.get("description")
        parameters = schema.get("parameters", schema.get("inputSchema"))
        owner = _owner(full, servers)
        name = bare[full] if counts[bare[full]] == 1 else f"{owner}__{bare[full]}"
        specs.append(
            ToolSpec(
                name=name,
                full_name=full,
                description=about if isinstance(about, str) else "",
                parameters=object_schema(parameters),
            )
        )

    return specs


def _failure_result(detail: str) -> ToolResult:
    if _INVALID in detail.lower():
        raise ToolArgumentsError(detail.partition("\n")[0])
    return ToolResult(text=f"Error: {detail}", is_error=True)


def _result(content: Any) -> ToolResult:
    """The result of a node's answer, as the policy reads it."""
    if content is None or content in ({}, []):
        return ToolResult(text="Error: the tool returned nothing", is_error=True)

    if isinstance(content, Mapping):
        error = content.get("error")
        if error or content.get("status") == "error":
            return _failure_result(_text(error or content))

    if isinstance(content, list) and all(_is_part(part) for part in content):
        return result_of_parts(limit_pixels(map(_part, content)))

    return ToolResult(text=_text(content))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("text", "image_url")


def _part(part: Mapping[str, Any]) -> str | ImageFile:
    if part["type"] == "text":
        return _text(part.get("text", ""))

    image = part.get("image_url")
    url = str(image.get("url") if isinstance(image, Mapping) else image)
    if not url.startswith("data:"):
        return f"[image {url[:SHOWN]}]"
    kind, _, data = url[5:].partition(",")
    size = len(data) * 3 // 4
    return read_or_tell(url, lambda: f"image, {kind.partition(';')[0]}, {size:,} bytes")


def _beginning(body: bytes) -> str:
    return repr(body[:SHOWN].decode(errors="replace"))


def _describe_answer(status: int, body: bytes) -> str:
    """A description of the answer with that status."""
    try:
        answer = msgspec.json.decode(body)
        detail = answer.get("detail") if isinstance(answer, dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        detail = None
    return f"HTTP {status}: {detail if isinstance(detail, str) else _beginning(body)}"


_loop = DedicatedLoop("agentevo-manager")


class MCPManager(Toolset, ToolSession):
    """The toolset of a node's URL, and the session of all attempts."""

    def __init__(self, section: MCPManagerSection, key: str | None) -> None:
        self.name = section.name
        self.specs: Sequence[ToolSpec] = ()
        self._section = section
        self._api = ManagerAPI(f"the MCP manager {section.name!r} ({section.url})", key)
        self._learning = asyncio.Lock()

    @asynccontextmanager
    async def session(self, task: Task, seed: int) -> AsyncIterator[ToolSession]:
        """See Toolset.session. Lists the tools, once in a process."""
        section = self._section
        async with self._learning:
            if not self.specs:
                self.specs = await _loop.run(
                    lambda: self._api.tools(section.url, section.servers, section.start_timeout_s)
                )
        yield self

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        full_name = next(spec.full_name for spec in self.specs if spec.name == name)
        return await _loop.run(lambda: self._api.call(self._section.url, full_name, arguments))

    async def close(self) -> None:
        await _loop.run(self._api.close)
