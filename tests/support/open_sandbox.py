"""A sandbox for tests that are not coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import TypeVar

from agentevo.environments.sandbox import Sandbox, Sandboxes, SandboxTool
from agentevo.environments.sandbox.section import SandboxSection

T = TypeVar("T")


class OpenSandbox:
    """A sandbox on an event loop that lives as long as it does."""

    def __init__(self, section: SandboxSection, tools: Mapping[str, SandboxTool]) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        opening = self._stack.enter_async_context(Sandboxes(section).open(tools))
        self.sandbox: Sandbox = self._runner.run(opening)

    def __call__(self, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        async def used() -> T:
            async with asyncio.timeout(300):
                return await use(self.sandbox)

        return self._runner.run(used())

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()
