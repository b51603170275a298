"""A world on a thread of its own, so that one that hangs costs its attempt and nobody else.

A quick call is waited for on the spot: nothing else happens meanwhile, as if there were no thread, and the order of events, on which the
engine's batches depend, stays the same in every run. A call that takes longer than GRACE_S is awaited, with everything else going on, until
it answers or whoever waits is cancelled. All calls of a world come from the same thread, which some insist on. A thread can't be killed:
one that never answers stays until the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 0.05
"""Worlds that are slower than this play at the same time."""


class WorldThread:
    """See the module."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pending: Future[Any] | None = None
        threading.Thread(target=self._work, name="world", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """What the function returns or raises."""
        answer: Future[T] = Future()
        self._pending = answer
        self._calls.put((answer, function))
        try:
            answer.exception(timeout=GRACE_S)
        except TimeoutError:
            await asyncio.wait([asyncio.wrap_future(answer)])
        return answer.result()

    async def end(self, close: Callable[[], None]) -> None:
        """`close` is the last call. Not waited for while another one hangs."""
        if self._pending is None or self._pending.done():
            await self.call(close)
        else:
            self._calls.put((Future(), close))
        self._calls.put(None)

    def _work(self) -> None:
        while (wanted := self._calls.get()) is not None:
            answer, function = wanted
            answer.set_running_or_notify_cancel()
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 (handed to whoever waits)
                answer.set_exception(error)
