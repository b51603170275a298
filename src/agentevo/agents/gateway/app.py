"""The gateway's HTTP application, on the gateway's own event loop. It finds out who sends a
request, limits the rate, bounds how long a client may take to read its answer, and turns failures
into answers. Its routes are those of the APIs (api_routes.py), those that a command adds
(routes.py), and for anybody

    GET  /health
    GET  /metrics         Prometheus's (metrics.py)
    GET  /openapi.json    the page of all routes (openapi.py)

A key comes in the path (/s/KEY/v1/...), as `X-AgentEvo-Session: KEY`, as `x-api-key: KEY` or as
`Authorization: Bearer KEY`; the first of them counts. A client without a valid key is a stranger,
and its connection is closed (inference/serving/admission.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

import agentevo
from agentevo.agents.capture import HEADER
from agentevo.agents.gateway import metrics, openapi
from agentevo.agents.gateway.api_routes import ApiRoutes
from agentevo.agents.gateway.body import json_response
from agentevo.agents.gateway.delivery import limit_sends
from agentevo.agents.gateway.metrics import GatewayMetrics
from agentevo.agents.gateway.rate_limit import RateLimit, address_of
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.routes import APIS, Caller, Handler, Routes
from agentevo.agents.gateway.session import GatewaySession
from agentevo.errors import EngineError
from agentevo.inference.serving.admission import AdmittedConnection

CLIENT_GONE = 499
"""Status of an answer whose client is gone."""
_HEADER = HEADER.lower().encode()
_KEY_HEADERS = (_HEADER, b"x-api-key", b"authorization")


class GatewayApp:
    """See the module. `sessions`: the open session of each key; `added`: the routes of the command
    that serves."""

    def __init__(
        self,
        sessions: Mapping[str, GatewaySession],
        *,
        model: str,
        timeout_s: float,
        max_body: int,
        max_image_body: int,
        requests_per_s: float = 0.0,
        added: Routes | None = None,
    ) -> None:
        self._sessions = sessions
        self._added = added
        self._rate = RateLimit(requests_per_s)
        self._metrics = GatewayMetrics()
        self._apis = ApiRoutes(
            sessions,
            model=model,
            timeout_s=timeout_s,
            max_body=max_body,
            max_image_body=max_image_body,
            count_tokens=self._metrics.count_tokens,
        )
        self._hot = {
            path: self._answering(self._apis, handler)
            for path, handler in self._apis.handlers.items()
        }
        self._http = FastAPI(
            title="AgentEvo gateway", version=agentevo.__version__, openapi_url=None
        )
        self._http.exception_handler(404)(self._no_route)
        self._http.exception_handler(405)(self._no_route)
        for routes in (self._apis, added):
            if routes is not None:
                self._add(routes)

        self._http.get("/health")(self._health)
        self._http.get("/metrics", response_class=PlainTextResponse)(self._prometheus)
        self._http.get("/openapi.json", include_in_schema=False)(self._page)

    def _add(self, routes: Routes) -> None:
        for method, path, handler, page in routes.table():
            answer = self._answering(routes, handler)
            if page is None:
                self._http.add_route(path, answer, [method], include_in_schema=False)
            else:
                self._http.add_api_route(path, answer, methods=[method], **page)

    def _answering(self, routes: Routes, handler: Handler) -> Handler:
        """The handler for clients with a valid key. Every failure becomes an answer here."""

        async def answer(request: Request) -> Response:
            try:
                self._check_caller(request, routes)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
                return routes.failure_response(request, error)

        return answer

    def _check_caller(self, request: Request, routes: Routes) -> None:
        """Raises Refusal for a wrong key, and for too many requests."""
        caller: Caller | None = request.scope["state"]["caller"]
        if caller is None:
            self._rate.take_wrong_key(address_of(request))
            raise routes.refuse_stranger()
        if caller.session is not None:
            self._rate.take(caller.session.allowance)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return

        connection: AdmittedConnection = scope["state"]["connection"]
        routes = self._routes_at(scope["path"])
        send = limit_sends(send)
        try:
            caller = await routes.find_caller(_key_in(scope), scope["path"])
            if caller is not None and not connection.admit():
                raise EngineError("too many connections: try again")
        except EngineError as error:
            refusal = Refusal(str(error), status=503, kind="server_error")
            response = routes.failure_response(Request(scope, receive), refusal)
            await response(scope, receive, send)
            return

        scope["state"]["caller"] = caller
        try:
            path = self._hot_path(scope)
            if path is None:
                await self._http(scope, receive, send)
            else:
                await self._answer_hot(path, scope, receive, send)
        except TimeoutError:  # the client does not read
            connection.cut()
        finally:
            if caller is not None:
                connection.leave()

    def _routes_at(self, path: str) -> Routes:
        """The part of the routes that a path belongs to."""
        if self._added is not None:
            for prefix in self._added.prefixes:
                if f"{path}/".startswith(f"{prefix}/"):
                    return self._added
        return self._apis

    def _hot_path(self, scope: Scope) -> str | None:
        """The path of a request to an API, which `_answer_hot` handles directly; None for others.
        Such requests are many, and FastAPI's layers cost more than all other work for them."""
        if scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if path.startswith("/s/"):
            path = "/" + path[3:].partition("/")[2]
        path = path.removeprefix("/v1")
        return path if path in self._hot else None

    async def _answer_hot(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._metrics
        started = time.perf_counter()
        metrics.num_under_way += 1
        try:
            response = await self._hot[path](Request(scope, receive))
            waited = time.perf_counter()
            await response(scope, receive, send)
            finished = time.perf_counter()
            metrics.count_answer(path, response.status_code, waited - started, finished - started)
        finally:
            metrics.num_under_way -= 1

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        endpoints = ", ".join(f"POST /v1{api.path}" for api in APIS)
        refusal = Refusal(
            f"there is no {request.method} {request.url.path}: use {endpoints}; /openapi.json "
            "lists all",
            status=status,
        )
        answer = self._routes_at(request.url.path).failure_response(request, refusal)
        if isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})
        return answer

    async def _health(self) -> Response:
        return json_response({"status": "ok"})

    async def _prometheus(self) -> Response:
        text = self._metrics.text(len(self._sessions))
        return Response(text, headers={"content-type": metrics.CONTENT_TYPE})

    async def _page(self) -> Response:
        schemas = {} if self._added is None else self._added.schemas
        return json_response(openapi.page(self._http, schemas))


def _key_in(scope: Scope) -> str:
    """The first key that a request has: one that is wrong is not made good by another."""
    path: str = scope["path"]
    key = path.split("/", 3)[2] if path.startswith("/s/") else ""
    if key:
        return key

    headers = {name: value for name, value in scope["headers"] if name in _KEY_HEADERS}
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    sent = (
        headers.get(_HEADER)
        or headers.get(b"x-api-key")
        or (bearer.strip() if scheme.lower() == b"bearer" else b"")
    )
    return sent.decode("latin-1")
