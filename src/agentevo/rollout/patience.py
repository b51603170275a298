"""Waiting for a database that is away: every call of the store may be repeated, so a service repeats it until its patience ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentevo.errors import DeadlineExceededError, StoreUnavailableError

T = TypeVar("T")

PATIENCE_S = 600.0
"""How long a run's processes wait for a database that is away before they give up."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0


async def patiently(call: Callable[[], Awaitable[T]], *, within_s: float, what: str) -> T:
    """`await call()`, again and again while the store can't be reached or is too slow, with pauses that double from FIRST_PAUSE_S to
    LONGEST_PAUSE_S. Refusals are raised at once; what still fails after `within_s` seconds is raised as StoreUnavailableError."""
    ends, pause = time.monotonic() + within_s, FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except (StoreUnavailableError, DeadlineExceededError) as error:
            if time.monotonic() + pause >= ends:
                raise StoreUnavailableError(f"{what}: given up after {within_s:g} s: {error}") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
