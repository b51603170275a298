"""MCP servers as toolsets: a session for each attempt, or one that all attempts share.

All connections of a process run on a separate event loop, so that a server that floods its client
does not block an engine. The tools of a server are listed when the first attempt begins; later
attempts start their server, or connect to it, at their first call. If a server is gone, the next
call starts it again, and the result explains that to the policy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from agentevo.agents.tools.mcp_connection import McpConnection, McpServer, check_package
from agentevo.agents.tools.task_headers import attempt_variables, task_headers, task_variables
from agentevo.agents.tools.tool import ToolResult, ToolSession, Toolset, ToolSpec
from agentevo.config.mcp import MCPSection
from agentevo.errors import EnvironmentFailure, ToolUnavailableError
from agentevo.runtime.loop_thread import DedicatedLoop
from agentevo.runtime.trace_header import trace_headers
from agentevo.types import Task

RESTARTED = "[the server was started again: what it held from earlier calls is lost]\n"

_loop = DedicatedLoop("agentevo-mcp")


class MCPServer(Toolset):
    """The toolset of one server."""

    def __init__(self, server: McpServer, section: MCPSection) -> None:
        """Raises MissingExtraError if the SDK is not installed."""
        check_package()
        self.name = server.name
        self._server = server
        self._section = section
        self._known: _McpSession | None = None
        """The first session, whose tools and prompt later attempts do not request again."""
        self._room = asyncio.Semaphore(section.max_sessions)
        self._shared: _McpSession | None = None

    @property
    def has_outcome(self) -> bool:
        return self._section.outcome is not None

    @asynccontextmanager
    async def session(self, task: Task, seed: int) -> AsyncIterator[ToolSession]:
        if self._section.session == "shared":
            if self._shared is None:
                self._shared = _McpSession(self._server, self._section)
            await self._shared.learn_tools(None)
            yield self._shared
            return

        async with self._room:
            server = _of_attempt(self._server, task, seed, send_task=self._section.send_task)
            session = _McpSession(server, self._section)
            try:
                await session.learn_tools(self._known)
                self._known = self._known or session
                yield session
            finally:
                await session.close()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()


class _McpSession(ToolSession):
    """One session of one server; it connects at its first use."""

    def __init__(self, server: McpServer, section: MCPSection) -> None:
        self.specs: Sequence[ToolSpec] = ()
        self.instructions = ""
        self.num_losses = 0
        self._server = server
        self._section = section
        self._connection: McpConnection | None = None
        self._broken_off: list[McpConnection] = []
        """Connections whose opening was cancelled; they may not have ended yet."""
        self._opening = asyncio.Lock()
        self._num_tries = 0
        self._failure: str | None = None
        """Why the last attempt to open it failed."""
        self._was_open = False
        self._has_to_tell_restart = False

    async def learn_tools(self, known: _McpSession | None) -> None:
        """Takes the server's tools from a session that knows them, or lists them. Raises
        ToolUnavailableError, and EnvironmentFailure if the tool that `outcome` names is missing."""
        if known is None:
            await self.prepare()
        else:
            self.specs = self._shown(known._all)
            self.instructions = known.instructions

    def _shown(self, specs: Sequence[ToolSpec]) -> list[ToolSpec]:
        self._all = list(specs)
        outcome = self._section.outcome
        if outcome is not None and all(spec.name != outcome for spec in specs):
            raise EnvironmentFailure(
                f"{self._server.title} has no tool {outcome!r}, which `outcome` "
                f"names: it has {', '.join(spec.name for spec in specs) or 'none'}"
            )

        return [spec for spec in specs if spec.name != outcome]

    async def prepare(self) -> None:
        tries = self._num_tries
        async with self._opening:
            connection = self._connection
            if connection is None or not await _loop.run(connection.still_answers):
                if self._failure is not None and self._num_tries > tries:
                    raise ToolUnavailableError(self._failure)  # of the task it waited for
                connection = await self._open()

            if not self._was_open:  # by this call, or by a call that was just cancelled
                self.specs = self._shown(connection.specs)
                self.instructions = connection.instructions
                self._was_open = True

    async def _open(self) -> McpConnection:
        if self._was_open:
            self.num_losses += 1
            self._has_to_tell_restart = self._section.session == "attempt"

        connection = self._connection = McpConnection(self._server)
        self._num_tries += 1

        self._failure = None
        try:
            await _loop.run(connection.open)
        except ToolUnavailableError as error:
            self._failure = str(error)
            raise
        except asyncio.CancelledError:
            self._broken_off = [broken for broken in self._broken_off if not broken.has_ended]
            self._broken_off.append(connection)
            raise

        return connection

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        connection = self._connection
        if connection is None or not connection.is_open:
            raise ToolUnavailableError(f"{self._server.title} is not connected")

        meta = trace_headers()  # the trace context of this call, read on its own event loop
        result = await _loop.run(lambda: connection.call(name, arguments, meta))
        if self._has_to_tell_restart:
            self._has_to_tell_restart = False
            return result.with_text(RESTARTED + result.text)

        return result

    async def offers(self) -> tuple[Sequence[str], Sequence[str]]:
        """See Offering."""
        await self.prepare()
        assert self._connection is not None
        return await _loop.run(self._connection.offers)

    async def outcome(self) -> Any:
        """See ToolSession.outcome. Raises EnvironmentFailure if the server gives no outcome."""
        name = self._section.outcome
        if name is None:
            return None

        result = await self.call(name, {})
        if result.is_error:
            raise EnvironmentFailure(f"{self._server.name}.{name}: {result.text}")

        return _read_outcome(result.text, f"{self._server.name}.{name}")

    async def close(self) -> None:
        """Ends the session."""
        for connection in (*self._broken_off, self._connection):
            if connection is not None:
                await _loop.run(connection.close)


def _read_outcome(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None

    if isinstance(value, (int, float, dict)):
        return value

    raise EnvironmentFailure(
        f"{what} answered {text[:200]!r}: the outcome of an attempt must be a number, or a JSON "
        "object of named numbers"
    )


def _of_attempt(server: McpServer, task: Task, seed: int, *, send_task: bool) -> McpServer:
    """The server, with the variables or headers of an attempt added. Raises EnvironmentFailure."""
    if server.url is not None:
        headers = task_headers(task, seed, server.name) if send_task else {}
        return replace(server, headers={**server.headers, **headers})
    variables = (
        task_variables(task, seed, server.name) if send_task else attempt_variables(task, seed)
    )
    return replace(server, env={**server.env, **variables})
