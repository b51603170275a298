"""The gateway's routes, on the gateway's own event loop.

    POST /v1/chat/completions        chat_completions.py, and so on: every API is a file (api.py)
    POST /v1/completions             completions.py
    GET  /v1/responses/ID            an answer that is kept; DELETE forgets it
    GET  /v1/responses/ID/input_items    what it was asked (kept_responses.py)
    POST /v1/messages/count_tokens   tokens of a prompt, in the form of anthropic_messages.py
    GET  /v1/models                  the policy's name; GET /v1/models/NAME whether it is one
    POST /s/KEY/reward               {"reward": 1.0}, {"rewards": {"name": 1.0}} or with "turn": 0
    GET  /health                     for anybody, as are:
    GET  /metrics                    Prometheus's (door_metrics.py)
    GET  /openapi.json               the page of these routes (openapi.py)

A session's key comes in the path (/s/KEY/v1/...), as `X-AgentEvo-Session: KEY`, as `x-api-key: KEY`
or as `Authorization: Bearer KEY`; the first of them counts. An answer that is none has the form of
its API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

import agentevo
from agentevo import trace_header
from agentevo.agents.capture import HEADER
from agentevo.agents.posted_rewards import PostedReward
from agentevo.errors import shown
from agentevo.gateway import (
    anthropic_messages,
    chat_completions,
    completions,
    door_metrics,
    openapi,
    responses,
)
from agentevo.gateway.api import Api
from agentevo.gateway.body import json_body, record_of
from agentevo.gateway.delivery import Awaited, DeliveredTokens, EventStream, WholeAnswer
from agentevo.gateway.door_metrics import DoorMetrics
from agentevo.gateway.kept_responses import forget, found, input_items
from agentevo.gateway.memory import Memory
from agentevo.gateway.rate_limit import RateLimit, address_of, retry_headers
from agentevo.gateway.refusals import Refusal, refusal_of
from agentevo.gateway.request import Delivery
from agentevo.gateway.session import GatewaySession, over
from agentevo.inference.admission import AdmittedConnection
from agentevo.store.trace_context import TracePlace, read_traceparent

MARGIN_S = 30.0
"""The seconds beyond the engine's own deadline after which a request fails."""
CLIENT_GONE = 499
APIS: tuple[Api[Any], ...] = (
    chat_completions.API,
    completions.API,
    responses.API,
    anthropic_messages.API,
)
"""The form of the first applies to requests outside of all APIs."""

KEPT: tuple[tuple[str, str, str, Callable[[Memory, str, Mapping[str, str]], Any]], ...] = (
    ("GET", "", "A stored answer", lambda memory, name, _: found(memory, name).body),
    ("DELETE", "", "Deletes a stored answer", lambda memory, name, _: forget(memory, name)),
    ("GET", "/input_items", "The input of a stored answer", input_items),
)
"""Method, path below an answer's, summary, and the answer's answer."""

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
_HEADER = HEADER.lower().encode()
_TRACEPARENT = trace_header.HEADER.encode()
_KEY_HEADERS = (_HEADER, b"x-api-key", b"authorization")


class Routes:
    """The application. `sessions`: the open session of each key; `more_page`: what the page has of
    other routes at this port."""

    def __init__(
        self,
        sessions: Mapping[str, GatewaySession],
        *,
        model: str,
        timeout_s: float,
        max_body: int,
        requests_per_s: float = 0.0,
        more_page: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._timeout_s = timeout_s
        self._max_body = max_body
        self._rate = RateLimit(requests_per_s)
        self._more_page = more_page
        self._started_at = int(time.time())
        self._metrics = DoorMetrics()
        self._hot = {api.path: self._route(api) for api in APIS}
        self.app = FastAPI(title="AgentEvo gateway", version=agentevo.__version__, openapi_url=None)

        self.app.exception_handler(404)(self._no_route)
        self.app.exception_handler(405)(self._no_route)
        for prefix in ("/v1", "/s/{key}/v1", "/s/{key}"):
            self._add_apis(prefix, on_page=prefix == "/v1")

        arguments = openapi.describe("/reward", "A reward of the attempt")
        self.app.post("/s/{key}/reward", **arguments)(self._reward)
        self.app.get("/health")(self._health)
        self.app.get("/metrics", response_class=PlainTextResponse)(self._prometheus)
        self.app.get("/openapi.json", include_in_schema=False)(self._page)

    def _add_apis(self, prefix: str, *, on_page: bool) -> None:
        for path, endpoint in self._hot.items():
            arguments = openapi.describe(path, f"A completion: {path}", events=True)
            self.app.post(prefix + path, include_in_schema=on_page, **arguments)(endpoint)

        count = anthropic_messages.COUNT_PATH
        arguments = openapi.describe(count, "Tokens of a prompt")
        self.app.post(prefix + count, include_in_schema=on_page, **arguments)(self._count_tokens)

        response_path = f"{prefix}{responses.API.path}/{{response_id}}"
        for method, path, summary, about in KEPT:
            self.app.add_api_route(
                response_path + path,
                self._kept(about),
                methods=[method],
                include_in_schema=on_page,
                **openapi.of_kept(summary),
            )

        models = self.app.get(
            prefix + "/models", include_in_schema=on_page, **openapi.route_arguments("The models")
        )
        models(self._models)
        self.app.add_api_route(
            prefix + "/models/{name:path}",
            self._model_named,
            include_in_schema=on_page,
            **openapi.of_model(),
        )

    async def guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application behind the admission of connections (inference/admission.py): a client
        without a key is a stranger, and its connection is closed."""
        if scope["type"] != "http":
            return

        connection: AdmittedConnection = scope["state"]["connection"]
        session = self._find_in(scope)
        scope["state"]["session"] = session
        if session is not None and not connection.admit():
            refusal = Refusal("too many connections: try again", status=503, kind="server_error")
            response = _refusal_response(refusal, _api_at(scope["path"]))
            await response(scope, receive, send)
            return

        try:
            path = self._hot_path(scope)
            if path is None:
                await self.app(scope, receive, send)
            else:
                await self._answer(path, scope, receive, send)
        finally:
            if session is not None:
                connection.leave()

    def _hot_path(self, scope: Scope) -> str | None:
        """The path of a request to an API, which `_answer` handles directly; None for others. Such
        requests are many, and the application's layers cost more than all other work for them."""
        if scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if path.startswith("/s/"):
            path = "/" + path[3:].partition("/")[2]
        path = path.removeprefix("/v1")
        return path if path in self._hot else None

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
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

    def _route(self, api: Api[Any]) -> Endpoint:
        async def complete(request: Request) -> Response:
            delivery = Delivery(place=_place_in(request.scope))
            return await self._respond(request, partial(self._complete, api, delivery), api)

        return complete

    async def _complete(
        self,
        api: Api[Any],
        delivery: Delivery,
        session: GatewaySession,
        body: dict[str, Any],
        client: AdmittedConnection,
    ) -> Response:
        request = api.request_of(body, session.memory)
        if request.stream:
            return await self._stream_answer(api, session, request, delivery, client)

        try:
            work = session.submit(session.complete(request, delivery))
            who, within_s = session.wait_of(request.model, self._timeout_s)
            with self._await_within(work, client, who, within_s) as awaited:
                replies = await awaited.result()

            self._metrics.count_tokens(replies)
            content = msgspec.json.encode(api.answer(request, replies))
        except BaseException:
            session.lose(delivery)
            raise

        return WholeAnswer(content, delivery, session)

    async def _stream_answer(
        self,
        api: Api[Any],
        session: GatewaySession,
        request: Any,
        delivery: Delivery,
        client: AdmittedConnection,
    ) -> Response:
        """Streams the answer as it comes. A failure before the first token is an answer of its
        own."""
        delivered = DeliveredTokens()
        on_pieces = session.bridge_pieces(delivered.add)
        work = session.submit(session.complete(request, delivery, on_pieces))
        who, within_s = session.wait_of(request.model, self._timeout_s)
        awaited = self._await_within(work, client, who, within_s).__enter__()
        awaited.when_done(delivered.wake)
        try:
            await delivered.wait()
            if not delivered.has_news:
                await awaited.result()
            return EventStream(
                api, request, delivered, awaited, delivery, session, self._metrics.count_tokens
            )
        except BaseException:
            awaited.__exit__(None, None, None)
            session.lose(delivery)
            raise

    def _await_within(
        self, work: asyncio.Future[T], client: AdmittedConnection, who: str, within_s: float
    ) -> Awaited[T]:
        return Awaited(work, client, within_s + MARGIN_S, who)

    async def _count_tokens(self, request: Request) -> Response:
        async def count(
            session: GatewaySession, body: dict[str, Any], client: AdmittedConnection
        ) -> Response:
            prompt = anthropic_messages.counted_of(body)
            work = session.submit(session.count_tokens(prompt))
            with self._await_within(work, client, "the policy", self._timeout_s) as awaited:
                return _json({"input_tokens": await awaited.result()})

        return await self._respond(request, count, anthropic_messages.API)

    async def _reward(self, request: Request) -> Response:
        async def post(
            session: GatewaySession, body: dict[str, Any], client: AdmittedConnection
        ) -> Response:
            reward = record_of(body, PostedReward, "the reward")

            async def post_reward() -> None:
                session.post(reward)

            async with asyncio.timeout(MARGIN_S):
                await session.submit(post_reward())
            return _json({"posted": len(session.posted)})

        return await self._respond(request, post)

    def _kept(self, about: Callable[[Memory, str, Mapping[str, str]], Any]) -> Endpoint:
        async def told(request: Request) -> Response:
            try:
                memory = self._session(request).memory
                name = request.path_params["response_id"]
                return _json(about(memory, name, request.query_params))
            except Refusal as refusal:
                return _refusal_response(refusal, responses.API)

        return told

    async def _models(self, request: Request) -> Response:
        try:
            names = self._model_names(self._session(request))
        except Refusal as refusal:
            return _refusal_response(refusal, _api_of(request))
        return _json({"object": "list", "data": list(map(self._about, names))})

    async def _model_named(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            names = self._model_names(self._session(request))
            if name not in names:
                raise Refusal(
                    f"there is no model {shown(name)} (there is: {', '.join(names)})",
                    status=404,
                    code="model_not_found",
                    param="model",
                )
        except Refusal as refusal:
            return _refusal_response(refusal, _api_of(request))
        return _json(self._about(name))

    def _model_names(self, session: GatewaySession) -> list[str]:
        return [
            *(list(filter(None, session.conversations)) or [self._model]),
            *filter(None, session.remote_agents),
            *(session.remote.models if session.remote else ()),
        ]

    def _about(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "agentevo",
        }

    async def _no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        endpoints = ", ".join(f"POST /v1{api.path}" for api in APIS)
        refusal = Refusal(
            f"there is no {request.method} {request.url.path}: use {endpoints}; /openapi.json "
            "lists all",
            status=status,
        )
        answer = _refusal_response(refusal, _api_of(request))
        if isinstance(error, HTTPException):
            answer.headers.update(error.headers or {})
        return answer

    async def _health(self) -> Response:
        return _json({"status": "ok"})

    async def _prometheus(self) -> Response:
        text = self._metrics.text(len(self._sessions))
        return Response(text, headers={"content-type": door_metrics.CONTENT_TYPE})

    async def _page(self) -> Response:
        return _json(openapi.page(self.app, self._more_page() if self._more_page else {}))

    async def _respond(
        self,
        request: Request,
        answer: Callable[[GatewaySession, dict[str, Any], AdmittedConnection], Awaitable[Response]],
        api: Api[Any] = APIS[0],
    ) -> Response:
        """The one place where a failure becomes an answer, in the API's form."""
        try:
            session = self._session(request)
            body = await json_body(request, self._max_body, of="gateway.max_body_mb")
            return await answer(session, body, request.scope["state"]["connection"])
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
            return _refusal_response(refusal_of(error), api)

    def _session(self, request: Request) -> GatewaySession:
        """The session of a request. Raises Refusal for a wrong key, and for too many requests."""
        session: GatewaySession | None = request.scope["state"]["session"]
        if session is None:
            self._rate.take_wrong_key(address_of(request))
            raise over()
        self._rate.take(session.allowance)
        return session

    def _find_in(self, scope: Scope) -> GatewaySession | None:
        """The open session of the first key that the request has: one that is wrong is not made
        good by another."""
        path: str = scope["path"]
        key = path.split("/", 3)[2] if path.startswith("/s/") else ""
        if not key:
            headers = {name: value for name, value in scope["headers"] if name in _KEY_HEADERS}
            scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
            key = (
                headers.get(_HEADER)
                or headers.get(b"x-api-key")
                or (bearer.strip() if scheme.lower() == b"bearer" else b"")
            ).decode("latin-1")

        return self._sessions.get(key) if key else None


def _place_in(scope: Scope) -> TracePlace | None:
    """The place in a trace that a request names."""
    traceparent = next((value for name, value in scope["headers"] if name == _TRACEPARENT), None)
    return None if traceparent is None else read_traceparent(traceparent.decode("latin-1"))


def _api_of(request: Request) -> Api[Any]:
    """The client's API, if the path does not name it."""
    speaks_anthropic = "anthropic-version" in request.headers
    return anthropic_messages.API if speaks_anthropic else _api_at(request.url.path)


def _api_at(path: str) -> Api[Any]:
    return next((api for api in APIS if api.path in path), APIS[0])


def _refusal_response(refusal: Refusal, api: Api[Any]) -> Response:
    answer = _json(api.error(refusal), api.statuses.get(refusal.status, refusal.status))
    answer.headers.update(retry_headers(refusal))
    return answer


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
