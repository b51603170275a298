"""The folder in which the engines of a run announce themselves. Each engine updates its
announcement every second to show that it is alive.

An announcement is a file `NAME.json`, and its heartbeat is the file's modification time. A reader
notices when this time changes, and measures the interval with its own monotonic clock. Clocks that
jump or differ between machines therefore don't make an engine look dead or alive. Only a file that
a reader sees for the first time is judged by its age.

A name belongs to one living engine, which holds a lock on `.NAME.lock`. The lock ends with its
process, so the name is free as soon as the engine is killed. If the file system loses locks, an
engine does not replace another engine's announcement as long as that one has heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from agentevo.errors import ConfigError
from agentevo.inference.serving import certificate, secret
from agentevo.inference.serving.address import EngineAddress
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import write_atomic

HEARTBEAT_S = 1.0
DEAD_S = 15.0
"""Another engine with our name counts as dead if it had no heartbeat for this long."""
ENDING_S = 5.0
"""How long an engine waits for its name. The engine that holds the name may be about to end."""
FORGET_S = 3600.0
"""Announcements that have been dead for this long are deleted by the next engine that starts."""
LOCK = ".lock"


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's announcement."""

    url: str
    name: str
    pid: int
    started_at: float
    """Unix time in seconds."""
    certificate: str = ""
    """SHA-256 of the certificate that the engine shows; empty if it does not encrypt."""
    version: int | None = None
    """The version of the weights that it served at its last heartbeat; None if it does not report
    one. It is for observers only. Clients ask the engine itself."""

    def is_of_same(self, announcement: Announcement | None) -> bool:
        """Whether the same process wrote both announcements."""
        return announcement is not None and self == msgspec.structs.replace(
            announcement, version=self.version
        )

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.url, self.certificate)


class EngineDirectory:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, tuple[int, float]] = {}
        """Name -> (the file's last known modification time, our monotonic time when we first saw
        it)."""
        self._others: tuple[int, float] | None = None
        """The same pair for an announcement that another engine wrote under our name."""

    @contextmanager
    def hold_name(self, name: str) -> Iterator[None]:
        """Holds the name for this process while the block runs. Raises ConfigError if another
        engine keeps it for longer than ENDING_S."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self._lock(name)
        lock = FileLock(file)
        try:
            lock.acquire(timeout=ENDING_S)
        except Timeout:
            raise ConfigError(
                f"{self.folder}: an engine named {name} is running: give another --name, or stop "
                "that one first"
            ) from None

        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # as long as this process holds it
            lock.release()

    def announce(self, announcement: Announcement) -> None:
        """Writes the announcement, and replaces one that an earlier engine with this name left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file(announcement.name), msgspec.json.encode(announcement))

    def beat(self, announcement: Announcement) -> None:
        """Renews the heartbeat. Writes the announcement again if the file was deleted, or if
        another engine replaced it and is dead now."""
        file = self._file(announcement.name)
        announced = self._read(file)
        if announced == announcement:
            os.utime(file)
        elif announced is None or announcement.is_of_same(announced) or self._other_is_dead(file):
            self.announce(announcement)

    def find(self, name: str) -> Announcement | None:
        """The announcement of the last engine with that name, dead or alive."""
        return self._read(self._file(name))

    def withdraw(self, announcement: Announcement) -> None:
        """Deletes the caller's own announcement, not that of a later engine of the same name."""
        if announcement.is_of_same(self.find(announcement.name)):
            self._file(announcement.name).unlink(missing_ok=True)

    def forget_dead(self, mine: Announcement, *, after_s: float = FORGET_S) -> None:
        """Deletes files that have not changed for `after_s` before `mine` was announced, by the
        clock of the files. An engine that is still alive writes its announcement again with its
        next heartbeat, and keeps its name."""
        with suppress(OSError):  # the files are only leftovers
            now = self._file(mine.name).stat().st_mtime
            for file in self.folder.iterdir():
                if file.name in (secret.NAME, certificate.NAME):
                    continue

                with suppress(FileNotFoundError, Timeout):
                    if now - file.stat().st_mtime <= after_s:
                        continue
                    if file.suffix == LOCK:
                        with FileLock(file, timeout=0):
                            file.unlink()
                    else:
                        file.unlink()

    @asynccontextmanager
    async def keep_announced(
        self,
        announcement: Announcement,
        *,
        serves: Callable[[], int | None] = lambda: None,
        every_s: float = HEARTBEAT_S,
    ) -> AsyncIterator[None]:
        """Keeps the engine announced while the block runs, with a heartbeat from this event loop,
        so that a hanging loop does not appear alive. `serves` returns the version of its weights,
        which each heartbeat reports."""

        def now() -> Announcement:
            return msgspec.structs.replace(announcement, version=serves())

        async def beat() -> None:
            while True:
                await asyncio.sleep(every_s)
                with suppress(
                    OSError
                ):  # a file system that is briefly unavailable; the next heartbeat follows
                    self.beat(now())

        self.announce(now())
        self.forget_dead(announcement)

        heart = asyncio.create_task(beat())
        try:
            yield
        finally:
            heart.cancel()
            self.withdraw(announcement)

    def living(self, max_age_s: float) -> list[Announcement]:
        """Engines with a heartbeat within `max_age_s`, by name."""
        living: list[Announcement] = []
        beats: dict[str, tuple[int, float]] = {}
        for file in sorted(self.folder.glob("*.json")):
            announcement = self._read(file)
            beaten = self._last_beat(file)
            if announcement is None or beaten is None:
                continue  # withdrawn while we looked
            beats[file.name] = beaten
            if time.monotonic() - beaten[1] <= max_age_s:
                living.append(announcement)

        self._seen = beats
        return living

    def _last_beat(self, file: Path) -> tuple[int, float] | None:
        """The file's modification time in ns, and the monotonic time in s at which this process
        first saw that value."""
        try:
            changed = file.stat().st_mtime_ns
        except FileNotFoundError:
            return None

        before = self._seen.get(file.name)
        if before is None:
            return changed, time.monotonic() - abs(time.time() - changed / 1e9)
        return before if before[0] == changed else (changed, time.monotonic())

    def _other_is_dead(self, file: Path) -> bool:
        """Whether the engine that wrote its announcement under our name has had no heartbeat for
        DEAD_S while this process watched."""
        changed = file.stat().st_mtime_ns
        if self._others is None or self._others[0] != changed:
            self._others = (changed, time.monotonic())
        return time.monotonic() - self._others[1] > DEAD_S

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}{LOCK}"

    @staticmethod
    def _read(file: Path) -> Announcement | None:
        """The announcement in the file; None if no engine wrote the file."""
        try:
            return decode_json(file.read_bytes(), Announcement)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
