"""Retries calls of a store whose database is unavailable. Every call may be repeated, so a service
repeats it until a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentevo.errors import DeadlineExceededError, StoreUnavailableError
from agentevo.runtime.console import to_stderr

T = TypeVar("T")

STORE_RETRY_S = 600.0
"""The time in seconds that a run's processes wait for an unavailable database before they fail."""
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
SILENT_S = 5.0
"""A call that has neither answered nor failed for this time, in seconds, is reported."""
REPORT_INTERVAL_S = 15.0
"""The time between two reports, in seconds."""


async def with_retries(
    call: Callable[[], Awaitable[T]],
    *,
    within_s: float = STORE_RETRY_S,
    what: str,
    notify: Callable[[str], None] = to_stderr,
) -> T:
    """Awaits `call()` repeatedly while the store can't be reached or is too slow, with pauses that
    double from FIRST_PAUSE_S to MAX_PAUSE_S. Refusals are raised at once. An error that remains
    after `within_s` seconds is raised as StoreUnavailableError.

    `notify` receives a line with the name of the call, the reason of the wait and the time at which
    it ends. The first line comes at the first failure or after SILENT_S seconds, the next ones
    every REPORT_INTERVAL_S seconds, and the last one when the wait is over. Of calls of one name
    that wait at the same time, one is reported."""
    ends = time.monotonic() + within_s
    pause = FIRST_PAUSE_S
    reporter = _Reporter(what, within_s, notify)
    try:
        while True:
            try:
                result = await call()
            except (StoreUnavailableError, DeadlineExceededError) as error:
                if time.monotonic() + pause >= ends:
                    raise StoreUnavailableError(
                        f"{what}: stopped trying after {within_s:g} s: {error}"
                    ) from error
                reporter.note_failure(error)
            else:
                reporter.over()
                return result

            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)
    finally:
        reporter.stop()


_reported: dict[tuple[Callable[[str], None], str], _Reporter] = {}
"""Of each name of a call, the wait that is reported."""


class _Reporter:
    """Reports the wait from time to time, from its creation until `stop`, while the event loop
    continues."""

    def __init__(self, what: str, within_s: float, notify: Callable[[str], None]) -> None:
        self._what = what
        self._notify = notify
        self._key = (notify, what)
        self._begun = time.monotonic()
        self._until = time.strftime("%H:%M:%S", time.localtime(time.time() + within_s))
        self._why = "no answer yet"
        self._failed = False
        self._next = asyncio.get_running_loop().call_later(SILENT_S, self._report)

    def note_failure(self, error: Exception) -> None:
        self._why = str(error)
        if not self._failed:
            self._failed = True
            self._next.cancel()
            self._report()

    def over(self) -> None:
        if _reported.get(self._key) is self:
            self._notify(f"{self._what}: done after {time.monotonic() - self._begun:.0f} s")

    def stop(self) -> None:
        self._next.cancel()
        if _reported.get(self._key) is self:
            del _reported[self._key]

    def _report(self) -> None:
        if _reported.setdefault(self._key, self) is self:
            self._notify(f"{self._what}: waiting until {self._until}: {self._why}")
        self._next = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report)
