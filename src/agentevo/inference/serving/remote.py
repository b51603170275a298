"""Engines in other processes, as one engine.

A conversation stays with the engine that holds its cache. A new conversation goes to the engine
with the least load, among the engines that are awake and serve the newest version. When an engine
dies, hangs or refuses, the same request (same ids, same seed) goes to another engine within the
same deadline. Only the computation of the first engine is lost, because engines keep no state that
an answer depends on. The request fails if no engine is left before the deadline
(EngineUnavailableError). The listener gets only the tokens that the first engine had not sent. If
the second engine samples different tokens, under newer weights, the request fails
(StreamDivergedError).

`version` is the smallest version among the engines that may be asked, so no token comes from an
older one. An engine that is behind the others for LATE_S gets no requests, and does not count,
until it catches up or no engine is newer. Otherwise it would delay all the others.

Each engine is reached over one connection (`client_connection.py`), on which it reports its state
every `poll_s`. `version` and `stats` come from the last report. An engine is lost when its
connection ends, and counts as dead when it has sent no report for `max_age_s`. In both cases its
requests are moved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GrammarError,
    RequestTooLongError,
    StreamDivergedError,
)
from agentevo.inference.engine import (
    NO_VERSION,
    TokenListener,
    TokenScores,
    check_images,
    check_score,
)
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.announcements import AnnouncementWatcher
from agentevo.inference.serving.client_connection import (
    CONNECT_S,
    ClientConnection,
    LostError,
    RefusedError,
)
from agentevo.inference.serving.directory import EngineDirectory
from agentevo.inference.serving.messages import EngineState, StateReport
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.token_listeners import StreamedTokens
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

LOG = logging.getLogger(__name__)
T = TypeVar("T")

GAUGES = (
    "engine/running",
    "engine/waiting",
    "engine/kv_tokens",
    "engine/kv_capacity_tokens",
)
"""Statistics that are momentary values. The others are counters, and the counts of an engine that
is gone stay in the sum."""
LATE_S = 60.0
"""How long an engine may be behind the others. It is enough to load new weights, and to check
refused weights once more."""


@dataclass(eq=False)
class _KnownEngine:
    """One engine, from its first appearance until it is gone."""

    address: EngineAddress
    last_report_at: float
    """The monotonic time of its last report."""
    state: EngineState | None = None
    yours: int = 0
    """The number of this client's requests that it had at its last report."""
    is_suspect: bool = True
    """The engine gets no new requests until its next report, because it was just connected, or
    refused a request."""
    behind_since: tuple[int, float] | None = None
    """(its version, the time at which another engine was first seen with a newer version), or
    None."""
    connection: ClientConnection | None = None
    connecting: asyncio.Task[None] | None = None
    homes: set[str] = field(default_factory=set)
    """Conversations whose cache is in this engine."""

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def connected(self) -> bool:
        return self.connection is not None and self.connection.lost is None

    @property
    def usable(self) -> bool:
        return self.state is not None and not self.is_suspect and self.connected

    @property
    def version(self) -> int:
        return self.state.version if self.state is not None else NO_VERSION

    @property
    def asleep(self) -> bool:
        return self.state is not None and self.state.asleep

    @property
    def open(self) -> int:
        """The number of this client's requests that are in the engine."""
        return self.connection.num_open if self.connection is not None else 0

    def load(self) -> int:
        """The number of requests in the engine: those of other clients at its last report, and the
        current ones of this client."""
        stats = self.state.stats if self.state is not None else {}
        num_requests = int(stats.get("engine/running", 0) + stats.get("engine/waiting", 0))
        return max(num_requests - self.yours, 0) + self.open


class RemoteEngine:
    """Engines in other processes, as one engine. See the module. `engines`: the directory of
    announcements, or the engines' URLs in the form that `EngineAddress.read` accepts. With URLs,
    `secret` is the secret of their run. `also`: further URLs. `watcher`: finds engines that
    announce themselves in the object store. Belongs to one event loop; `close` it there."""

    def __init__(
        self,
        engines: EngineDirectory | Sequence[str],
        *,
        also: Sequence[str] = (),
        watcher: AnnouncementWatcher | None = None,
        secret: RunSecret | None = None,
        poll_s: float = 0.1,
        max_age_s: float = 15.0,
    ) -> None:
        if secret is None:
            if not isinstance(engines, EngineDirectory):
                raise TypeError(
                    "engines by URL need a secret: give that of their run, RunSecret(RUN / "
                    "'engines')"
                )
            secret = RunSecret(engines.folder)

        self._secret = secret
        self._watcher_of_store = watcher
        self._engines = engines
        self._poll_s = poll_s
        self._max_age_s = max_age_s
        urls = also if isinstance(engines, EngineDirectory) else [*engines, *also]
        self._given = {address.url: address for address in map(EngineAddress.read, urls)}
        self._known: dict[str, _KnownEngine] = {}
        self._homes: dict[str, _KnownEngine] = {}
        self._counts: dict[tuple[str, int], dict[str, float]] = {}
        """(URL, process) -> the engine's counters, including engines that are gone."""
        self._watcher: asyncio.Task[None] | None = None
        self._store_watch: asyncio.Task[None] | None = None
        self._trouble = "no engine was found"
        """The last failure."""
        self._warned: set[str] = set()
        """Refusals and late engines that were logged already."""
        self._closed = False

    @property
    def version(self) -> int:
        """The smallest version among the engines that may be asked; -1 if there is none."""
        return min((engine.version for engine in self._usable_engines()), default=NO_VERSION)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        session: str | None = None,
        deadline_s: float,
        listen: TokenListener | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See Engine.generate. Raises EngineUnavailableError if no engine answered before the
        deadline, and StreamDivergedError if, after an engine's death, another engine samples other
        tokens than `listen` has received."""
        check_images(prompt_ids, images)
        streamed = None if listen is None else StreamedTokens(listen)
        return await self._ask_engines(
            lambda connection, remaining_s: connection.generate(
                prompt_ids, sampling, session, remaining_s, streamed, images
            ),
            session,
            deadline_s,
        )

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        *,
        temperature: float = 1.0,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See ScoringEngine.score. Raises the errors of `generate`."""
        check_score(context_ids, ids, temperature, deadline_s)
        check_images(context_ids, images)
        return await self._ask_engines(
            lambda connection, remaining_s: connection.score(
                context_ids, ids, temperature, remaining_s, images
            ),
            None,
            deadline_s,
        )

    async def _ask_engines(
        self,
        ask: Callable[[ClientConnection, float], Awaitable[T]],
        session: str | None,
        deadline_s: float,
    ) -> T:
        """Asks one engine after the other, within the remaining time, and returns the first
        answer."""
        deadline = time.monotonic() + deadline_s
        refused: dict[str, EngineError] = {}
        while (remaining_s := deadline - time.monotonic()) > 0:
            self._watch()
            engine = self._choose(session, refused)
            if engine is None or engine.connection is None:
                if refused:
                    raise list(refused.values())[-1]  # by every known engine
                await asyncio.sleep(min(self._poll_s, remaining_s))
                continue

            if session is not None:
                self._assign_home(session, engine)

            try:
                return await ask(engine.connection, remaining_s)
            except (
                RequestTooLongError,
                GrammarError,
                DeadlineExceededError,
                StreamDivergedError,
            ):
                raise
            except (LostError, EngineUnavailableError) as error:
                engine.is_suspect = True
                self._trouble = str(error)
            except EngineError as error:
                refused[engine.url] = error

        raise EngineUnavailableError(
            f"no engine answered within {deadline_s:g} s ({len(self._known)} known; "
            f"{self._trouble}): are processes of `agentevo serve` "
            f"running and announced in {self._place()}?"
        )

    async def release(self, session: str) -> None:
        """See Engine.release. A lost engine gets no message, and drops idle conversations by
        itself."""
        engine = self._homes.pop(session, None)
        if engine is not None:
            engine.homes.discard(session)
            if engine.connection is not None:
                engine.connection.release(session)

    def stats(self) -> dict[str, float]:
        """See Engine.stats: sums over the engines. `engine/engines` is the number of living
        engines."""
        living = [
            engine.state.stats
            for engine in self._known.values()
            if engine.state is not None and engine.usable
        ]
        gauges = [{key: stats.get(key, 0.0) for key in GAUGES} for stats in living]
        sums = {"engine/engines": float(len(living))}
        for counts in (*self._counts.values(), *gauges):
            for key, value in counts.items():
                sums[key] = sums.get(key, 0.0) + value

        return sums

    async def refresh(self) -> None:
        """Updates what is known of every engine (whether it lives, its version and load), and keeps
        updating in the background."""
        self._watch()
        if self._watcher_of_store is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await self._watcher_of_store.look()

        await self._poll_once()
        looks = [asyncio.ensure_future(self._ask_state(engine)) for engine in self._known.values()]
        if looks:
            _, late = await asyncio.wait(
                looks, timeout=CONNECT_S
            )  # a long step, or the engine hangs, which `last_report_at` shows
            for look in late:
                look.cancel()

    async def close(self) -> None:
        """Ends the connections. Running requests fail."""
        self._closed = True
        watchers = [task for task in (self._watcher, self._store_watch) if task is not None]
        for task in watchers:
            task.cancel()

        await asyncio.gather(*watchers, return_exceptions=True)
        connections = [
            engine.connection for engine in self._known.values() if engine.connection is not None
        ]
        await asyncio.gather(*(connection.close() for connection in connections))

        for engine in list(self._known.values()):
            self._forget(engine)

    def _watch(self) -> None:
        """Starts the background task, also again after a failure has ended it."""
        if self._closed:
            raise EngineUnavailableError(
                "this client of the engines is closed: make another RemoteEngine"
            )

        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.get_running_loop().create_task(self._keep_polling())

        if self._watcher_of_store is not None and (
            self._store_watch is None or self._store_watch.done()
        ):
            self._store_watch = asyncio.get_running_loop().create_task(
                self._watcher_of_store.keep_polling()
            )

    async def _poll_once(self) -> None:
        """Looks once. A failure (such as an unavailable file system) is logged once, and becomes
        part of the error of requests that find no engine."""
        try:
            await self._poll()
        except Exception as error:  # noqa: BLE001 (whatever it is, requests under way need the looking to continue)
            trouble = f"looking for engines failed: {type(error).__name__}: {error}"
            if trouble != self._trouble:
                LOG.warning(trouble)
            self._trouble = trouble

    async def _keep_polling(self) -> None:
        while True:
            await self._poll_once()
            asleep_since = time.monotonic()
            await asyncio.sleep(self._poll_s)
            self._make_up_for_pause(time.monotonic() - asleep_since - self._poll_s)

    def _make_up_for_pause(self, late_s: float) -> None:
        """Makes up for a pause of this process itself: reports of engines may be unread, so their
        age proves nothing."""
        for engine in self._known.values():
            engine.last_report_at += late_s

    async def _poll(self) -> None:
        """Finds the announced engines, connects to each, and forgets the dead."""
        if isinstance(self._engines, EngineDirectory):
            reading_since = time.monotonic()
            announcements = await in_thread(self._engines.living, self._max_age_s)
            self._make_up_for_pause(time.monotonic() - reading_since)
            addresses = self._given | {engine.url: engine.address for engine in announcements}
        else:
            addresses = self._given

        if self._watcher_of_store is not None:
            announced = self._watcher_of_store.found
            addresses = {engine.url: engine.address for engine in announced} | addresses
            self._trouble = self._watcher_of_store.trouble or self._trouble

        for engine in list(self._known.values()):
            if time.monotonic() - engine.last_report_at > self._max_age_s or (
                engine.url not in addresses and not engine.connected
            ):
                self._forget(engine)

        for url, address in addresses.items():
            engine = self._known.setdefault(url, _KnownEngine(address, time.monotonic()))
            # A later engine at this URL may have another certificate.
            engine.address = address
            if not engine.connected and (engine.connecting is None or engine.connecting.done()):
                engine.connecting = asyncio.ensure_future(self._connect(engine))

    async def _connect(self, engine: _KnownEngine) -> None:
        def on_report(message: StateReport) -> None:
            state = message.state
            engine.state = state
            engine.yours = message.yours
            engine.is_suspect = False
            engine.last_report_at = time.monotonic()
            self._counts[engine.url, state.pid] = {
                key: value for key, value in state.stats.items() if key not in GAUGES
            }

        engine.is_suspect = True
        try:
            engine.connection = await ClientConnection.open(
                engine.address, secret=self._secret, every_s=self._poll_s, on_report=on_report
            )
        except LostError as error:
            if isinstance(error, RefusedError):
                self._warn(str(error))
            self._trouble = str(error)

    async def _ask_state(self, engine: _KnownEngine) -> None:
        if engine.connecting is not None:
            await asyncio.wait([engine.connecting])
        if engine.connection is not None:
            await engine.connection.look()

    def _usable_engines(self) -> list[_KnownEngine]:
        """The engines that may be asked: usable ones that are not behind the others for LATE_S."""
        usable = [engine for engine in self._known.values() if engine.usable]
        newest = max((engine.version for engine in usable), default=NO_VERSION)
        able = []
        for engine in usable:
            if engine.version == newest:
                engine.behind_since = None
            elif engine.behind_since is None or engine.behind_since[0] != engine.version:
                engine.behind_since = (engine.version, time.monotonic())

            if engine.behind_since is None or time.monotonic() - engine.behind_since[1] < LATE_S:
                able.append(engine)
            else:
                self._warn(
                    f"{engine.url} stays at version {engine.version} while others have newer "
                    "weights: it gets no requests until it has them too (its log says why)"
                )

        return able

    def _choose(
        self, session: str | None, refused: Mapping[str, EngineError]
    ) -> _KnownEngine | None:
        """The conversation's engine if it may be asked. Otherwise the engine with the least load
        among those with the newest version, because tokens of a late engine would be old. Sleeping
        engines are asked only if all engines sleep."""
        able = [engine for engine in self._usable_engines() if engine.url not in refused]
        home = self._homes.get(session) if session is not None else None
        if (
            home is not None
            and home in able
            and (not home.asleep or all(engine.asleep for engine in able))
        ):
            return home

        return min(
            able,
            key=lambda engine: (
                engine.asleep,
                -engine.version,
                engine.load(),
                len(engine.homes),
                engine.url,
            ),
            default=None,
        )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            LOG.warning(text)

    def _assign_home(self, session: str, engine: _KnownEngine) -> None:
        before = self._homes.get(session)
        if before is not None:
            before.homes.discard(session)
        self._homes[session] = engine
        engine.homes.add(session)

    def _forget(self, engine: _KnownEngine) -> None:
        """Removes a dead engine. Its requests go to other engines, and so do its conversations when
        they continue."""
        self._known.pop(engine.url, None)
        for session in engine.homes:
            self._homes.pop(session, None)
        if engine.connecting is not None:
            engine.connecting.cancel()
        if engine.connection is not None:
            engine.connection.abandon(f"it has sent nothing for {self._max_age_s:g} s")

    def _place(self) -> str:
        return (
            str(self._engines.folder)
            if isinstance(self._engines, EngineDirectory)
            else ", ".join(self._engines)
        )
