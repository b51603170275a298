"""Confirmations, each of which is good for one time, however often its form is sent.

A page asks (`asked`), its form confirms (`once`). What comes a second time, by a double click or by
a browser that sends it again, meanwhile or later, gets what the first one has come to. Of more than
MOST the oldest are forgotten, whether they were used or not: such a one is asked again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

MOST = 2_000


class Confirmations:
    """See the module. Belongs to the dashboard's event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, asyncio.Task[str] | None] = OrderedDict()

    def remember_seal(self, seal: str) -> None:
        """A page asks for this confirmation."""
        self._known.setdefault(seal, None)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def is_asked(self, seal: str) -> bool:
        """Whether a page has asked for it."""
        return seal in self._known

    async def once(self, seal: str, work: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """What `work` returns, or raises; it is called for the first only, and goes on if that
        visitor is gone. It has deadlines of its own."""
        task = self._known.get(seal)
        if task is None:
            task = self._known[seal] = asyncio.ensure_future(work())
        return await asyncio.shield(task)
