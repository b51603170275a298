"""Caches the results of calls that change nothing: equal calls of all attempts in a process run
once.

An equal call that arrives while the first one runs waits for it. A failed call is not cached: the
next waiter repeats it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from agentevo.agents.tools.tool import ToolResult

MAX_CHARS = 2**26
"""The limit on the characters of all cached results; the oldest results are dropped first."""


class ResultCache:
    """See the module."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self.hits = 0
        self._max_chars = max_chars
        self._num_chars = 0
        self._results: OrderedDict[Hashable, ToolResult] = OrderedDict()
        self._running: dict[Hashable, asyncio.Event] = {}

    async def get(self, key: Hashable, make: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The cached result of an equal call, or the result of `make`. Raises the errors of
        `make`."""
        while (done_event := self._running.get(key)) is not None:
            await done_event.wait()

        if key in self._results:
            self.hits += 1
            self._results.move_to_end(key)
            return self._results[key]

        done_event = self._running[key] = asyncio.Event()
        try:
            result = await make()
            if not result.is_error:
                self._keep(key, result)
            return result
        finally:
            del self._running[key]
            done_event.set()

    def _keep(self, key: Hashable, result: ToolResult) -> None:
        if len(result.text) > self._max_chars:
            return
        self._results[key] = result
        self._num_chars += len(result.text)
        while self._num_chars > self._max_chars:
            _, oldest = self._results.popitem(last=False)
            self._num_chars -= len(oldest.text)
