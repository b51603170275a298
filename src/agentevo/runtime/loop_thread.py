"""An event loop on a separate thread, for foreign code that may block it.

All attempts in one environment share the loop, because their shared objects (clients, locks) belong
to a single loop. Blocking code delays only these attempts. If the loop does not respond after an
attempt was cancelled, the loop and its waiting attempts are abandoned. Later attempts get
a new loop, and a process tolerates MAX_ABANDONED abandoned loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from agentevo.errors import EnvironmentFailure, OverreachError

T = TypeVar("T")

MAX_ABANDONED = 20
RESPONSE_TIMEOUT_S = 2.0
"""The time in seconds after which a loop that has not responded is considered blocked."""


class DedicatedLoop:
    """A loop for foreign code. `name` is the name of its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_abandoned = 0

    async def run(self, make_coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine on the loop, and returns its result or raises its exception. If the
        caller is cancelled, so is the coroutine. Raises EnvironmentFailure if too many loops are
        blocked."""
        loop = self._ensure_loop()
        future = asyncio.run_coroutine_threadsafe(_guard(make_coroutine), loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not await _responds(loop) and self._loop is loop:
                self._loop = None
                self._num_abandoned += 1
            raise

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            if self._num_abandoned >= MAX_ABANDONED:
                raise EnvironmentFailure(
                    f"{self._name} has blocked its event loop {self._num_abandoned} times: give "
                    "each wait in its functions a deadline, and restart this process"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()

        return self._loop


async def _guard(make_coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Raises OverreachError for SystemExit and KeyboardInterrupt, which would end the loop of all
    attempts."""
    try:
        return await make_coroutine()
    except (SystemExit, KeyboardInterrupt) as error:
        raise OverreachError(error, "an environment") from error


async def _responds(loop: asyncio.AbstractEventLoop) -> bool:
    answer: Future[None] = Future()
    loop.call_soon_threadsafe(answer.set_result, None)
    done, _ = await asyncio.wait([asyncio.wrap_future(answer)], timeout=RESPONSE_TIMEOUT_S)
    return bool(done)
