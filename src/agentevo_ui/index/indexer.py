"""Updates the indexes of the shown stores while a dashboard is open, each in a thread of its own.

Of all processes that have the store open, the process with the lock of the index writes it. When
that process ends, another one gets the lock. The indexer updates at most once in EVERY_S seconds,
and then rests ten times as long as the update took (at most REST_S seconds), for any number of
viewers. While the run is active, the indexer reads turns for as long as it rested. Afterwards, it
reads them without a rest. If the store is unreachable, the indexer waits. An unreadable index is
rebuilt, with a message.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from agentevo.errors import AgentEvoError
from agentevo.runs.folder.store_opening import open_run_store
from agentevo_ui.index.database import cache_file, connect, is_usable, make
from agentevo_ui.index.follow import StoreFollower
from agentevo_ui.index.reader import IndexReader, IndexState, IndexUnavailableError

EVERY_S = 1.0
REST_S = 10.0
"""The longest rest, in seconds. The first update for a million rows takes a minute, and rows that
are committed during it should appear soon."""
COMPARE_EVERY_S = 120.0
"""The interval in seconds of comparisons of the rows' numbers, which take a second for a million
rows."""
RETRY_S = 5.0
"""The wait in seconds after a failure, and for the lock."""
SLICE_S = 0.5
"""The time in seconds for which it reads turns before it checks for new rows again."""
LIVE_S = 300.0
"""A run that wrote something within this time, in seconds, counts as active."""
IDLE_S = 600.0
"""After this many seconds without a page's request, an index is no longer updated."""


class Indexer:
    """Updates the index of a store. `folder`: the run's folder, if there is one. It says how
    advantages are computed."""

    def __init__(self, url: str, folder: Path | None = None, *, every_s: float = EVERY_S) -> None:
        self.url = url
        self.path = cache_file(url)
        self.reader = IndexReader(self.path)
        self.used_at = time.monotonic()
        self.trouble = ""
        """The problem that stops the indexer, in words. Empty if there is none."""
        self._folder = folder
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard-index", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float = 30.0) -> None:
        """Ends after the work in progress, which is never left incomplete."""
        self._stop.set()
        self._thread.join(within_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._with_lock()
            except Timeout:
                self._stop.wait(RETRY_S)
            except sqlite3.DatabaseError as error:
                self._note_damage(error)
            except (AgentEvoError, OSError) as error:
                self.trouble = str(error)
                self._stop.wait(RETRY_S)

    def _note_damage(self, error: sqlite3.DatabaseError) -> None:
        self.trouble = f"the index {self.path} could not be used ({error})"
        if isinstance(error, sqlite3.OperationalError):  # locked, or the disk is full
            self._stop.wait(RETRY_S)
        else:
            self.trouble += ": it is rebuilt"
            with suppress(AgentEvoError, Timeout), FileLock(self._lock_file(), timeout=RETRY_S):
                make(self.path)

    def _lock_file(self) -> Path:
        return self.path.with_suffix(".lock")

    def _with_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self._lock_file(), timeout=0.2):
            was_there = self.path.exists()
            if not is_usable(self.path):
                make(self.path)
                if was_there:
                    self.trouble = "the index could not be read: it is rebuilt"
            asyncio.run(self._follow())

    async def _follow(self) -> None:
        """Runs until it is stopped, or the store's file is replaced."""
        inode = _inode(self.url)
        compared = float("-inf")
        with closing(connect(self.path)) as connection:
            async with await open_run_store(
                self.url, create=False, within_s=RETRY_S, notify=lambda line: None, read_only=True
            ) as store:
                follower = StoreFollower(store, connection, self._folder)
                while not self._stop.is_set() and _inode(self.url) == inode:
                    started = time.monotonic()
                    is_due = started - compared > COMPARE_EVERY_S
                    await follower.refresh(compare=is_due)
                    compared = started if is_due else compared
                    took = time.monotonic() - started
                    self.trouble = ""
                    unread = follower.num_unread()
                    phase = "reading" if unread else ""
                    follower.set_facts(phase=phase, done=0, of=unread, listed_at=time.time())
                    rest_s = min(max(self._every_s, 10 * took), REST_S)
                    await self._read_turns(follower, time.monotonic() + rest_s, is_reading=unread)

    async def _read_turns(self, follower: StoreFollower, until: float, *, is_reading: int) -> None:
        """Reads turns and advantages until that time, and rests if there are none. `is_reading`:
        whether the index says that turns are unread. Then it ends when all are read."""
        while time.monotonic() < until and not self._stop.is_set():
            started = time.monotonic()
            has_read = True
            while has_read and time.monotonic() - started < SLICE_S and not self._stop.is_set():
                has_read = await follower.read_some() > 0 or await follower.value_some()

            if not has_read and is_reading:
                return
            if not has_read:
                await self._sleep(min(0.2, max(0.0, until - time.monotonic())))
            elif time.time() - follower.newest_written_at() < LIVE_S:
                await self._sleep(time.monotonic() - started)

    async def _sleep(self, seconds: float) -> None:
        """Waits for that time, or until the indexer is stopped."""
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0 and not self._stop.is_set():
            await asyncio.sleep(min(remaining, 0.1))


class Indexes:
    """The indexes of a dashboard, kept up to date while pages request them. Any thread may use
    them."""

    def __init__(self) -> None:
        self._indexers: dict[str, Indexer] = {}
        self._lock = threading.Lock()

    def reader(self, url: str, folder: Path | None) -> IndexReader:
        """The index of the store at `url`, which is kept up to date from now on."""
        with self._lock:
            for other_url, other in list(self._indexers.items()):
                if other_url != url and time.monotonic() - other.used_at > IDLE_S:
                    del self._indexers[other_url]
                    threading.Thread(target=other.stop, daemon=True).start()

            if url not in self._indexers:
                self._indexers[url] = Indexer(url, folder)
                self._indexers[url].start()

            self._indexers[url].used_at = time.monotonic()
            return self._indexers[url].reader

    def state(self, url: str) -> tuple[IndexState, str]:
        """The progress of the index, and the problem that stops it."""
        with self._lock:
            indexer = self._indexers.get(url)

        if indexer is None:
            return IndexState(), ""

        try:
            return indexer.reader.state(), indexer.trouble
        except IndexUnavailableError as error:
            return IndexState(), indexer.trouble or str(error)

    def close(self) -> None:
        """Ends all indexers. Blocks until they have ended."""
        with self._lock:
            indexers = list(self._indexers.values())
            self._indexers.clear()
        for indexer in indexers:
            indexer.stop(0.0)
        for indexer in indexers:
            indexer.stop(5.0)


def _inode(url: str) -> int | None:
    """The identity of a store's file, which changes if the run starts again."""
    scheme, _, path = url.partition(":///")
    if scheme != "sqlite":
        return None
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None
