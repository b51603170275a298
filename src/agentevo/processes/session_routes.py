"""The routes by which agents outside of a run open, reward and end attempts (rollout/outside.py).

    POST /sessions                  {"task": {...}, "group": "g", "size": 8}, all of it optional
    GET  /sessions                  all remembered sessions
    GET  /sessions/ID               its progress
    POST /sessions/ID/reward        as POST /s/KEY/reward
    POST /sessions/ID/end           {"reward": ..., "error": ...}, both optional
    GET  /sessions/ID/trajectory    ids, log-probs, versions, messages; once the session has ended
    GET  /stats                     counts of sessions and engines

All routes need `Authorization: Bearer KEY` with the gateway's key; those of one session accept that
session's own key as well. They run on the gateway's event loop, and their calls on the sampler's.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from agentevo.agents.posted_rewards import PostedReward
from agentevo.errors import EngineError, StoreError
from agentevo.gateway import chat_completions
from agentevo.gateway.app import CLIENT_GONE, MARGIN_S
from agentevo.gateway.body import json_body, record_of
from agentevo.gateway.bridge import Bridge
from agentevo.gateway.rate_limit import RateLimit, address_of, retry_headers
from agentevo.gateway.refusals import Refusal, refusal_of
from agentevo.inference.admission import AdmittedConnection
from agentevo.inference.secret import RunSecret
from agentevo.processes import session_page
from agentevo.processes.session_page import (
    EndBody,
    OpenBody,
    OpenedSession,
    SessionList,
    ShownTask,
)
from agentevo.rollout.next_tasks import NextTasks
from agentevo.rollout.outside import OutsideSession, OutsideSessions, SessionState
from agentevo.types import Task

T = TypeVar("T")

MAX_BODY_BYTES = 2**20
_JSON = msgspec.json.Encoder(enc_hook=lambda column: column.tolist())  # columns of turns


class SessionRoutes:
    """See the module. `secret` is the gateway's key; `stats` gives what GET /stats answers, on the
    sampler's loop."""

    def __init__(
        self,
        sessions: OutsideSessions,
        secret: RunSecret,
        stats: Callable[[], dict[str, float]],
        next_tasks: NextTasks,
        requests_per_s: float = 0.0,
    ) -> None:
        self._sessions = sessions
        self._secret = secret
        self._stats = stats
        self._next_tasks = next_tasks
        self._rate = RateLimit(requests_per_s)
        self.bridge: Bridge | None = None
        """To the sampler's loop; set before the first request is answered."""
        app = FastAPI(title="AgentEvo sessions", openapi_url=None)
        app.post("/sessions", **session_page.OPEN)(self._open)
        app.get("/sessions", **session_page.ALL)(self._all)
        app.get("/stats", **session_page.STATS)(self._counts)
        app.get("/sessions/{session}", **session_page.STATE)(self._state)
        app.post("/sessions/{session}/reward", **session_page.REWARD)(self._reward)
        app.post("/sessions/{session}/end", **session_page.END)(self._end)
        app.get("/sessions/{session}/trajectory", **session_page.TRAJECTORY)(self._trajectory)
        self._app = app

    def page(self) -> dict[str, Any]:
        """The entries of these routes in the gateway's OpenAPI page."""
        return session_page.page(self._app)

    def in_front_of(self, app: ASGIApp) -> ASGIApp:
        """These routes, and the other application for every other path."""

        async def both(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"].split("/")[1:2] not in (
                ["sessions"],
                ["stats"],
            ):
                await app(scope, receive, send)
                return

            connection: AdmittedConnection = scope["state"]["connection"]
            scope["state"]["bearer"] = bearer = _bearer(scope)
            # A key of the right length may be a session's; a client without one is cut off.
            is_admitted = bool(bearer) and connection.admit()
            try:
                await self._app(scope, receive, send)
            finally:
                if is_admitted:
                    connection.leave()

        return both

    async def _open(self, request: Request) -> Response:
        async def open_session() -> Response:
            self._check_admin(request)
            body = await _read(request, OpenBody)
            if body.size is not None and body.group is None:
                raise Refusal("size is the number of a group's attempts: name one", param="size")
            if body.next and (body.task, body.group) != (None, None):
                raise Refusal("`next` selects a task and a group of the run: leave out yours")

            task = None if body.task is None else Task(**msgspec.structs.asdict(body.task))
            session = await self._there(
                self._next_tasks.open()
                if body.next
                else self._sessions.open(task, body.group, body.size)
            )
            answer = _json(self._describe_opened(session), 201)
            answer.headers.update(session.trace)

            return answer

        return await self._respond(request, open_session)

    def _describe_opened(self, session: OutsideSession) -> OpenedSession:
        door = session.gateway_session
        task = session.task
        assert door is not None
        return OpenedSession(
            **msgspec.structs.asdict(session.state()),
            key=door.key,
            base_url=door.base_url,
            anthropic_base_url=door.base,
            reward_url=door.reward_url,
            end_url=f"{door.base}/sessions/{session.id}/end",
            task=ShownTask(id=task.id, query=task.query, metadata=task.metadata),
        )

    async def _all(self, request: Request) -> Response:
        async def list_sessions() -> Response:
            self._check_admin(request)

            async def states() -> SessionList:
                return SessionList(data=[session.state() for session in self._sessions.all()])

            return _json(await self._there(states()))

        return await self._respond(request, list_sessions)

    async def _counts(self, request: Request) -> Response:
        async def count_sessions() -> Response:
            self._check_admin(request)

            async def stats() -> dict[str, float]:
                return self._stats() | self._sessions.stats()

            return _json(await self._there(stats()))

        return await self._respond(request, count_sessions)

    async def _state(self, request: Request) -> Response:
        async def state(session: OutsideSession, body: None) -> SessionState:
            return session.state()

        return await self._of_one(request, None, state)

    async def _reward(self, request: Request) -> Response:
        async def post(session: OutsideSession, body: PostedReward) -> SessionState:
            self._sessions.post(session, body)
            return session.state()

        return await self._of_one(request, PostedReward, post)

    async def _end(self, request: Request) -> Response:
        async def end(session: OutsideSession, body: EndBody) -> SessionState:
            if not session.ended.is_set() and not session.over.is_set():
                rewards = [PostedReward(rewards=body.rewards)] if body.rewards else []
                if body.reward is not None:
                    rewards.append(PostedReward(reward=body.reward))
                self._sessions.post(session, *rewards)
            await self._sessions.end(session, body.error)
            return session.state()

        return await self._of_one(request, EndBody, end)

    async def _trajectory(self, request: Request) -> Response:
        async def export_session(session: OutsideSession, body: None) -> Any:
            if not session.over.is_set():
                raise Refusal("this session is open: end it first", status=409)
            return session.export()

        return await self._of_one(request, None, export_session)

    async def _of_one(
        self,
        request: Request,
        kind: type[Any] | None,
        work: Callable[[OutsideSession, Any], Coroutine[Any, Any, Any]],
    ) -> Response:
        """`work` with the session that the path names, and the body as such a record, on the
        sampler's loop; for clients with the right key."""
        bearer: str = request.scope["state"]["bearer"]

        async def there() -> OutsideSession:
            session = self._sessions.find(request.path_params["session"])
            key = "" if session.gateway_session is None else session.gateway_session.key
            if not hmac.compare_digest(bearer.encode(), key.encode()):
                self._check_admin(request)
            return session

        async def respond() -> Response:
            if not bearer:
                raise _stranger()
            session = await self._there(there())
            if session.gateway_session is not None and bearer == session.gateway_session.key:
                self._rate.take(session.gateway_session.allowance)
            body = None if kind is None else await _read(request, kind)
            return _json(await self._there(work(session, body)))

        return await self._respond(request, respond)

    async def _count_refusals(
        self, request: Request, work: Callable[[], Awaitable[Response]]
    ) -> Response:
        try:
            return await work()
        except Refusal as refusal:
            if refusal.status == 401:
                self._rate.take_wrong_key(address_of(request))
            raise

    async def _respond(self, request: Request, work: Callable[[], Awaitable[Response]]) -> Response:
        """The one place where a failure becomes an answer."""
        try:
            return await self._count_refusals(request, work)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client gets an answer)
            refusal = _refusal_of(error)
            answer = _json(chat_completions.API.error(refusal), refusal.status)
            answer.headers.update(retry_headers(refusal))
            return answer

    def _check_admin(self, request: Request) -> None:
        if not self._secret.is_in(f"Bearer {request.scope['state']['bearer']}"):
            raise _stranger()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the sampler's loop."""
        if self.bridge is None:
            raise Refusal("the gateway is starting: try again", status=503, kind="server_error")
        async with asyncio.timeout(MARGIN_S):
            return await self.bridge.submit(work, contextvars.copy_context())


def _refusal_of(error: Exception) -> Refusal:
    if isinstance(error, StoreError):
        return Refusal(str(error), status=409)
    if isinstance(error, EngineError) and "secret" in str(error):  # the key can't be read here
        return Refusal(str(error), status=503, kind="server_error")
    return refusal_of(error)


def _stranger() -> Refusal:
    return Refusal(
        "the key is wrong or missing: send `Authorization: Bearer` with the content of "
        "gateway/secret in the run's folder, or with the session's own key",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def _bearer(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""


async def _read(request: Request, kind: type[T]) -> T:
    """The body as such a record; an empty body is a record without fields."""
    value = await json_body(request, MAX_BODY_BYTES, of="of a session", may_be_empty=True)
    return record_of(value, kind, "the body")


def _json(content: object, status: int = 200) -> Response:
    return Response(_JSON.encode(content), status_code=status, media_type="application/json")
