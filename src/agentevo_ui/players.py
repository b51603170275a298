"""Players: processes that hold a checkpoint each (`runs/evaluation/player.py`), at most MAX_PLAYERS
of them, for visitors who try a run in the browser.

A player starts with the first request for its checkpoint. It ends after IDLE_S seconds without a
request, when another checkpoint needs its place, and with the dashboard, even if the dashboard
crashes. A slow model slows only its own process. A request whose listener is gone is cancelled.
Every wait has a deadline. A problem of a process is reported to all requests that wait for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from agentevo.errors import AgentEvoError
from agentevo.runs.evaluation import player_words as words
from agentevo.runtime.credentials import without_passwords

MAX_PLAYERS = 2
MAX_REQUESTS = 4
"""The maximum number of concurrent requests of a player."""
IDLE_S = 600.0
POLL_INTERVAL_S = 5.0
START_S = 60.0
"""The time in seconds in which a process must start, even on a busy machine."""
LOAD_S = 600.0
"""The time in seconds in which a model must be ready."""
SILENT_S = 60.0
"""The longest silence of a player in seconds. A player sends a heartbeat every few seconds."""
CHAT_S = 600.0
"""The time limit of a reply in seconds."""
WRITE_S = 10.0
GRACE_S = 6.0
"""The time in seconds in which a player must end. After that it is killed."""
TICK_S = 1.0
"""The interval in seconds at which a waiting request reports how long it has waited."""
MAX_LINE = 8 * 2**20
MAX_WAITING = 2_000
"""The maximum number of events that a listener can be behind."""
MAX_STDERR = 4_000


class PlayerError(AgentEvoError):
    """A request that no player can serve, with the reason and the remedy."""


class PlayerKey(NamedTuple):
    """The identity of a player."""

    folder: Path
    which: str
    """A step, or `start`."""
    device: str
    """Empty for the device of the recipe."""


@dataclass
class PlayerProcess:
    """A player process, as the pages show it."""

    key: PlayerKey
    run: str
    """The key of the run in URLs."""
    process: Process
    started_at: float
    """The Unix time when it started."""
    state: str = "loading"
    """loading, ready, ended"""
    doing: str = "starting"
    memory_bytes: int = 0
    ready: words.Ready | None = None
    problem: str = ""
    is_killed: bool = False
    last_event_at: float = 0.0
    used_at: float = 0.0
    """By the monotonic clock."""
    listeners: dict[str, asyncio.Queue[words.Event | None]] = field(default_factory=dict)
    stderr: bytearray = field(default_factory=bytearray)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.time() - self.started_at

    @property
    def is_busy(self) -> bool:
        return bool(self.listeners)

    async def keep_stderr(self) -> None:
        """Keeps the end of its standard error, to report a crash."""
        stderr = self.process.stderr
        assert stderr is not None
        while some := await stderr.read(2**16):
            self.stderr += some
            del self.stderr[:-MAX_STDERR]

    def kill(self) -> None:
        """Kills the process and its children. They form a separate session and would outlive the
        process after a crash. Kills only once, because the id may later belong to another
        process."""
        if not self.is_killed:
            self.is_killed = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Players:
    """The players of a dashboard. They belong to one event loop."""

    def __init__(self) -> None:
        self._players: dict[PlayerKey, PlayerProcess] = {}
        self._lock = asyncio.Lock()
        self._looking: asyncio.Task[None] | None = None
        self._read = msgspec.json.Decoder(words.Event).decode
        self._closed = False
        self.streams = 0
        """The number of running answers of all players."""

    def of(self, run: str) -> list[PlayerProcess]:
        """All players, those of this run first."""
        return sorted(
            self._players.values(), key=lambda player: (player.run != run, player.started_at)
        )

    async def ask(
        self, key: PlayerKey, run: str, request: words.Chat
    ) -> AsyncGenerator[words.Event | PlayerProcess]:
        """The events of the request. While the request waits, yields the player itself about once a
        second. The request is cancelled if the caller stops listening. Raises PlayerError."""
        player = await self._player(key, run)
        if len(player.listeners) >= MAX_REQUESTS or request.id in player.listeners:
            raise PlayerError("this checkpoint is busy with other requests: wait, or stop them")

        queue: asyncio.Queue[words.Event | None] = asyncio.Queue(MAX_WAITING)
        player.listeners[request.id] = queue
        is_done = False
        try:
            async for status in self._waiting(player):
                yield status

            await self._write(player, request)
            ends = time.monotonic() + CHAT_S
            while not is_done:
                event = await self._next(player, queue)
                if event is None and time.monotonic() > ends:
                    raise PlayerError(f"stopped: it took more than {CHAT_S:g} s")

                is_done = isinstance(event, words.Done)
                if event is not None and not is_done:
                    yield event
                elif event is None:
                    yield player
        finally:
            player.listeners.pop(request.id, None)
            player.used_at = time.monotonic()
            if not is_done and player.state == "ready":
                with suppress(PlayerError):
                    await asyncio.shield(self._write(player, words.Stop(request.id)))

    async def _waiting(self, player: PlayerProcess) -> AsyncIterator[PlayerProcess]:
        """Yields the player until its model is loaded."""
        ends = time.monotonic() + LOAD_S
        while player.state == "loading":
            yield player
            if time.monotonic() > ends:
                await self.end(player, f"the model was not loaded within {LOAD_S:g} s")
            await asyncio.sleep(TICK_S / 4)

        if player.state == "ended":
            raise PlayerError(player.problem or "it was ended")

        yield player

    async def _next(
        self, player: PlayerProcess, queue: asyncio.Queue[words.Event | None]
    ) -> words.Event | None:
        """The next event. None after TICK_S seconds without an event. Raises PlayerError if the
        player has ended."""
        try:
            async with asyncio.timeout(TICK_S):
                event = await queue.get()
        except TimeoutError:
            if player.state == "ended":
                raise PlayerError(player.problem or "it was ended") from None
            return None

        if event is None:
            raise PlayerError(player.problem or "the page did not keep up: ask again")

        return event

    async def _write(self, player: PlayerProcess, request: words.Request) -> None:
        stdin = player.process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            async with asyncio.timeout(WRITE_S):
                await stdin.drain()
        except (OSError, TimeoutError) as error:
            raise PlayerError(player.problem or "the player accepts no requests") from error

    async def _player(self, key: PlayerKey, run: str) -> PlayerProcess:
        """The player of the checkpoint. Starts a player if there is none."""
        async with self._lock:
            if self._closed:
                raise PlayerError("the dashboard ends")

            existing = self._players.get(key)
            if existing is not None and existing.state != "ended":
                return existing
            if existing is not None:
                await self._forget(existing)

            if len(self._players) >= MAX_PLAYERS:
                idle = [candidate for candidate in self._players.values() if not candidate.is_busy]
                if not idle:
                    raise PlayerError(
                        f"{MAX_PLAYERS} checkpoints are busy: stop one, or wait until it is done"
                    )
                oldest = min(idle, key=lambda candidate: candidate.used_at)
                await self.end(oldest, "another checkpoint replaced it")

            player = await self._begin(key, run)
            self._players[key] = player
            if self._looking is None or self._looking.done():
                self._looking = asyncio.ensure_future(self._end_idle_players())

            return player

    async def _begin(self, key: PlayerKey, run: str) -> PlayerProcess:
        words_ = [str(key.folder), key.which]
        words_ += [f"model.device={key.device}"] if key.device else []
        try:
            async with asyncio.timeout(START_S):
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "agentevo.runs.evaluation.player",
                    *words_,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    limit=MAX_LINE,
                    start_new_session=True,
                )
        except (OSError, TimeoutError) as error:
            raise PlayerError(f"no process could be started ({error}): try again") from error

        now = time.monotonic()
        player = PlayerProcess(key, run, process, time.time(), last_event_at=now, used_at=now)
        player.tasks = [
            asyncio.ensure_future(self._read_events(player)),
            asyncio.ensure_future(player.keep_stderr()),
        ]
        return player

    async def _read_events(self, player: PlayerProcess) -> None:
        """Passes each event to its listener, until the process ends."""
        stdout = player.process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
                player.last_event_at = time.monotonic()
                self._handle_event(player, self._read(line))
        except (ValueError, msgspec.DecodeError) as error:
            player.problem = f"the player sent a message that can't be read ({error}): ask again"

        await self._end(player)

    def _handle_event(self, player: PlayerProcess, event: words.Event) -> None:
        if isinstance(event, words.Beat):
            player.memory_bytes = event.memory_bytes
        elif isinstance(event, words.Loading):
            player.doing = event.text
        elif isinstance(event, words.Ready):
            player.ready = event
            player.state = "ready"
            player.used_at = time.monotonic()
        elif isinstance(event, words.Broken):
            player.problem = event.error
        elif (queue := player.listeners.get(event.id)) is not None:
            if queue.qsize() >= MAX_WAITING - 1:
                player.listeners.pop(event.id)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    async def _end(self, player: PlayerProcess) -> None:
        """Ends a player whose output has ended. Kills the process if it is still alive."""
        code: int | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                code = await player.process.wait()

        player.kill()
        if not player.problem:
            stderr_text = without_passwords(player.stderr.decode("utf-8", "replace")).strip()
            last = stderr_text.rpartition("\n")[2][-300:]
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            room = ": it may have needed more memory than there is" if code == -9 else ""
            player.problem = f"the player's process ended ({how}{room}). {last}".strip()

        player.state = "ended"
        for queue in player.listeners.values():
            if not queue.full():
                queue.put_nowait(None)

    async def _end_idle_players(self) -> None:
        """Ends players without a request for IDLE_S seconds, and silent ones."""
        while True:
            await asyncio.sleep(min(POLL_INTERVAL_S, IDLE_S / 4))
            now = time.monotonic()
            for player in list(self._players.values()):
                if player.state == "ended":
                    # The player's problem stays visible as long as an idle player would.
                    if now - player.used_at > IDLE_S:
                        await self._forget(player)
                elif now - player.last_event_at > SILENT_S:
                    await self.end(player, f"it sent nothing for {SILENT_S:g} s", at_once=True)
                elif not player.is_busy and now - player.used_at > IDLE_S:
                    await self.end(player, "it was no longer used")

    async def end(self, player: PlayerProcess, why: str, *, at_once: bool = False) -> None:
        """Ends the player. All requests that wait for it get the reason."""
        player.problem = player.problem or why
        if at_once:
            player.kill()
        elif player.process.stdin is not None:
            player.process.stdin.close()

        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await player.process.wait()

        player.kill()
        await self._forget(player)

    async def _forget(self, player: PlayerProcess) -> None:
        if self._players.get(player.key) is player:
            del self._players[player.key]
        done, _ = await asyncio.wait(player.tasks, timeout=GRACE_S)
        for task in player.tasks:
            if task not in done:
                task.cancel()
        player.state = "ended"

    async def close(self) -> None:
        """Ends all players."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        players = list(self._players.values())
        await asyncio.gather(
            *(self.end(player, "the dashboard ends") for player in players), return_exceptions=True
        )
