"""`agentevo serve`: one engine of a run as a separate process.

The engine waits for the run's first weights, announces itself in RUN/engines/, and follows them
from then on (RUN/weights/, or what rollout.transport says): it reads and verifies new weights while
it serves, then swaps them in (rollout.in_flight decides about running requests). It refuses weights
that are torn, changed or unfit and continues to serve the old ones. The version that it serves only
grows, also when the trainer goes back to a checkpoint. An engine whose steps fail again and again
ends: its device may be defective, and error answers are quick and attract requests.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from agentevo.config import RunConfig
from agentevo.config.named_agents import check_one_policy
from agentevo.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    WeightsLostError,
    WeightsNotSentError,
)
from agentevo.inference.engine import NO_VERSION, InFlight, UpdatableEngine, Weights
from agentevo.inference.engines import check_engine, engines
from agentevo.inference.serving.announcements import StoreAnnouncements, open_announcements
from agentevo.inference.serving.certificate import RunCertificate, check_installed
from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.inference.serving.http_server import open_socket, url_of
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.serving.server import EngineApp, listening
from agentevo.inference.weights.transports import remote_source
from agentevo.inference.weights.weight_transport import (
    GroupSource,
    Latest,
    ReceivingEngine,
    WeightSource,
)
from agentevo.runs.folder.identity import ensure_run_folder
from agentevo.runs.orchestration.components import check_memory, load_policy
from agentevo.runtime.console import to_stderr
from agentevo.runtime.event_loop import in_thread, run_coroutine
from agentevo.runtime.heap import lasting_heap
from agentevo.runtime.http_clients import is_this_machine
from agentevo.runtime.retry import STORE_RETRY_S
from agentevo.runtime.signals import catch_stop_signals

STOP_POLL_S = 0.05
AGAIN_S = 30.0
"""Refused weights are read again after this time even if they look unchanged, because the read may
have failed."""


def serve(
    config: RunConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: bool | None = None,
    name: str | None = None,
    parent: int | None = None,
    note: Callable[[str], None] = to_stderr,
) -> None:
    """Serves until it is asked to stop; blocks. `tls`: whether it encrypts; None does so where it
    is reached from other machines. `parent`: a process with which it ends. Raises ConfigError
    before anything is created."""
    name = name if name is not None else f"engine-{socket.gethostname()}-{os.getpid()}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"--name {name!r} becomes the name of a file: use letters, digits, `-`, `_` and `.`"
        )

    check_one_policy(config)
    check_memory(config)
    RunSecret(config.run_dir / "engines", config.rollout.engine_secret).check()
    check_engine(config.engine)

    make_engine = engines.get(config.engine.type)
    source = remote_source(config)
    with catch_stop_signals(parent) as stop, open_socket(host, port) as listener:
        if tls is None:
            tls = not is_this_machine(listener.getsockname()[0])
        if tls:
            check_installed()

        loaded = load_policy(config)
        if not ensure_run_folder(config, within_s=STORE_RETRY_S, stop=stop, note=note):
            return

        directory = EngineDirectory(config.run_dir / "engines")
        RunSecret(directory.folder, config.rollout.engine_secret).value()

        shown = RunCertificate(directory.folder).server_context() if tls else None
        with directory.hold_name(name), lasting_heap():
            engine = make_engine(loaded.model, loaded.tokenizer, config.engine)
            run_coroutine(_serve(config, engine, source, listener, shown, name, stop, note))


async def _serve(
    config: RunConfig,
    engine: UpdatableEngine,
    source: WeightSource,
    listener: socket.socket,
    shown: tuple[ssl.SSLContext, str] | None,
    name: str,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> None:
    """Ends when `stop` says so; then requests under way are answered with EngineUnavailableError.
    `shown`: how it encrypts, and the fingerprint of its certificate."""
    await engine.begin(NO_VERSION, deadline_s=config.engine.timeout_s)
    follower = VersionFollower(
        source, engine, config.rollout.in_flight, deadline_s=config.engine.timeout_s, note=note
    )
    following = asyncio.ensure_future(follower.follow(config.rollout.poll_s))
    try:
        note(f"{name}: waiting for the first weights from {source.place}")
        await _until(lambda: stop() or engine.version != NO_VERSION, following, engine)
        if stop():
            return

        directory = EngineDirectory(config.run_dir / "engines")
        secret = RunSecret(directory.folder, config.rollout.engine_secret)
        door = EngineApp(engine, name=name, secret=secret, stats=follower.stats)
        tls, certificate = shown if shown is not None else (None, "")
        announcement = Announcement(
            url=url_of(listener, encrypted=shown is not None),
            name=name,
            pid=os.getpid(),
            started_at=time.time(),
            certificate=certificate,
        )
        place = announcement.address.pinned_url
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(listening(door, listener, tls=tls))
            boards: list[EngineDirectory | StoreAnnouncements] = [directory]
            # Samplers without a shared folder look in the store; without encryption, an engine is
            # only for this machine.
            board = None if shown is None else open_announcements(config, secret)
            if board is not None:
                boards.append(board)

            for listing in boards:
                await stack.enter_async_context(
                    listing.keep_announced(announcement, serves=lambda: engine.version)
                )

            note(f"{name}: serving version {engine.version} at {place}")
            await _until(stop, following, engine)

        note(f"{name}: stopped")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close()


async def _until(
    condition: Callable[[], bool], following: asyncio.Future[Any], engine: UpdatableEngine
) -> None:
    """Waits for the condition; raises the error that ended the watch for new weights, or
    EngineError if the engine keeps failing."""
    while not condition():
        if following.done():
            following.result()
        engine.check()
        await asyncio.sleep(STOP_POLL_S)


class VersionFollower:
    """Keeps an engine on the newest weights of a source."""

    def __init__(
        self,
        weights: WeightSource,
        engine: UpdatableEngine,
        in_flight: InFlight,
        *,
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._weights = weights
        self._engine = engine
        self._in_flight = in_flight
        self._deadline_s = deadline_s
        self._note = note
        self._refused: object = None
        """State of the source when weights were refused: they are tried again when it changes, or
        after AGAIN_S."""
        self._refused_at = 0.0
        self._num_unreadable = 0
        """Versions that could not be read as they were written: refused before the engine saw
        them."""
        self._said = ""
        """The last line that was noted; it is noted once."""

    def stats(self) -> dict[str, float]:
        """The engine's counters, including the versions that were refused before it saw them."""
        counts = self._engine.stats()
        refused = counts.get("engine/refused_publishes", 0.0) + self._num_unreadable
        return counts | {"engine/refused_publishes": refused}

    async def follow(self, every_s: float) -> None:
        """Looks every `every_s` until it is cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(every_s)
        finally:
            if isinstance(self._weights, GroupSource):
                await in_thread(self._weights.withdraw)

    async def look(self) -> bool:
        """Serves the newest weights if they are newer than the served ones; returns whether it did.
        If a trainer sends weights on request, it asks until they arrive."""
        while True:
            try:
                version = await self._serve_newest()
            except WeightsNotSentError:
                continue
            except (
                DeadlineExceededError
            ) as error:  # requests would not end: the next look finds the same weights
                self._say(str(error))
                return False
            except EngineError as error:
                version = self._engine.version
                served = (
                    f"version {version} continues to serve"
                    if version != NO_VERSION
                    else "nothing is served yet"
                )
                self._say(f"{served}: {error}")
                return False

            if version is None:
                return False

            self._say(f"serving version {version}")
            return True

    async def _serve_newest(self) -> int | None:
        """The version that is served from now on, if there was a newer one. Raises EngineError once
        for weights that can't be served."""
        latest, state = await in_thread(self._newest)
        if latest is None:
            return None

        in_flight = self._in_flight
        deadline_s = self._deadline_s
        source = self._weights
        engine = self._engine
        if isinstance(source, GroupSource) and isinstance(engine, ReceivingEngine):
            with self._refusing(state):
                places = await engine.places(await in_thread(source.specs, latest))
                if places:
                    incoming = await in_thread(source.incoming, latest, places)
                    await engine.receive(
                        latest.version, incoming, in_flight=in_flight, deadline_s=deadline_s
                    )
                    return latest.version

        with self._refusing(state):
            verified = await in_thread(self._read_verified, latest)

        await engine.publish(latest.version, verified, in_flight=in_flight, deadline_s=deadline_s)
        return latest.version

    def _newest(self) -> tuple[Latest | None, object]:
        """The weights to serve, if there are any, and the state of the source."""
        latest = self._weights.latest_version()
        if latest is None or latest.version <= self._engine.version:
            return None, None
        state = self._weights.state(latest.version)
        if state == self._refused and time.monotonic() - self._refused_at < AGAIN_S:
            return None, None
        return latest, state

    @contextmanager
    def _refusing(self, state: object) -> Iterator[None]:
        """Weights that are refused in this block are not read again while the source's state is the
        same."""
        try:
            yield
        except (WeightsNotSentError, WeightsLostError, DeadlineExceededError):
            raise  # the weights may be good
        except EngineError:
            self._refused = state
            self._refused_at = time.monotonic()
            raise

    def _read_verified(self, latest: Latest) -> Weights:
        """Reads and verifies weights while the engine works."""
        try:
            weights = self._weights.read(latest.version, sha256=latest.sha256)
        except WeightsNotSentError:
            raise
        except EngineError:
            self._num_unreadable += 1
            raise

        return self._engine.verify(weights)

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._note(line)
