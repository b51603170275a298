"""Serves an engine to other processes: requests over a WebSocket, and three HTTP routes for
scripts.

    WS   /requests   see `messages.py`, `server_connection.py`; `remote.py` is the client
    GET  /state      {version, asleep, stats, name, pid}
    POST /sleep      {in_flight, deadline_s} -> state      POST /wake -> state

HTTP bodies are JSON, one request on a connection. Errors are sent by name, so the client raises the
same exception as the engine. A client that does not send the run's secret (`secret.py`) is refused
before its request's body is read, and disconnected within seconds (`admission.py`). Traffic between
machines is encrypted (`certificate.py`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    MissingExtraError,
    RequestTooLongError,
)
from agentevo.inference.engine import Engine, SleepingEngine
from agentevo.inference.serving.messages import (
    MAX_BYTES,
    PATH,
    EngineState,
    ErrorAnswer,
    SleepRequest,
    status_and_answer,
)
from agentevo.inference.serving.secret import NAME, RunSecret
from agentevo.runtime.decoding import decode_json

try:
    import websockets  # noqa: F401 (uvicorn uses it, and drops WebSockets without it)
    from fastapi import FastAPI, Request, Response, WebSocket
    from starlette.datastructures import Headers
    from starlette.requests import ClientDisconnect
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from agentevo.inference.serving.admission import (
        MAX_CLIENTS,
        AdmittedConnection,
        WebSocketProtocol,
    )
    from agentevo.inference.serving.http_server import GRACE_S, serving
    from agentevo.inference.serving.server_connection import ServerConnection
except ModuleNotFoundError as missing:
    raise MissingExtraError(
        f"an engine for other processes needs the package {missing.name!r}: pip install "
        "'agentevo[serve]'"
    ) from missing

T = TypeVar("T")

MAX_BODY_BYTES = 4 * 2**10
BODY_TIMEOUT_S = 5.0
"""The time limit for a request's body, in seconds."""
PING_S = 20.0
PING_TIMEOUT_S = 60.0
"""A client that does not answer a ping for this long counts as disconnected."""
UNAUTHORIZED_MESSAGE = (
    "the run's secret is wrong or missing: send `Authorization: Bearer` with the content of "
    f"engines/{NAME} in the run's folder"
)
FULL_MESSAGE = f"the engine has {MAX_CLIENTS} clients already: use another one, or fewer samplers"
UNAUTHORIZED = 401
CLIENT_GONE = 499
"""The status of an answer whose client has left."""
TRY_AGAIN_LATER = 1013
"""Close code, from the registry of RFC 6455, section 11.7."""


class EngineApp:
    """The web application of one engine. `close` ends the connections of waiting clients, which
    then use another engine. `stats` returns the statistics to report. Default: the engine's
    statistics."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        secret: RunSecret,
        stats: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self._stats = stats if stats is not None else engine.stats
        self._sleeping = engine if isinstance(engine, SleepingEngine) else None
        self._closed = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self.app = FastAPI(title=f"AgentEvo engine {name}", openapi_url=None)
        for error in (EngineError, msgspec.MsgspecError, ClientDisconnect):
            self.app.add_exception_handler(error, _answer_error)
        self.app.add_middleware(_EngineGuard, secret=secret)
        self.app.websocket(PATH)(self.requests)
        self.app.post("/sleep")(self.sleep)
        self.app.post("/wake")(self.wake)
        self.app.get("/state")(self.state)

    async def close(self) -> None:
        """Returns when all clients are notified, or after GRACE_S."""
        self._closed.set()
        if self._serving:
            await asyncio.wait(self._serving, timeout=GRACE_S)

    async def requests(self, websocket: WebSocket) -> None:
        serving = asyncio.ensure_future(
            ServerConnection(websocket, self.engine, self._state).serve(self._closed)
        )
        self._serving.add(serving)
        try:
            await serving
        finally:
            self._serving.discard(serving)

    async def sleep(self, request: Request) -> Response:
        options = decode_json(await _body(request) or b"{}", SleepRequest)
        await self._run_until_hang_up(
            request,
            self._sleeper().sleep(in_flight=options.in_flight, deadline_s=options.deadline_s),
        )
        return _json(self._state(), 200)

    async def wake(self) -> Response:
        await self._sleeper().wake()
        return _json(self._state(), 200)

    async def state(self) -> Response:
        return _json(self._state(), 200)

    def _state(self) -> EngineState:
        asleep = self._sleeping is not None and self._sleeping.asleep
        return EngineState(
            version=self.engine.version,
            asleep=asleep,
            stats=self._stats(),
            name=self.name,
            pid=os.getpid(),
        )

    def _sleeper(self) -> SleepingEngine:
        if self._sleeping is None:
            raise EngineError(f"an engine of type {type(self.engine).__name__} can't sleep")
        return self._sleeping

    async def _run_until_hang_up(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Runs the work, and cancels it if the client hangs up or the server is closed."""
        task = asyncio.ensure_future(work)
        hang_up = asyncio.ensure_future(_wait_for_hang_up(request))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({task, hang_up, closed}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineUnavailableError(
                    f"engine {self.name} is shutting down: use another one"
                )
            return task.result()
        finally:
            for waiting in (task, hang_up, closed):
                waiting.cancel()
            await asyncio.gather(task, hang_up, closed, return_exceptions=True)


class _EngineGuard:
    """Wraps the application and admits clients that have the secret, as long as there is room.
    Other clients get 401 and the reason. A WebSocket client gets only 403, because uvicorn logs a
    longer answer as an error of the application. In both cases the connection ends after the
    answer."""

    def __init__(self, app: ASGIApp, secret: RunSecret) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: AdmittedConnection = scope["state"]["connection"]
        answer = self._refusal(scope)
        if answer is None and not connection.admit():
            answer = status_and_answer(EngineUnavailableError(FULL_MESSAGE))

        try:
            if answer is None:
                await self._app(scope, receive, _close_after(send))
            elif scope["type"] == "websocket":
                await self._refuse(WebSocket(scope, receive, send), *answer)
            else:
                response = _json(answer[1], answer[0])
                if answer[0] == UNAUTHORIZED:
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, _close_after(send))
        finally:
            connection.leave()

    def _refusal(self, scope: Scope) -> tuple[int, ErrorAnswer] | None:
        """The status and answer for a client that has not shown the secret."""
        try:
            if self._secret.matches_header(Headers(scope=scope).get("authorization")):
                return None
        except EngineError as error:  # the server itself can't read the secret
            return status_and_answer(error)
        return UNAUTHORIZED, ErrorAnswer(error="EngineError", message=UNAUTHORIZED_MESSAGE)

    async def _refuse(self, websocket: WebSocket, status: int, answer: ErrorAnswer) -> None:
        if answer.message == FULL_MESSAGE:  # only an accepted WebSocket can be closed with a reason
            await websocket.accept()
            await websocket.close(TRY_AGAIN_LATER, FULL_MESSAGE)
        else:
            await websocket.close()


def _close_after(send: Send) -> Send:
    """Marks each HTTP answer as the last one on its connection."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return send_last


async def _body(request: Request) -> bytes:
    """The request's body. Raises EngineError if it is too long or does not arrive."""
    body = b""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise RequestTooLongError(
                        f"the request's body is longer than {MAX_BODY_BYTES} bytes: send the "
                        "body that docs/engines.md describes"
                    )
    except TimeoutError:
        raise DeadlineExceededError(
            f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s: send all of it"
        ) from None

    return body


async def _wait_for_hang_up(request: Request) -> None:
    """Returns when the client closes the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    """Turns an exception of a route into an HTTP answer."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)

    is_invalid = isinstance(error, msgspec.MsgspecError)
    if not isinstance(error, EngineError):
        error = EngineError(f"the request's body is not valid: {error}")

    status, content = status_and_answer(error)
    return _json(content, 400 if is_invalid else status)


def _json(content: object, status: int) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


@asynccontextmanager
async def listening(
    app: EngineApp, listener: socket.socket, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serves on the socket while the block runs, then closes the application. Raises EngineError if
    the server ends by itself."""
    async with serving(
        app.app,
        listener,
        close=app.close,
        tls=tls,
        ws=WebSocketProtocol,
        ws_max_size=MAX_BYTES,
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_per_message_deflate=False,
    ):
        yield
