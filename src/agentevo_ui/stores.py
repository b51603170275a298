"""The stores of the shown runs. A store is opened once for all pages, read-only, and closed after
IDLE_S without a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from agentevo.errors import AgentEvoError
from agentevo.runs.folder.sources import RunSource, Sources
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runtime.event_loop import in_thread
from agentevo.store import Store

CALL_S = 10.0
"""The deadline of each call, in seconds. After it, the page shows an error."""
OPENING_S = 5.0
IDLE_S = 60.0


class _OpenedStore:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.used_at = time.monotonic()
        self.num_users = 0


class Stores:
    """The open stores of a dashboard. Used only from the dashboard's event loop."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._opened: dict[str, _OpenedStore] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._sweep_task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def reading(self, source: RunSource) -> AsyncIterator[Store]:
        """The run's store, for reading. If it can't be opened, raises AgentEvoError with a remedy:
        ConfigError, StoreError or a subclass of these."""
        url = await in_thread(self._sources.store_url, source)
        async with self._locks.setdefault(url, asyncio.Lock()):
            opened = self._opened.get(url)
            if opened is None:
                store = await open_run_store(
                    url,
                    create=False,
                    timeout_s=CALL_S,
                    within_s=OPENING_S,
                    notify=lambda _: None,
                    remedy="start the database, and load this page again",
                    read_only=True,
                )
                opened = self._opened[url] = _OpenedStore(store)

            opened.num_users += 1

        if self._sweep_task is None:
            self._sweep_task = asyncio.ensure_future(self._sweep())

        try:
            yield opened.store
        finally:
            opened.num_users -= 1
            opened.used_at = time.monotonic()

    async def _sweep(self) -> None:
        """Closes the stores that are no longer used."""
        while True:
            await asyncio.sleep(IDLE_S / 4)
            for url, opened in list(self._opened.items()):
                if not opened.num_users and time.monotonic() - opened.used_at > IDLE_S:
                    del self._opened[url]
                    with suppress(AgentEvoError, OSError):
                        await opened.store.close()

    async def close(self) -> None:
        """Closes all stores."""
        if self._sweep_task is not None:
            self._sweep_task.cancel()
        for opened in self._opened.values():
            with suppress(AgentEvoError, OSError):
                await opened.store.close()
        self._opened.clear()
