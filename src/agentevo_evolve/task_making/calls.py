"""Real calls of the server that tasks are made for. A session is of the same kind as an
attempt's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from agentevo.agents.tools.state_checks import StateCheck
from agentevo.agents.tools.toolbox import UNANSWERED, AttemptTools, Toolbox
from agentevo.config.mcp import MCPServerSection
from agentevo.config.tools import ToolSection
from agentevo.types import Task

REFUSAL_FACTS = ("num_wrong_arguments",)
_ERROR_PREFIX = re.compile(r"\s*(?:[a-z]+ )?error\b\s*:", re.IGNORECASE)
"""The start of a result with which some servers report an error."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """A call and its result."""

    tool: str
    arguments: dict[str, Any]
    text: str
    is_error: bool = False
    is_refused: bool = False
    """Whether the tool refused the arguments."""
    is_lost: bool = False
    """Whether the server sent no result."""
    wall_s: float = 0.0


class ToolWorld:
    """Opens sessions at the server."""

    def __init__(self, sections: Sequence[ToolSection]) -> None:
        """Raises ConfigError if the tools can't be created."""
        self._toolbox = Toolbox(sections)
        self._stack = AsyncExitStack()
        self._keeps_sessions = False
        self._kept_sessions: dict[tuple[int, int], AttemptTools] = {}
        self._opening = asyncio.Lock()
        servers = [section for section in sections if isinstance(section, MCPServerSection)]
        self.words = [word for section in servers for word in section.args]
        """The arguments of the commands that start the servers. Paths among them are values."""
        self.is_isolated = len(servers) == len(sections) and all(
            section.sandbox is not None and not section.sandbox.read_write for section in servers
        )
        """Whether each session starts from the same state for certain: every server runs in a
        sandbox that keeps nothing."""

    def keep_sessions(self) -> None:
        """Later sessions with equal world and seed are one session, which stays open until
        `close`. For calls that change nothing: starting a server takes longer than calling it."""
        self._keeps_sessions = True

    @asynccontextmanager
    async def open(self, world: int, seed: int = 0) -> AsyncIterator[AttemptTools]:
        """Opens a session like that of an attempt at a task in that world, with the seed of this
        session."""
        if not self._keeps_sessions:
            async with self._session(world, seed) as tools:
                yield tools
            return

        async with self._opening:
            if (world, seed) not in self._kept_sessions:
                session = self._session(world, seed)
                self._kept_sessions[world, seed] = await self._stack.enter_async_context(session)
        yield self._kept_sessions[world, seed]

    def _session(self, world: int, seed: int) -> AbstractAsyncContextManager[AttemptTools]:
        task = Task(id=f"making-{world}", metadata={"world": world})
        return self._toolbox.open(task, seed=seed)

    async def close(self) -> None:
        """Closes kept sessions and everything that the sessions share."""
        await self._stack.aclose()
        await self._toolbox.close()


async def call_all(
    tools: AttemptTools, calls: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[CallResult]:
    """Makes real calls of these tools with these arguments, one after the other."""
    return [await call_tool(tools, tool, arguments) for tool, arguments in calls]


async def call_tool(tools: AttemptTools, tool: str, arguments: Mapping[str, Any]) -> CallResult:
    """Makes a real call."""
    call = StateCheck(tool=tool, arguments=dict(arguments), result="").call()
    before = dict(tools.metrics)
    started = time.monotonic()
    (result,) = await tools.call([call])
    rose = {name for name, count in tools.metrics.items() if count > before.get(name, 0)}

    return CallResult(
        tool=tool,
        arguments=dict(arguments),
        text=result.text,
        is_error=result.is_error or bool(_ERROR_PREFIX.match(result.text)),
        is_refused=bool(rose.intersection(REFUSAL_FACTS)),
        is_lost=bool(rose.intersection(UNANSWERED)),
        wall_s=time.monotonic() - started,
    )
