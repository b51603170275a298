"""Where the engines of a run are: a folder in which each announces itself and shows every second that it lives.

An announcement is `NAME.json`; its heartbeat is the file's time of change. A reader believes changes of that time, counted by its own
monotonic clock, so clocks that jump or differ between machines don't make an engine dead or alive; only a file that a reader has never
seen before is judged by its age.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from agentevo.inference import secret

HEARTBEAT_S = 1.0
FORGET_S = 3600.0
"""What has been dead for so long is deleted by the next engine that starts."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself."""

    url: str
    name: str
    pid: int
    started_at: float
    """Unix time in seconds."""


class EngineDirectory:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen: dict[str, tuple[int, float]] = {}
        """Name -> (time of change as last seen, our clock when it came to be that)."""

    def announce(self, announcement: Announcement) -> None:
        """From now on readers find it; replaces what an earlier engine of that name has left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        staging = self.folder / f".{announcement.name}.{uuid.uuid4().hex[:8]}"
        staging.write_bytes(msgspec.json.encode(announcement))
        os.replace(staging, self._file(announcement.name))

    def beat(self, announcement: Announcement) -> None:
        """It lives. Announces it again if somebody has deleted the file."""
        try:
            os.utime(self._file(announcement.name))
        except FileNotFoundError:
            self.announce(announcement)

    def withdraw(self, announcement: Announcement) -> None:
        """Takes back one's own announcement, not that of a later engine of the same name."""
        if self._read(self._file(announcement.name)) == announcement:
            self._file(announcement.name).unlink(missing_ok=True)

    def forget_dead(self, mine: Announcement, *, after_s: float = FORGET_S) -> None:
        """Deletes what has not changed for `after_s` before `mine` was announced, by the clock of the files. An engine that lives after all
        announces itself again with its next beat."""
        with suppress(OSError):  # nothing depends on it
            now = self._file(mine.name).stat().st_mtime
            for file in self.folder.iterdir():
                if file.name == secret.NAME:
                    continue
                with suppress(FileNotFoundError):
                    if now - file.stat().st_mtime > after_s:
                        file.unlink()

    @asynccontextmanager
    async def announced(self, announcement: Announcement, *, every_s: float = HEARTBEAT_S) -> AsyncIterator[None]:
        """Announced with a heartbeat from this event loop while the block runs: a loop that hangs is not taken for alive."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(every_s)
                with suppress(OSError):  # a file system that is away for a moment: the next beat tells
                    self.beat(announcement)

        self.announce(announcement)
        self.forget_dead(announcement)
        heart = asyncio.create_task(beat())
        try:
            yield
        finally:
            heart.cancel()
            self.withdraw(announcement)

    def living(self, max_age_s: float) -> list[Announcement]:
        """Engines whose heart has beaten within `max_age_s`, by name."""
        found: list[Announcement] = []
        seen: dict[str, tuple[int, float]] = {}
        for file in sorted(self.folder.glob("*.json")):
            announcement = self._read(file)
            beaten = self._last_beat(file)
            if announcement is None or beaten is None:
                continue  # withdrawn while we looked
            seen[file.name] = beaten
            if time.monotonic() - beaten[1] <= max_age_s:
                found.append(announcement)
        self._seen = seen
        return found

    def _last_beat(self, file: Path) -> tuple[int, float] | None:
        """(the file's time of change in ns, the monotonic time in s at which it came to be that)."""
        try:
            changed = file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        before = self._seen.get(file.name)
        if before is None:
            return changed, time.monotonic() - abs(time.time() - changed / 1e9)
        return before if before[0] == changed else (changed, time.monotonic())

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    @staticmethod
    def _read(file: Path) -> Announcement | None:
        """None where there is nothing, or nothing that an engine has written."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=Announcement)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
