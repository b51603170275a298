"""A client's WebSocket to one engine, which carries all of its requests concurrently
(`messages.py`; the other end is `server_connection.py`).

When the connection ends for any reason, every request on it fails with LostError, and the engine
drops these requests. An engine that hangs keeps its connection open. The connection's owner
therefore has to watch the times of the engine's reports, and `abandon` the connection if they stop.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    ListenerError,
    MissingExtraError,
    StreamDivergedError,
)
from agentevo.inference.engine import TokenScores
from agentevo.inference.serving.address import EngineAddress
from agentevo.inference.serving.certificate import fingerprint_of
from agentevo.inference.serving.messages import (
    MAX_BYTES,
    PATH,
    Cancel,
    Completed,
    DrawnTokens,
    FailedRequest,
    Generate,
    Outbox,
    Release,
    ScoreRequest,
    StateReport,
    WatchRequest,
    error_of,
    read_answers,
)
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.token_listeners import StreamedTokens
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

try:
    from websockets.asyncio.client import ClientConnection as WebSocket
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
except ModuleNotFoundError as missing:
    raise MissingExtraError(
        f"engines in other processes need the package {missing.name!r}: pip install "
        "'agentevo[serve]'"
    ) from missing

_WEBSOCKET_LOG = logging.getLogger(f"{__name__}.websocket")
_WEBSOCKET_LOG.setLevel(logging.INFO)  # headers, and with them the secret, are logged at DEBUG
CONNECT_S = 2.0
ENCRYPTED_CONNECT_S = 5.0
"""The time limit with TLS. TLS takes three more steps of the engine, since the engine runs on the
same event loop as its server."""
CLOSE_S = 1.0
FORBIDDEN = 403
"""The status of the handshake if the run's secret is missing or wrong."""


class LostError(Exception):
    """The engine did not answer. Another engine may answer the request."""


class RefusedError(LostError):
    """The engine does not accept this client, or the client can't prove its identity."""


class _connect(connect):
    """Opens a WebSocket without following redirects, because the secret is for this engine only."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


def _tls() -> ssl.SSLContext:
    """The TLS context of a client. It verifies no names or authorities, because `_pinned_to`
    compares the fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _pinned_to(address: EngineAddress) -> type[WebSocket]:
    """The class of connections that compare the certificate before they send any part of the
    request."""

    class Pinned(WebSocket):
        async def handshake(self, *args: Any, **options: Any) -> None:
            if address.certificate:
                shown = self.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
                fingerprint = fingerprint_of(shown or b"")
                if not hmac.compare_digest(fingerprint, address.certificate):
                    raise RefusedError(
                        f"{address.url} shows the certificate {fingerprint} instead of "
                        f"{address.certificate}: it is another run's engine, or something "
                        "intercepts the connection; nothing was sent to it"
                    )

            await super().handshake(*args, **options)

    return Pinned


class ClientConnection:
    """See the module. Belongs to one event loop. `open` creates it."""

    def __init__(
        self,
        websocket: WebSocket,
        url: str,
        every_s: float,
        on_report: Callable[[StateReport], None],
    ) -> None:
        self._websocket = websocket
        self._url = url
        self._every_s = every_s
        self._on_report = on_report
        self._outbox = Outbox()
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Completed | FailedRequest | LostError]] = {}
        self._streams: dict[int, StreamedTokens] = {}
        self._watches: dict[int, asyncio.Future[None]] = {}
        self.lost: LostError | None = None
        """Why the connection ended; None while it is open."""
        self._tasks = [
            asyncio.ensure_future(self._close_at_end(self._read)),
            asyncio.ensure_future(self._close_at_end(self._write)),
        ]
        self._watch()

    @classmethod
    async def open(
        cls,
        address: EngineAddress,
        *,
        secret: RunSecret,
        every_s: float,
        on_report: Callable[[StateReport], None],
    ) -> ClientConnection:
        """Connects to the engine. Calls `on_report` with the engine's state every `every_s`. Raises
        LostError if the engine can't be reached. Raises RefusedError if the engine belongs to
        another run, or if its certificate is not the one in its address; in the second case nothing
        was sent to it."""
        url = address.url
        tls: dict[str, Any] = {"ssl": _tls()} if address.certificate else {}
        try:
            websocket = await _connect(
                "ws" + url.removeprefix("http") + PATH,
                create_connection=_pinned_to(address),
                logger=_WEBSOCKET_LOG,
                additional_headers=await in_thread(secret.header),
                compression=None,
                proxy=None,
                open_timeout=ENCRYPTED_CONNECT_S if tls else CONNECT_S,
                close_timeout=CLOSE_S,
                ping_interval=None,
                max_size=MAX_BYTES,
                **tls,
            )
        except EngineError as error:
            raise RefusedError(f"{url}: {error}") from error
        except InvalidStatus as error:
            if error.response.status_code != FORBIDDEN:
                raise LostError(f"{url}: {error}") from error
            raise RefusedError(
                f"{url} belongs to another run: it refuses the secret in {secret.file}; put the "
                "secret of its own run there"
            ) from error
        except (OSError, WebSocketException, ValueError) as error:  # ValueError: an invalid URL
            raise LostError(f"{url}: {type(error).__name__} {error}".rstrip()) from error

        return cls(websocket, url, every_s, on_report)

    @property
    def num_open(self) -> int:
        """The number of requests that have no answer yet."""
        return len(self._answers)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        session: str | None,
        deadline_s: float,
        streamed: StreamedTokens | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """See Engine.generate. `streamed` gets the tokens as they arrive, and the missing tokens at
        the end. Raises LostError if the connection ends before the answer arrives."""
        message = Generate(
            id=next(self._ids),
            prompt_ids=prompt_ids,
            sampling=sampling,
            session=session,
            deadline_s=deadline_s,
            stream=streamed is not None,
            images=list(images),
        )
        return await self._answer_to(message, streamed)

    async def score(
        self,
        context_ids: list[int],
        ids: list[int],
        temperature: float,
        deadline_s: float,
        images: Sequence[PromptImage] = (),
    ) -> TokenScores:
        """See ScoringEngine.score. Raises LostError as `generate` does."""
        message = ScoreRequest(
            id=next(self._ids),
            context_ids=context_ids,
            ids=ids,
            temperature=temperature,
            deadline_s=deadline_s,
            images=list(images),
        )
        return TokenScores.of(await self._answer_to(message))

    async def _answer_to(
        self, message: Generate | ScoreRequest, streamed: StreamedTokens | None = None
    ) -> Completion:
        if self.lost is not None:
            raise LostError(str(self.lost))

        number = message.id
        deadline_s = message.deadline_s
        self._outbox.put(message)

        future = self._answers[number] = asyncio.get_running_loop().create_future()
        if streamed is not None:
            streamed.begin()
            self._streams[number] = streamed

        answer = None
        try:
            async with asyncio.timeout(deadline_s):
                answer = await future
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._url}: no completion within {deadline_s:g} s: raise engine.timeout_s or "
                "lower sampling.max_new_tokens"
            ) from None
        finally:
            del self._answers[number]
            self._streams.pop(number, None)
            if answer is None:
                self._outbox.put(Cancel(id=number))

        if isinstance(answer, Completed):
            if streamed is not None:
                streamed.finish(answer.completion)
            return answer.completion

        raise LostError(str(answer)) if isinstance(answer, LostError) else error_of(answer)

    def release(self, session: str) -> None:
        """See Engine.release. The message goes to the engine in the next frame."""
        if self.lost is None:
            self._outbox.put(Release(session=session))

    async def look(self) -> None:
        """Waits for a report that is newer than this call, or for the end of the connection. There
        is no time limit."""
        if self.lost is None:
            await self._watch()

    def abandon(self, reason: str) -> None:
        """Ends the connection immediately, without a close frame. Every request on it fails with
        LostError."""
        if self.lost is not None:
            return

        self.lost = LostError(f"{self._url}: {reason}")
        for task in self._tasks:
            task.cancel()

        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(self.lost)

        for watch in self._watches.values():
            if not watch.done():
                watch.set_result(None)

        self._watches.clear()
        self._websocket.transport.abort()

    async def close(self) -> None:
        """Sends the waiting messages, if the engine still reads them, and ends the connection."""
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while self.lost is None and (frame := self._outbox.frame()) is not None:
                    await self._websocket.send(frame)
                await self._websocket.close()
        self.abandon("closed by this client")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self) -> asyncio.Future[None]:
        number = next(self._ids)
        self._outbox.put(WatchRequest(id=number, every_s=self._every_s))
        future = self._watches[number] = asyncio.get_running_loop().create_future()
        return future

    async def _close_at_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ends the connection when reading or writing ends, and records the reason."""
        reason = "the connection broke"
        try:
            await work()
        except ConnectionClosed as error:
            reason = str(error)
        except msgspec.MsgspecError as error:
            reason = f"it sent an invalid answer ({error})"
        finally:
            self.abandon(reason)

    async def _read(self) -> None:
        while True:
            frame = await self._websocket.recv(decode=False)
            for message in read_answers(frame):
                if isinstance(message, StateReport):
                    self._receive_report(message)
                elif isinstance(message, DrawnTokens):
                    self._pass_on(message)
                elif (future := self._answers.get(message.id)) is not None and not future.done():
                    future.set_result(message)

    def _pass_on(self, tokens: DrawnTokens) -> None:
        """Passes tokens to their request's listener. If the listener fails, the request ends."""
        streamed = self._streams.get(tokens.id)
        future = self._answers.get(tokens.id)
        if streamed is None or future is None or future.done():
            return

        try:
            streamed.add(tokens.ids, tokens.logprobs)
        except (ListenerError, StreamDivergedError) as error:
            future.set_exception(error)

    async def _write(self) -> None:
        while True:
            await self._websocket.send(await self._outbox.next_frame())

    def _receive_report(self, message: StateReport) -> None:
        self._on_report(message)
        for number in [watch for watch in self._watches if watch <= message.watch]:
            future = self._watches.pop(number)
            if not future.done():
                future.set_result(None)
