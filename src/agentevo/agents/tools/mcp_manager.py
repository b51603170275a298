"""A toolset of the servers behind an MCP manager (manager_api.py). All attempts share the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentevo.agents.tools.manager_api import ManagerAPI
from agentevo.agents.tools.tool import ToolResult, ToolSession, ToolSpec
from agentevo.config.mcp import MCPManagerSection
from agentevo.runtime.loop_thread import DedicatedLoop
from agentevo.types import Task

_loop = DedicatedLoop("agentevo-manager")


class MCPManager:
    """The toolset of a node's URL, and the session of all attempts."""

    instructions = ""
    has_outcome = False
    num_losses = 0

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

    async def prepare(self) -> None:
        """See ToolSession.prepare."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """See ToolSession.call."""
        full_name = next(spec.full_name for spec in self.specs if spec.name == name)
        return await _loop.run(lambda: self._api.call(self._section.url, full_name, arguments))

    async def outcome(self) -> Any:
        """See ToolSession.outcome."""
        return None

    async def close(self) -> None:
        """See Toolset.close."""
        await _loop.run(self._api.close)
