"""The state of each run, kept up to date while a page shows it.

A single task reads a run's files, for any number of pages. It reads when a page requests a run that
was not read within FRESH_S seconds, and every POLL_S seconds while pages are subscribed to the run.
Reading happens in threads, in pieces, so a large file does not delay other work. Without viewers,
nothing is read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress

from agentevo.runs.folder.run_state import RunReader, RunView
from agentevo.runs.folder.sources import RunSource, Sources
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.store_reader import StoreReader
from agentevo_ui.stores import Stores

POLL_S = 0.5
NEWS_INTERVAL_S = 2.0
FRESH_S = 0.4
FIRST_S = 1.5
"""The time in seconds that a list waits for the first reading of runs."""
MAX_KEYS = 1000
"""The maximum number of runs that a stream follows, including later ones."""
MAX_READERS = 1000
"""The maximum number of runs that are remembered while no page shows them."""


LIST = "*"
"""Replaces a run's key: the list of runs. No key contains this character."""
SCAN_REST = 10.0
"""The rest after a search for new runs, as a multiple of the time that the search took."""


class UnknownRunError(Exception):
    """No run has that key any more, or ever had it."""


class Watcher:
    """Watches the runs of a dashboard. It belongs to the dashboard's event loop."""

    def __init__(self, sources: Sources, stores: Stores) -> None:
        self.sources = sources
        self._stores = stores
        self._readers: dict[str, _WatchedSource] = {}
        self._next = asyncio.Event()
        """Set, and replaced, at the next change."""
        self._num_changes = 0
        self.events: dict[str, tuple[RunView, bytes]] = {}
        """The event that live.py has made of a run's newest view."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._viewers: dict[str, int] = {}
        self._listed: frozenset[str] = frozenset()
        self._list_version = 0
        self.is_closed = False
        self.num_streams = 0
        """The number of open streams of news (live.py)."""

    async def source(self, key: str) -> RunSource:
        """Raises UnknownRunError."""
        runs = await in_thread(self.sources.runs)
        if key not in runs:
            raise UnknownRunError(key)
        return runs[key]

    async def view(self, key: str) -> RunView:
        """The current state of a run. Raises UnknownRunError."""
        return await self._watch(await self.source(key)).fresh()

    async def views(self) -> list[RunView]:
        """The views of all runs. Runs that can't be read within FIRST_S seconds come without
        numbers."""
        runs = await in_thread(self.sources.runs)
        self._list(runs)
        watched = [self._watch(source) for source in runs.values()]
        tasks = [asyncio.ensure_future(watched_source.fresh()) for watched_source in watched]
        if tasks:
            await asyncio.wait(tasks, timeout=FIRST_S)

        return [
            task.result()
            if task.done() and task.exception() is None
            else watched_source.reader.view
            for task, watched_source in zip(tasks, watched, strict=True)
        ]

    def version(self, key: str) -> int:
        """The version of a run's view, or of the list of runs. 0 if nothing is known."""
        if key == LIST:
            return self._list_version
        watched = self._readers.get(key)
        return watched.reader.view.version if watched else 0

    def known(self, key: str | None) -> tuple[int, int]:
        """A value that changes with the known state of the run. Without a key, with that of any
        run."""
        if key is None:
            return self._list_version, self._num_changes
        return 0, self.version(key)

    def _watch(self, source: RunSource) -> _WatchedSource:
        watched = self._readers.pop(source.key, None)
        if watched is None or watched.reader.view.source != source:
            reader: StoreReader | RunReader = (
                StoreReader(source, self._stores) if source.folder is None else RunReader(source)
            )
            watched = _WatchedSource(reader, self._on_change)

        self._readers[source.key] = watched  # the newest last
        for key in list(self._readers)[: max(len(self._readers) - MAX_READERS, 0)]:
            if key not in self._viewers:
                del self._readers[key]
                self.events.pop(key, None)

        return watched

    def _list(self, runs: Iterable[str]) -> bool:
        """Whether the list of runs has changed."""
        keys = frozenset(runs)
        if keys == self._listed and self._list_version:
            return False
        self._listed = keys
        self._list_version += 1
        return True

    async def news(self, keys: Sequence[str]) -> AsyncIterator[RunView | int | None]:
        """Yields the changed views of these runs, and all known views first. If LIST is among the
        keys, also yields the version of the list of runs as a number, and follows later runs too.
        Yields None at least every NEWS_INTERVAL_S seconds, so that the listener gets control. Ends
        with the dashboard."""
        sent: dict[str, tuple[int, int]] = {}
        keys = list(keys)
        had = self._listed
        listed = -1
        self._count_viewers(keys, 1)

        try:
            while not self.is_closed:
                changed = self._next  # later changes are not missed
                if LIST in keys and listed != self._list_version:
                    listed = self._list_version
                    later = sorted(self._listed - had - set(keys))[: max(MAX_KEYS - len(keys), 0)]
                    self._count_viewers(later, 1)
                    keys += later
                    yield listed

                for key in keys:
                    watched = self._readers.get(key)
                    if watched is None:
                        continue
                    view = watched.reader.view
                    if view.version and sent.get(key) != _shown_state(view):
                        sent[key] = _shown_state(view)
                        yield view

                yield None
                with suppress(TimeoutError):
                    async with asyncio.timeout(NEWS_INTERVAL_S):
                        await changed.wait()
        finally:
            self._count_viewers(keys, -1)

    def _count_viewers(self, keys: Iterable[str], by: int) -> None:
        """Adds a number of viewers."""
        for key in set(keys):
            viewers = self._viewers.get(key, 0) + by
            if viewers > 0:
                self._viewers[key] = viewers
                if key not in self._tasks:
                    follow = self._follow_list() if key == LIST else self._follow(key)
                    self._tasks[key] = asyncio.ensure_future(follow)
            else:
                self._viewers.pop(key, None)
                task = self._tasks.pop(key, None)
                if task is not None:
                    task.cancel()

    async def _follow(self, key: str) -> None:
        """Reads a run every POLL_S seconds."""
        while not self.is_closed:
            with suppress(UnknownRunError):
                await self.view(key)
            await asyncio.sleep(POLL_S)

    async def _follow_list(self) -> None:
        """Searches for new runs until the watcher is closed."""
        while not self.is_closed:
            started = time.monotonic()
            if self._list(await in_thread(self.sources.runs)):
                self._wake()
            await asyncio.sleep(max(POLL_S, SCAN_REST * (time.monotonic() - started)))

    async def close(self) -> None:
        """Ends all reading, and every stream of news."""
        self.is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._wake()

    def _on_change(self, before: RunView, after: RunView) -> None:
        """Records that a run was read."""
        self._num_changes += before.version != after.version
        if _shown_state(before) != _shown_state(after):
            self._wake()

    def _wake(self) -> None:
        """Wakes all tasks that wait for news."""
        event = self._next
        self._next = asyncio.Event()
        event.set()


def _shown_state(view: RunView) -> tuple[int, int]:
    return view.version, view.beat


class _WatchedSource:
    """A run, which only one caller at a time reads."""

    def __init__(
        self, reader: RunReader | StoreReader, on_change: Callable[[RunView, RunView], None]
    ) -> None:
        """`on_change` is called with the view before a reading and the view after it."""
        self.reader = reader
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._read_at = -FRESH_S

    async def fresh(self) -> RunView:
        """The view, at most FRESH_S seconds old."""
        async with self._lock:
            if time.monotonic() - self._read_at >= FRESH_S:
                before = self.reader.view
                if isinstance(self.reader, StoreReader):
                    await self.reader.read()
                else:
                    await in_thread(self.reader.read)
                self._read_at = time.monotonic()
                self._on_change(before, self.reader.view)

        return self.reader.view
