"""Updates the index of a store while a dashboard is open, in a separate thread.

Of all processes that have the store open, the process with the lock of the index writes it. When
that process ends, another one gets the lock. The indexer updates at most once in EVERY_S seconds,
and then rests ten times as long as the update took (at most REST_S seconds), for any number of
viewers. While the run is active, the indexer reads turns for as long as it rested. Afterwards, it
reads them without a rest. If the store is unreachable, the indexer waits. An unreadable index is
rebuilt, with a message.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from agentevo.errors import AgentEvoError
from agentevo.runs.folder.store_opening import open_run_store
from agentevo.runtime.event_loop import in_thread
from agentevo_ui.index.advantages import Rule, config_of, rewards_of, rule_of
from agentevo_ui.index.database import cache_file, connect, is_usable, make
from agentevo_ui.index.follow import StoreFollower
from agentevo_ui.index.writer import IndexWriter

EVERY_S = 1.0
REST_S = 10.0
"""The longest rest, in seconds. The first update for a million rows takes minutes, and rows that
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
NICENESS = 10


class Indexer:
    """Updates the index of a store. `folder`: the run's folder, if there is one. It says how
    advantages are computed."""

    def __init__(self, url: str, folder: Path | None = None, *, every_s: float = EVERY_S) -> None:
        self.url = url
        self.path = cache_file(url)
        self._folder = folder
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.trouble = ""
        """The problem that stops the indexer, in words. Empty if there is none."""

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dashboard-index", daemon=True)
            self._thread.start()

    def stop(self, within_s: float = 30.0) -> None:
        """Ends after the work in progress, which is never left incomplete."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # applies only to this thread, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

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
            asyncio.run(self._keep())

    async def _keep(self) -> None:
        config = await in_thread(config_of, self._folder)
        with closing(connect(self.path)) as connection:
            writer = IndexWriter(connection, rewards_of(config))
            async with await open_run_store(
                self.url,
                create=False,
                within_s=RETRY_S,
                notify=lambda line: None,
                read_only=True,
            ) as store:
                follower = StoreFollower(store, connection, writer, _progress_writer(writer))
                await self._follow(follower, writer, _Rules(writer, config), _inode(self.url))

    async def _follow(
        self, follower: StoreFollower, writer: IndexWriter, rules: _Rules, inode: int | None
    ) -> None:
        """Runs until it is stopped, or the store's file is replaced."""
        compared = float("-inf")
        while not self._stop.is_set() and _inode(self.url) == inode:
            started = time.monotonic()
            due = started - compared > COMPARE_EVERY_S
            await follower.refresh(compare=due)
            compared = started if due else compared
            took = time.monotonic() - started
            self.trouble = ""
            unread = follower.num_unread()
            phase = "reading" if unread else ""
            writer.set_facts(phase=phase, done=0, of=unread, listed_at=time.time())

            rest_until = time.monotonic() + min(max(self._every_s, 10 * took), REST_S)
            while time.monotonic() < rest_until and not self._stop.is_set():
                if not await self._read_for_a_while(follower, rules):
                    if unread:
                        break  # the next update reports that everything is read
                    await self._sleep(min(0.2, max(0.0, rest_until - time.monotonic())))

    async def _read_for_a_while(self, follower: StoreFollower, rules: _Rules) -> bool:
        """Whether there was anything to read."""
        started = time.monotonic()
        while time.monotonic() - started < SLICE_S and not self._stop.is_set():
            has_read = await follower.read_some() > 0 or await follower.move_some(self._folder)
            if not has_read and follower.has_steps_to_value():
                rule = await rules.get()
                has_read = isinstance(rule, Rule) and await follower.value_some(rule)
            if not has_read:
                return False

        if time.time() - follower.newest_written_at() < LIVE_S:
            await self._sleep(time.monotonic() - started)

        return True

    async def _sleep(self, seconds: float) -> None:
        """Waits for that time, or until the indexer is stopped."""
        until = time.monotonic() + seconds
        while (remaining := until - time.monotonic()) > 0 and not self._stop.is_set():
            await asyncio.sleep(min(remaining, 0.1))


class _Rules:
    """The rule of advantages. It is read when the first step needs it, because that imports
    torch."""

    def __init__(self, writer: IndexWriter, config: dict[str, Any]) -> None:
        self._writer = writer
        self._config = config
        self._rule: Rule | str | None = None

    async def get(self) -> Rule | str:
        """The rule, or why there are no advantages."""
        if self._rule is None:
            self._rule = "the run's folder, which says how they are computed, is not here"
            if self._config:
                self._rule = await in_thread(rule_of, self._config)
            why = self._rule if isinstance(self._rule, str) else ""
            self._writer.set_facts(no_advantages=why)
        return self._rule


def _progress_writer(writer: IndexWriter) -> Callable[[str, int, int], None]:
    """Writes the progress into the file, twice a second."""
    last = 0.0

    def tell(phase: str, done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            writer.set_facts(phase=phase, done=done, of=of)
            last = time.monotonic()

    return tell


def _inode(url: str) -> int | None:
    """The identity of a store's file, which changes if the run starts again."""
    scheme, _, path = url.partition(":///")
    if scheme != "sqlite":
        return None
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None
