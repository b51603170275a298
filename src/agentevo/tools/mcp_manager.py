"""A toolset of the servers behind an MCP manager (manager_api.py).

All attempts share an existing node, or one created with `session: shared`. With `session: attempt`
every attempt has its own node, created at its first call. If an attempt's own node stops answering,
the next call gets a new one, and the result says so to the policy. Nodes are released at the end of
their session or process. A node whose creation took too long is released once it exists. A killed
process does not release its nodes: the manager ends them after a long time without use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from agentevo.config.mcp_manager import MCPManagerSection
from agentevo.console import to_stderr
from agentevo.errors import ToolUnavailableError
from agentevo.own_loop import DedicatedLoop
from agentevo.tools.manager_api import ManagerAPI
from agentevo.tools.mcp_servers import RESTARTED
from agentevo.tools.tool import ToolResult, ToolSession, ToolSpec
from agentevo.types import Task

_loop = DedicatedLoop("agentevo-manager")


class MCPManager:
    """The toolset of the URL of a manager or node."""

    def __init__(self, section: MCPManagerSection, key: str | None) -> None:
        self.name = section.name
        self._section = section
        self._api = ManagerAPI(f"the MCP manager {section.name!r} ({section.url})", key)
        self._known: Sequence[ToolSpec] | None = None
        self._learning = asyncio.Lock()
        self._room = asyncio.Semaphore(section.max_sessions)
        self._shared = _ManagerSession(self._api, section)

    @property
    def has_outcome(self) -> bool:
        """See Toolset.has_outcome."""
        return False

    @asynccontextmanager
    async def session(self, task: Task, seed: int) -> AsyncIterator[ToolSession]:
        """See Toolset.session."""
        if self._section.session == "shared":
            await self._learn(self._shared)
            yield self._shared
            return

        async with self._room:
            session = _ManagerSession(self._api, self._section)
            try:
                await self._learn(session)
                yield session
            finally:
                await session.close()

    async def _learn(self, session: _ManagerSession) -> None:
        """Lists the tools, once in a process."""
        async with self._learning:
            if self._known is None:
                self._known = await session.learn_tools()
        session.specs = self._known

    async def close(self) -> None:
        """See Toolset.close."""
        await self._shared.close()
        await _loop.run(self._api.close)


class _ManagerSession:
    """Calls of one node."""

    def __init__(self, api: ManagerAPI, section: MCPManagerSection) -> None:
        self.specs: Sequence[ToolSpec] = ()
        self.instructions = ""
        self.num_losses = 0
        self._api = api
        self._section = section
        self._opening = asyncio.Lock()
        self._url = section.url if section.image is None else None
        """The URL of its node's API, once there is one."""
        self._node: str | None = None
        """The id of a node that was made for it."""
        self._is_suspect = self._tell_restart = False

    async def learn_tools(self) -> list[ToolSpec]:
        """The tools of the node's servers. Raises ToolUnavailableError and ConfigError."""
        await self.prepare()
        url = self._url or ""
        section = self._section
        return await _loop.run(
            lambda: self._api.tools(url, section.servers, section.start_timeout_s)
        )

    async def prepare(self) -> None:
        """See ToolSession.prepare."""
        async with self._opening:
            url = self._url or ""
            is_own = self._node is not None
            if is_own and self._is_suspect and not await _loop.run(lambda: self._api.answers(url)):
                await self._release()
                self.num_losses += 1
                self._tell_restart = True

            if self._url is None:
                self._node, self._url = await _loop.run(self._made)

            self._is_suspect = False

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """See ToolSession.call."""
        full_name = next(spec.full_name for spec in self.specs if spec.name == name)
        url = self._url or ""
        try:
            result = await _loop.run(lambda: self._api.call(url, full_name, arguments))
        except (ToolUnavailableError, asyncio.CancelledError):
            self._is_suspect = True
            raise

        if self._tell_restart:
            self._tell_restart = False
            return msgspec.structs.replace(result, text=RESTARTED + result.text)

        return result

    async def outcome(self) -> Any:
        """See ToolSession.outcome."""
        return None

    async def close(self) -> None:
        """Releases the node that was created for it."""
        if self._node is not None:
            await self._release()

    async def _made(self) -> tuple[str, str]:
        """A new node. If the wait for it ends early, the node is released once it exists."""
        section = self._section
        making = asyncio.create_task(
            self._api.create(
                section.url, str(section.image), section.creator, section.start_timeout_s
            )
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._release_abandoned)
            raise

    def _release_abandoned(self, making: asyncio.Task[tuple[str, str]]) -> None:
        if not making.cancelled() and making.exception() is None:
            node, _ = making.result()
            # The event loop does not keep a strong reference to a task.
            self._releasing = asyncio.create_task(self._release_node(node))

    async def _release(self) -> None:
        node = str(self._node)
        self._node = None
        self._url = None
        await _loop.run(lambda: self._release_node(node))

    async def _release_node(self, node: str) -> None:
        try:
            await self._api.release(self._section.url, node)
        except ToolUnavailableError as error:  # the attempt has its outcome already
            to_stderr(f"the node {node} of {self._section.url} was not released: {error}")
