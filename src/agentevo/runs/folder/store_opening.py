"""Opens a run's store, and waits if the database is unavailable for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from agentevo.errors import DeadlineExceededError, StoreUnavailableError
from agentevo.runtime.console import to_stderr
from agentevo.runtime.retry import FIRST_PAUSE_S, with_retries
from agentevo.store.opening import open_store
from agentevo.store.store import Store

OPEN_TIMEOUT_S = 60.0
"""The time in seconds to wait at the start for a database that does not answer. It may be starting,
or its URL is wrong."""


async def open_run_store(
    url: str,
    *,
    timeout_s: float | None = None,
    within_s: float | None = None,
    create: bool = True,
    remedy: str = "start the database, or correct store.url",
    notify: Callable[[str], None] = to_stderr,
    read_only: bool = False,
) -> Store:
    """Opens the store at `url`, with `timeout_s` or its own deadline for each later call. Waits for
    an unavailable database, and reports that. Raises StoreUnavailableError, with the remedy, after
    `within_s` seconds, or OPEN_TIMEOUT_S. `create` and `read_only` are those of `open_store`."""
    within_s = OPEN_TIMEOUT_S if within_s is None else within_s
    ends = time.monotonic() + within_s

    async def attempt() -> Store:
        remaining_s = max(ends - time.monotonic(), FIRST_PAUSE_S)
        try:
            async with asyncio.timeout(remaining_s):
                return await (
                    open_store(url, create=create, read_only=read_only)
                    if timeout_s is None
                    else open_store(url, create=create, timeout_s=timeout_s, read_only=read_only)
                )
        except TimeoutError as error:
            if isinstance(error, DeadlineExceededError):
                raise
            raise DeadlineExceededError(
                "its host does not answer, or another process holds its lock"
            ) from error

    try:
        return await with_retries(
            attempt, within_s=within_s, what="opening the store", notify=notify
        )
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{error}; {remedy}") from error
