"""Engines that announce themselves in the object store of the run's weights, for samplers that
share no folder with them: engines/NAME-URL.json under rollout.weights.url.

An announcement is signed with the run's secret. A writer that has access to the store but not the
secret therefore can't direct samplers, and the secret that they send, to its own machine. An
announcement is rewritten every BEAT_S. A reader relies on changes, timed by its own clock, and not
on timestamps. While the store is unreachable, the known engines stay known until it answers again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from agentevo.config import RunConfig
from agentevo.errors import EngineError
from agentevo.inference.serving.directory import FORGET_S, Announcement
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.weights.objects import Objects, state_of
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.event_loop import in_thread

LOG = logging.getLogger(__name__)

FOLDER = "engines"
RENEW_S = 5.0
POLL_INTERVAL_S = 2.0
DEAD_S = 60.0
"""An engine that has not renewed its announcement for this long counts as dead, unless the reader
has a connection to it."""
WITHDRAW_S = 5.0
"""How long an engine that shuts down waits for a write of its announcement to finish."""
MAX_ANNOUNCEMENTS = 4096
"""The maximum number of announcements of a run."""


class SignedAnnouncement(msgspec.Struct, frozen=True):
    """The content of an object under `engines/`."""

    announcement: Announcement
    at: float
    """Unix time in seconds by the writer's clock. Only `forget_dead` uses it."""
    mac: str
    """HMAC-SHA256 of `announcement` and `at` with the run's secret, in hexadecimal."""


class StoreAnnouncements:
    """The announcements in the object store. See the module. Methods that are not async block, and
    raise OSError."""

    def __init__(self, objects: Objects, secret: RunSecret) -> None:
        self._objects = objects
        self._secret = secret
        self._seen: dict[str, tuple[str, float, Announcement | None]] = {}
        """Name of an object -> (its state, the monotonic time when this process first saw that
        state, its announcement). The announcement is None if the object does not belong to this
        run."""
        self._warned = False

    def announce(self, announcement: Announcement) -> None:
        """Writes the announcement, and replaces this engine's earlier one."""
        at = time.time()
        signed = SignedAnnouncement(announcement, at, self._mac(announcement, at))
        self._objects.put(_path(announcement), msgspec.json.encode(signed))

    def withdraw(self, announcement: Announcement) -> None:
        """Deletes the announcement."""
        with suppress(FileNotFoundError):
            self._objects.delete(_path(announcement))

    def forget_dead(self, *, after_s: float = FORGET_S) -> None:
        """Deletes announcements older than `after_s`, by their writers' clocks. An engine that
        still runs writes its announcement again."""
        for name in self._objects.under(FOLDER):
            signed = self._read(name)
            if signed is not None and time.time() - signed.at > after_s:
                with suppress(FileNotFoundError):  # another engine has deleted it
                    self._objects.delete(f"{FOLDER}/{name}")

    def living(self) -> list[Announcement]:
        """The engines whose announcement changed within the last DEAD_S seconds, by this object's
        observations. Sorted by name."""
        entries = {}
        objects = self._objects.under(FOLDER)
        if len(objects) > MAX_ANNOUNCEMENTS:
            raise OSError(f"{self._objects.url}/{FOLDER} has {len(objects):,} objects: not a run's")

        for name, info in sorted(objects.items()):
            state = state_of(info)
            before = self._seen.get(name)
            if before is not None and before[0] == state:
                entries[name] = before
                continue

            signed = self._read(name)
            is_ours = signed is not None and hmac.compare_digest(
                signed.mac, self._mac(signed.announcement, signed.at)
            )
            if signed is not None and not is_ours:
                self._warn(name)

            announcement = signed.announcement if signed is not None and is_ours else None
            entries[name] = (state, time.monotonic(), announcement)

        self._seen = entries
        now = time.monotonic()
        return [
            announcement
            for _, since, announcement in entries.values()
            if announcement and now - since <= DEAD_S
        ]

    @asynccontextmanager
    async def keep_announced(
        self,
        announcement: Announcement,
        *,
        serves: Callable[[], int | None],
        every_s: float = RENEW_S,
    ) -> AsyncIterator[None]:
        """Keeps the engine announced while the block runs. Retries if the store is unreachable."""
        ending = asyncio.Event()

        async def keep() -> None:
            with suppress(OSError):
                await in_thread(self.forget_dead)

            trouble = ""
            while not ending.is_set():
                now = msgspec.structs.replace(announcement, version=serves())
                try:
                    await in_thread(self.announce, now)
                    trouble = ""
                except (OSError, EngineError) as error:
                    if not trouble:
                        LOG.warning("the engine could not be announced: %s", error)
                    trouble = str(error)

                with suppress(TimeoutError):
                    async with asyncio.timeout(every_s):
                        await ending.wait()

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            # A cancelled write continues in its thread, and would restore what is withdrawn.
            ending.set()
            await asyncio.wait({keeping}, timeout=WITHDRAW_S)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            with suppress(OSError):  # readers then see that it is no longer renewed
                await in_thread(self.withdraw, announcement)

    def _read(self, name: str) -> SignedAnnouncement | None:
        """The announcement in an object; None if no engine wrote it."""
        try:
            return decode_json(self._objects.get(f"{FOLDER}/{name}"), SignedAnnouncement)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _mac(self, announcement: Announcement, at: float) -> str:
        content: Any = ["agentevo engine", announcement, at]
        key = self._secret.value().encode()
        return hmac.new(key, msgspec.json.encode(content), hashlib.sha256).hexdigest()

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            LOG.warning(
                "ignored %s/%s/%s, which is signed with another secret than this run's: machines "
                "that share no folder need rollout.engine_secret='${env:NAME}', with the same "
                "secret everywhere",
                self._objects.url,
                FOLDER,
                name,
            )


def open_announcements(config: RunConfig, secret: RunSecret) -> StoreAnnouncements | None:
    """The announcements in the object store of the run's weights; None without such a store."""
    url = config.rollout.weights.url
    return None if url is None else StoreAnnouncements(Objects(url), secret)


class AnnouncementWatcher:
    """Looks for announcements in the background. `found` has the announcements of the last look
    that reached the store."""

    def __init__(
        self, announcements: StoreAnnouncements, *, every_s: float = POLL_INTERVAL_S
    ) -> None:
        self._announcements = announcements
        self._every_s = every_s
        self.found: list[Announcement] = []
        self.trouble = ""
        """The error of the last look; empty if it succeeded."""

    @classmethod
    def of(cls, config: RunConfig, secret: RunSecret) -> AnnouncementWatcher | None:
        """Watches `open_announcements`."""
        announcements = open_announcements(config, secret)
        return None if announcements is None else cls(announcements)

    async def look(self) -> None:
        """Looks once."""
        try:
            self.found = await in_thread(self._announcements.living)
            self.trouble = ""
        except (OSError, EngineError) as error:
            self.trouble = f"looking for announced engines failed: {error}"

    async def keep_polling(self) -> None:
        """Looks every `every_s`, until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._every_s)


def _path(announcement: Announcement) -> str:
    """The path of an announcement. It contains the URL, so that engines with the same name on two
    machines have different paths."""
    place = hashlib.sha256(announcement.url.encode()).hexdigest()[:12]
    return f"{FOLDER}/{announcement.name}-{place}.json"
