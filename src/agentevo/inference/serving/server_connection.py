"""The engine's end of a client's WebSocket (`messages.py`). Its requests run concurrently in the
engine. Answers are sent when they are ready, and so is the engine's state. When the connection
ends, all of the client's requests are cancelled in the engine.

Three limits bound the load of a client. If more than MAX_RUNNING requests run, further ones are
refused. If MAX_UNREAD answers wait because the client does not read them, nothing more is read from
the client. If MAX_RELEASES conversations wait to be released, further releases are dropped, and the
engine evicts these conversations when it needs the room. The waiting tokens of a streaming request
are one list, and its answer replaces them. Request ids only grow, so no id can be used twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentevo.errors import EngineError, EngineUnavailableError
from agentevo.inference.engine import (
    CANT_SCORE,
    Engine,
    ScoringEngine,
    check_images,
    check_request,
    check_score,
    images_option,
)
from agentevo.inference.serving.messages import (
    Cancel,
    Completed,
    EngineState,
    Generate,
    Outbox,
    Release,
    ScoreRequest,
    StateReport,
    ToEngine,
    WatchRequest,
    failure_of,
    read_requests,
)
from agentevo.types import Completion

LOG = logging.getLogger(__name__)

STATE_POLL_S = 0.05
"""How often version and sleep are checked. A new version is always reported before the first answer
under it."""
MIN_REPORT_S = 0.01
"""The shortest time between two reports."""
RELEASE_S = 5.0
RELEASED_AT_ONCE = 64
"""The number of conversations that are released at once. Then the engine continues, because its
steps run on the same event loop."""
MAX_RELEASES = 65_536
MAX_RUNNING = 16_384
MAX_UNREAD = 65_536
UNREAD_POLL_S = 0.05
"""How often to check whether the client has read its answers."""
FLUSH_S = 1.0
"""The time to send finished answers when the engine shuts down, in seconds."""
GOING_AWAY = 1001
"""The close code of a server that shuts down, RFC 6455 section 7.4.1."""
UNSUPPORTED = 1003
"""A close code of the same section."""
POLICY = 1008
"""A close code of the same section."""
MAX_REASON_BYTES = 123
"""The longest reason of a close frame, RFC 6455 section 5.5."""


class ServerConnection:
    """See the module. `state` returns the engine's state."""

    def __init__(
        self, websocket: WebSocket, engine: Engine, state: Callable[[], EngineState]
    ) -> None:
        self._websocket = websocket
        self._engine = engine
        self._state = state
        self._outbox = Outbox()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._newest_id = -1
        self._releases: dict[str, None] = {}
        """Conversations to forget, each once, in the order of their requests."""
        self._any_releases = asyncio.Event()
        self._every_s = float("inf")
        self._watch = 0
        self._close_frame: tuple[int, str] | None = None
        """The close code and reason, if the server ends the connection."""
        self._reported: EngineState | None = None
        self._reported_at = 0.0

    async def serve(self, closing: asyncio.Event) -> None:
        """Serves until the client leaves or `closing` is set. In the second case the client is told
        to use another engine. Raises the server's errors, not the client's."""
        try:
            await self._websocket.accept()
        except WebSocketDisconnect:
            return

        self._report_state()
        work = [
            asyncio.ensure_future(duty)
            for duty in (
                self._read(),
                self._write(),
                self._keep_reporting(),
                self._keep_releasing(),
                closing.wait(),
            )
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            requests = list(self._running.values())
            for task in (*work, *requests):
                task.cancel()
            await asyncio.gather(*work, *requests, return_exceptions=True)

        if closing.is_set():
            self._close_frame = (GOING_AWAY, "the engine is shutting down: use another one")
        if self._close_frame is not None:
            await self._close_websocket(*self._close_frame)

        for task in done:
            task.result()

    async def _read(self) -> None:
        """Returns when the client leaves or sends something invalid."""
        while (event := await self._websocket.receive())["type"] == "websocket.receive":
            try:
                messages = read_requests(event.get("bytes") or b"")
            except msgspec.MsgspecError as error:
                reason = f"not a list of requests: {error}".encode("ascii", "replace")[
                    :MAX_REASON_BYTES
                ].decode()
                self._close_frame = (UNSUPPORTED, reason)
                return

            watch = self._watch
            for message in messages:
                if isinstance(message, (Generate, ScoreRequest, WatchRequest)):
                    if message.id <= self._newest_id:
                        self._close_frame = (
                            POLICY,
                            f"the id {message.id} was used: ids must increase",
                        )
                        return
                    self._newest_id = message.id
                self._handle(message)

            if self._watch != watch:
                self._report_state()

            while len(self._outbox) > MAX_UNREAD:
                await asyncio.sleep(UNREAD_POLL_S)

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, (Generate, ScoreRequest)):
            if len(self._running) >= MAX_RUNNING:
                error = EngineUnavailableError(f"{MAX_RUNNING} requests of this client are running")
                self._outbox.put(failure_of(message.id, error))
                return
            task = self._running[message.id] = asyncio.ensure_future(self._complete(message))
            task.add_done_callback(lambda _: self._running.pop(message.id, None))
        elif isinstance(message, Release):
            if len(self._releases) < MAX_RELEASES:
                self._releases[message.session] = None
                self._any_releases.set()
        elif isinstance(message, Cancel):
            if (running := self._running.get(message.id)) is not None:
                running.cancel()
        elif isinstance(message, WatchRequest):
            self._watch = message.id
            self._every_s = message.every_s if message.every_s >= MIN_REPORT_S else MIN_REPORT_S

    async def _complete(self, request: Generate | ScoreRequest) -> None:
        """Runs a request and turns an engine's exception into an answer. No other function does
        this."""
        try:
            if isinstance(request, ScoreRequest):
                completion = await self._score(request)
            else:
                completion = await self._generate(request)
            if self._reported is not None and self._reported.version != self._engine.version:
                self._report_state()
            self._outbox.put(Completed(id=request.id, completion=completion))
        except EngineError as error:
            self._outbox.put(failure_of(request.id, error))
        except Exception as error:
            LOG.exception("the engine failed on a request")
            self._outbox.put(
                failure_of(
                    request.id, EngineError(f"the engine failed: {type(error).__name__}: {error}")
                )
            )
        finally:
            self._outbox.drop_tokens(
                request.id
            )  # the answer has all tokens, and a failed request needs none

    async def _generate(self, request: Generate) -> Completion:
        check_request(request.sampling, request.deadline_s)
        check_images(request.prompt_ids, request.images)
        return await self._engine.generate(
            request.prompt_ids,
            request.sampling,
            session=request.session,
            deadline_s=request.deadline_s,
            listen=partial(self._outbox.put_tokens, request.id) if request.stream else None,
            **images_option(self._engine, request.images),
        )

    async def _score(self, request: ScoreRequest) -> Completion:
        check_score(request.context_ids, request.ids, request.temperature, request.deadline_s)
        check_images(request.context_ids, request.images)
        if not isinstance(self._engine, ScoringEngine):
            raise EngineError(CANT_SCORE)

        scores = await self._engine.score(
            request.context_ids,
            request.ids,
            temperature=request.temperature,
            deadline_s=request.deadline_s,
            **({"images": request.images} if request.images else {}),
        )
        return scores.completion(request.ids)

    async def _keep_releasing(self) -> None:
        while True:
            await self._any_releases.wait()
            self._any_releases.clear()

            number = 0
            while self._releases:
                session = next(iter(self._releases))
                del self._releases[session]
                await self._release(session)
                number += 1
                if number % RELEASED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _release(self, session: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._engine.release(session)
        except Exception as error:  # noqa: BLE001 (the others are to be forgotten all the same)
            LOG.warning("conversation %s was not released: %s", session, error)

    async def _write(self) -> None:
        """Returns when the client leaves. The server's pings detect a client that reads nothing.
        Sending to it then raises RuntimeError."""
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                await self._websocket.send_bytes(await self._outbox.next_frame())

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(min(self._every_s, STATE_POLL_S))
            if len(self._outbox):
                continue  # the client has not read the last frame yet

            now = self._state()
            before = self._reported
            changed = before is None or (before.version, before.asleep) != (now.version, now.asleep)
            if changed or time.monotonic() - self._reported_at >= self._every_s:
                self._report_state(now)

    def _report_state(self, now: EngineState | None = None) -> None:
        self._reported = now if now is not None else self._state()
        self._reported_at = time.monotonic()
        self._outbox.put(
            StateReport(state=self._reported, yours=len(self._running), watch=self._watch)
        )

    async def _close_websocket(self, code: int, reason: str) -> None:
        with suppress(
            WebSocketDisconnect, TimeoutError, RuntimeError
        ):  # RuntimeError: it was closed already
            async with asyncio.timeout(FLUSH_S):
                while (frame := self._outbox.frame()) is not None:
                    await self._websocket.send_bytes(frame)
                await self._websocket.close(code, reason)
