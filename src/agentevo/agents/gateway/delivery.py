"""Delivers an answer of the sampler to a client that can hang up, be slow, or time out.

Invariant: if a client does not get its whole answer, the answer is discarded
(`GatewaySession.lose`), so training uses only answers that a client received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from agentevo.agents.gateway.api import Api, Event
from agentevo.agents.gateway.refusals import Refusal, refusal_of
from agentevo.agents.gateway.request import Delivery, ModelReply
from agentevo.agents.gateway.session import GatewaySession
from agentevo.inference.serving.admission import AdmittedConnection
from agentevo.models.tool_calls import Delta, join_texts

READER_S = 60.0
"""The time limit for a client to read sent data, in seconds."""

T = TypeVar("T")


def limit_sends(send: Send) -> Send:
    """The same, with TimeoutError for a client that does not read for READER_S."""

    async def send_in_time(message: Message) -> None:
        async with asyncio.timeout(READER_S):
            await send(message)

    return send_in_time


class Awaited(Generic[T]):
    """Work of the sampler's loop that a client waits for. It is cancelled when the client hangs up,
    after `within_s`, and when the block ends. `who` names the answering side in messages."""

    def __init__(
        self, work: asyncio.Future[T], client: AdmittedConnection, within_s: float, who: str
    ) -> None:
        self._work = work
        self._client = client
        self._within_s = within_s
        self._who = who
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._within_s, self._is_late)
        self._client.watch(self._is_gone)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._client.watch(None)
        self._work.cancel()

    @property
    def is_done(self) -> bool:
        return self._work.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        self._work.add_done_callback(lambda work: callback())

    async def result(self) -> T:
        """Raises ClientDisconnect for a client that has gone, Refusal after the time limit, and the
        exceptions of the work."""
        try:
            result = await self._work
        except asyncio.CancelledError:
            if self._error is None:
                raise

        if self._error is not None:
            raise self._error
        return result

    def _is_gone(self) -> None:
        self._give_up(ClientDisconnect())

    def _is_late(self) -> None:
        self._give_up(
            Refusal(
                f"{self._who} has not answered within {self._within_s:g} s",
                status=504,
                kind="timeout_error",
            )
        )

    def _give_up(self, error: Exception) -> None:
        self._error = error
        self._work.cancel()


class DeliveredTokens:
    """The pieces of a streamed answer that were not sent to its client yet."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, list[Delta]]] = []
        self._news = asyncio.Event()

    def add(self, number: int, pieces: list[Delta]) -> None:
        """See answer.OnPieces."""
        self._pieces.append((number, pieces))
        self._news.set()

    @property
    def has_news(self) -> bool:
        return bool(self._pieces)

    def wake(self) -> None:
        """Ends a wait without new pieces."""
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()
        self._news.clear()

    def take(self) -> list[tuple[int, list[Delta]]]:
        """Number and pieces of completions, texts that follow one another in one piece."""
        taken = self._pieces
        self._pieces = []
        joined: dict[int, list[Delta]] = {}
        for number, pieces in taken:
            joined.setdefault(number, []).extend(pieces)
        return [(number, list(join_texts(pieces))) for number, pieces in joined.items()]


class WholeAnswer(Response):
    """An answer in one piece. The connection of a client that does not read is closed after
    READER_S."""

    def __init__(self, content: bytes, delivery: Delivery, session: GatewaySession) -> None:
        super().__init__(content, headers=delivery.headers, media_type="application/json")
        self._delivery = delivery
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_delivered = False
        try:
            await send(_start(self))
            await send(_part(bytes(self.body), has_more=True))
            is_delivered = await _end_of(scope, send)
        finally:
            if not is_delivered:
                self._session.lose(self._delivery)


class EventStream(Response):
    """An answer as server-sent events, as they come. The connection of a client that does not read
    is closed after READER_S."""

    media_type = "text/event-stream"

    def __init__(
        self,
        api: Api[Any],
        request: Any,
        delivered: DeliveredTokens,
        awaited: Awaited[list[ModelReply]],
        delivery: Delivery,
        session: GatewaySession,
        count: Callable[[list[ModelReply]], None],
    ) -> None:
        """`awaited` has been entered, and ends here. `count` is called with the whole answer."""
        super().__init__(headers=delivery.headers)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._api = api
        self._heard = delivered
        self._awaited = awaited
        self._delivery = delivery
        self._session = session
        self._count = count
        self._stream = api.stream(request)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_delivered = False
        try:
            events = self._encode_events(self._stream.begin(self._delivery.prompt))
            await send(_start(self))
            while not self._awaited.is_done:
                await send(_part(events + self._news(), has_more=True))
                events = b""
                await self._heard.wait()

            events += self._news()
            await send(_part(events + self._encode_events(await self._end()), has_more=True))
            is_delivered = await _end_of(scope, send)
        except (TimeoutError, ClientDisconnect):
            scope["state"]["connection"].cut()  # here, so that the answer counts in the metrics
        finally:
            self._awaited.__exit__(None, None, None)
            if not is_delivered:
                self._session.lose(self._delivery)

    def _encode_events(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._api.encode, events))

    def _news(self) -> bytes:
        return b"".join(
            self._encode_events(self._stream.pieces(number, pieces))
            for number, pieces in self._heard.take()
        )

    async def _end(self) -> list[Event]:
        try:
            replies = await self._awaited.result()
            self._count(replies)
            return self._stream.end(replies)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 (the client gets the error, of whatever kind)
            return self._stream.failure_events(refusal_of(error))


async def _end_of(scope: Scope, send: Send) -> bool:
    """Ends an answer that has been sent completely. False if its client does not have it: the
    connection is cut then."""
    connection: AdmittedConnection = scope["state"]["connection"]
    is_delivered = await connection.received_all(READER_S)
    if not is_delivered:
        connection.cut()
    await send(_part(b"", has_more=False))
    return is_delivered


def _start(response: Response) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": response.raw_headers}


def _part(body: bytes, *, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": has_more}
