"""An event loop on a separate thread, for foreign code that may block it.

All attempts of a world share the loop, because the objects that they share (clients, locks) belong
to a single loop. Blocking code delays only these attempts. If the loop does not respond after an
attempt was cancelled, the loop is abandoned with the attempts that wait for it. Later attempts get
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
ANSWER_S = 2.0
"""A loop that has not answered for this time, in seconds, is blocked."""


class DedicatedLoop:
    """A loop for foreign code. `name` is the name of its threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_abandoned = 0

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs the coroutine on that loop, and returns its result or raises its exception. If the
        caller is cancelled, the coroutine is cancelled too. Raises EnvironmentFailure if too many
        loops are blocked."""
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(_guard(work), loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not await _answers(loop) and self._loop is loop:
                self._loop = None
                self._num_abandoned += 1
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            if self._num_abandoned >= MAX_ABANDONED:
                raise EnvironmentFailure(
                    f"{self._name} has blocked its event loop {self._num_abandoned} times: give "
                    "each "
                    f"wait in its functions a deadline, and restart this process"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()

        return self._loop


async def _guard(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Raises OverreachError for SystemExit and KeyboardInterrupt, which would end the loop of all
    attempts."""
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:
        raise OverreachError(error, "an environment") from error


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answer: Future[None] = Future()
    loop.call_soon_threadsafe(answer.set_result, None)
    done, _ = await asyncio.wait([asyncio.wrap_future(answer)], timeout=ANSWER_S)
    return bool(done)
