"""Serves any registered tools as an MCP server: over stdin and stdout, or streamable HTTP.

Over stdin and stdout the process is one session. Over HTTP every session of the protocol has its
own state, made for the task in its headers (`send_task` of an entry of `agent.tools`). The state is
closed with the session: at the latest IDLE_S after its last request, or sooner if another session
needs its place (session_limiter.py). The server supports only revisions of the protocol with
sessions: a client that requests a later revision is refused, and falls back.

A class's `outcome()` becomes a tool of that name, which a recipe can name under `outcome`. The
reward of a ToolResult has no place in the protocol and is left out.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from agentevo.agents.tool_servers.session_limiter import SessionLimiter
from agentevo.agents.tools.functions import FunctionTools
from agentevo.agents.tools.task_headers import SEED_HEADER, TASK_HEADER
from agentevo.agents.tools.tool import ToolSession, shorten_text
from agentevo.config.tools import FunctionToolSection
from agentevo.errors import (
    AgentEvoError,
    ConfigError,
    ToolArgumentsError,
    ToolError,
    describe_error,
)
from agentevo.runtime.console import to_stderr
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.extras import load_extra
from agentevo.runtime.tracebacks import traceback_of
from agentevo.types import Task
from agentevo.types.images import ImageFile

OUTCOME = "outcome"
IDLE_S = 1800.0
MAX_SESSIONS = 400
"""The maximum number of open sessions over HTTP: each has its own thread."""
MAX_RESULT = 2**20
"""The maximum number of characters of a result; a longer one is cut to its head and tail."""
MAX_BODY = 4 * 2**20
"""The maximum bytes of a request."""
NO_TASK = (
    "; there is no task, and these tools may need one: give it with `agentevo tools inspect --task "
    "JSON`, in the variable AGENTEVO_TASK of this server, or from a recipe with send_task: true"
)


class ToolServer:
    """Serves the tools of one entry. `task`: the task of sessions whose headers have none."""

    def __init__(self, section: FunctionToolSection, task: Task, seed: int) -> None:
        """Raises MissingExtraError if the SDK is not installed, and ConfigError for tools that
        can't be made."""
        load_extra("mcp", "mcp", "tools serve")
        self._tools = FunctionTools(section)
        self._section = section
        self._task = task
        self._seed = seed
        self._open: dict[str, _OpenedToolset] = {}
        self._told = set[str]()

    async def check(self) -> None:
        """Raises ConfigError for options with which no session could start. Problems of a task are
        reported to the client that sends it."""
        try:
            async with self._tools.session(self._task, self._seed):
                pass
        except ConfigError as error:
            raise ConfigError(f"tools serve {self._section.name}: {error}") from error
        except Exception:  # noqa: BLE001 (the task can be the cause, or a time limit)
            return

    async def serve_stdio(self) -> None:
        """Serves until stdin ends."""
        from mcp.server.stdio import stdio_server

        server = self._server()
        try:
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
        finally:
            await self.close()

    def app(self, host: str, key: str | None) -> Any:
        """An ASGI application, at the path /mcp. `host`: the address that it listens at; `key`: the
        bearer token that clients must send."""
        served = self._server().streamable_http_app(
            json_response=True,
            host=host,
            session_idle_timeout=IDLE_S,
            max_sessions=MAX_SESSIONS,
            max_request_body_size=MAX_BODY,
        )
        return SessionLimiter(served, key, MAX_SESSIONS)

    async def close(self) -> None:
        """Ends the remaining sessions."""
        for name in list(self._open):
            await self._end(name)
        await self._tools.close()

    def _server(self) -> Any:
        from mcp.server.lowlevel import Server
        from mcp_types import ListToolsResult, Tool

        async def list_tools(context: Any, parameters: Any) -> Any:
            session = await self._session(context)
            listed = [
                Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
                for spec in session.specs
            ]
            if self._tools.has_outcome:
                about = "What the attempt is worth by the state that its calls left."
                schema: dict[str, Any] = {"type": "object", "properties": {}}
                listed.append(Tool(name=OUTCOME, description=about, input_schema=schema))

            return ListToolsResult(tools=listed)

        async def call_tool(context: Any, parameters: Any) -> Any:
            session = await self._session(context)
            return await self._call(session, parameters.name, parameters.arguments or {})

        return Server(self._section.name, on_list_tools=list_tools, on_call_tool=call_tool)

    async def _call(self, session: ToolSession, name: str, arguments: Mapping[str, Any]) -> Any:
        """Makes a call and returns its result, which can be an error of the tool. Raises MCPError
        for wrong arguments and for an unknown tool."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS, CallToolResult

        is_outcome = name == OUTCOME and self._tools.has_outcome
        tool_names = [spec.name for spec in session.specs]
        if not is_outcome and name not in tool_names:
            names_text = ", ".join(tool_names)
            raise MCPError(INVALID_PARAMS, f"there is no tool {name[:60]!r}: tools: {names_text}")

        limit = asyncio.timeout(self._section.timeout_s)
        is_error = True
        parts: Sequence[Any] = ()
        try:
            async with limit:
                if is_outcome:
                    text = json.dumps(await session.outcome())
                    is_error = False
                else:
                    result = await session.call(name, arguments)
                    text = result.text
                    is_error = result.is_error
                    parts = result.parts
        except ToolArgumentsError as error:
            raise MCPError(INVALID_PARAMS, str(error)) from None
        except ToolError as error:
            text = str(error)
        except TimeoutError:
            is_our_limit = limit.expired()
            text = (
                f"no answer within {self._section.timeout_s:g} s"
                if is_our_limit
                else "it timed out"
            )
        except Exception as error:  # noqa: BLE001 (a tool's exception costs only its call)
            text = f"the tool failed: {describe_error(error)}"
            kind = f"{name} {type(error).__name__}"
            if kind not in self._told:
                self._told.add(kind)
                to_stderr(f"{self._section.name}.{name}: {text}\n{traceback_of(error)}")

        content = [_content(part) for part in parts or (text,)]
        return CallToolResult(content=content, is_error=is_error)

    async def _session(self, context: Any) -> ToolSession:
        """The session of the client, opened with its first request. Raises MCPError if it can't be
        opened."""
        from mcp import MCPError
        from mcp_types import INTERNAL_ERROR

        headers = getattr(context.request, "headers", {})
        name = headers.get("mcp-session-id", "")
        opened = self._open.get(name)
        if opened is None:
            task, seed = _attempt_of_headers(headers) if name else (None, self._seed)
            opened = self._open[name] = _OpenedToolset()
            if name:
                # The SDK has no other notification of a session's end (mcp 2.3).
                connection = context.session._connection
                connection.exit_stack.push_async_callback(self._end, name)

            session_task = task or self._task
            opened.advice = "" if session_task.query or session_task.metadata else NO_TASK
            session_context = self._tools.session(session_task, seed)
            opened.ready = asyncio.ensure_future(opened.stack.enter_async_context(session_context))

        assert opened.ready is not None
        try:
            return await asyncio.shield(opened.ready)
        except Exception as error:  # from an invalid task, or a user's constructor
            is_our_error = isinstance(error, AgentEvoError)
            why = str(error) if is_our_error else f"{describe_error(error)}{opened.advice}"
            raise MCPError(INTERNAL_ERROR, f"{self._section.name}: {why}") from error

    async def _end(self, name: str) -> None:
        opened = self._open.pop(name, None)
        if opened is not None and opened.ready is not None:
            await asyncio.wait([opened.ready])
            await opened.stack.aclose()


class _OpenedToolset:
    """The opened tools of one session."""

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self.ready: asyncio.Future[ToolSession] | None = None
        self.advice = ""
        """The end of the message if the tools can't be made."""


def _attempt_of_headers(headers: Mapping[str, str]) -> tuple[Task | None, int]:
    """The task (None if there is none) and the seed in a session's headers. Raises MCPError for
    headers that can't be read."""
    from mcp import MCPError
    from mcp_types import INVALID_REQUEST

    task: Task | None = None
    name = TASK_HEADER
    try:
        if header := headers.get(TASK_HEADER):
            task = decode_json(base64.b64decode(header, validate=True), Task)
        name = SEED_HEADER
        return task, int(headers.get(SEED_HEADER) or 0)
    except (ValueError, msgspec.DecodeError) as error:
        raise MCPError(INVALID_REQUEST, f"the header {name}: {error}") from None


def own_task() -> tuple[Task, int]:
    """The task that this process was started for, and its seed. Raises ConfigError."""
    variable = os.environ.get("AGENTEVO_TASK")
    try:
        seed = int(os.environ.get("AGENTEVO_SEED") or 0)
        return (decode_json(variable, Task) if variable else Task(id="none")), seed
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"AGENTEVO_TASK and AGENTEVO_SEED are not a task: {error}") from error


def _content(part: str | ImageFile) -> Any:
    """A part of a result in MCP's form."""
    from mcp_types import ImageContent, TextContent

    if isinstance(part, str):
        return TextContent(text=shorten_text(part, MAX_RESULT))
    data = base64.b64encode(part.data).decode()
    return ImageContent(data=data, mime_type=part.part.media_type)
