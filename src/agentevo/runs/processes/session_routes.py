"""The routes by which agents outside of a run open, reward and end attempts
(rollout/external_attempts.py).

    POST /sessions                  {"task": {...}, "group": "g", "size": 8}, all of it optional
    GET  /sessions                  all remembered sessions
    GET  /sessions/ID               its progress
    POST /sessions/ID/reward        as POST /s/KEY/reward
    POST /sessions/ID/end           {"reward": ..., "error": ...}, both optional
    GET  /sessions/ID/trajectory    ids, log-probs, versions, messages; once the session has ended
    GET  /stats                     counts of sessions and engines

All routes are open to the gateway's key, and those of one session to that session's own key as
well, also after it has ended. They run on the gateway's event loop, and their calls on the
sampler's.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from agentevo.agents.gateway.api_routes import MARGIN_S
from agentevo.agents.gateway.body import json_body, json_response, record_of
from agentevo.agents.gateway.bridge import Bridge
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.routes import Caller, GatewayRoute, Handler, Routes
from agentevo.agents.posted_rewards import PostedReward
from agentevo.inference.serving.secret import RunSecret
from agentevo.rollout.external_attempts import OutsideSession, OutsideSessions, SessionState
from agentevo.rollout.next_tasks import NextTasks
from agentevo.runs.processes import session_page
from agentevo.runs.processes.session_page import (
    EndBody,
    OpenBody,
    OpenedSession,
    SessionList,
    ShownTask,
)
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Task

T = TypeVar("T")

MAX_BODY_BYTES = 2**20


class SessionRoutes(Routes):
    """See the module and Routes. `secret` is the gateway's key; `stats` gives what GET /stats
    answers, on the sampler's loop."""

    prefixes = ("/sessions", "/stats")
    schemas = session_page.SCHEMAS

    def __init__(
        self,
        sessions: OutsideSessions,
        secret: RunSecret,
        stats: Callable[[], dict[str, float]],
        next_tasks: NextTasks,
    ) -> None:
        self._sessions = sessions
        self._secret = secret
        self._stats = stats
        self._next_tasks = next_tasks
        self.bridge: Bridge | None = None
        """To the sampler's loop; set before the first request is answered."""

    def table(self) -> Iterator[GatewayRoute]:
        yield GatewayRoute("POST", "/sessions", self._open, session_page.OPEN)
        yield GatewayRoute("GET", "/sessions", self._all, session_page.ALL)
        yield GatewayRoute("GET", "/stats", self._counts, session_page.STATS)
        for method, below, work, body, page in (
            ("GET", "", self._state, None, session_page.STATE),
            ("POST", "/reward", self._reward, PostedReward, session_page.REWARD),
            ("POST", "/end", self._end, EndBody, session_page.END),
            ("GET", "/trajectory", self._trajectory, None, session_page.TRAJECTORY),
        ):
            handler = self._of_session(work, body)
            yield GatewayRoute(method, "/sessions/{session}" + below, handler, page)

    async def find_caller(self, key: str, path: str) -> Caller | None:
        session_id = path.removeprefix("/sessions/").split("/")[0]
        own = self._sessions.find_by_key(session_id, key)
        if own is not None:
            return Caller(own)
        return Caller() if await in_thread(self._secret.matches_header, f"Bearer {key}") else None

    def refuse_stranger(self) -> Refusal:
        return Refusal(
            "the key is wrong or missing: send `Authorization: Bearer` with the content of "
            "gateway/secret in the run's folder, or with the session's own key",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    async def _open(self, request: Request) -> Response:
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
        response = json_response(_describe_opened(session), 201)
        response.headers.update(session.trace)

        return response

    async def _all(self, request: Request) -> Response:
        async def states() -> SessionList:
            return SessionList(data=[session.state() for session in self._sessions.all()])

        return json_response(await self._there(states()))

    async def _counts(self, request: Request) -> Response:
        async def stats() -> dict[str, float]:
            return self._stats() | self._sessions.stats()

        return json_response(await self._there(stats()))

    def _of_session(
        self,
        work: Callable[[OutsideSession, Any], Coroutine[Any, Any, Any]],
        kind: type[Any] | None,
    ) -> Handler:
        """The handler that does `work`, on the sampler's loop, with the session that the path names
        and the body as a record of this kind."""

        async def answer(request: Request) -> Response:
            body = None if kind is None else await _read(request, kind)

            async def there() -> Any:
                return await work(self._sessions.find(request.path_params["session"]), body)

            return json_response(await self._there(there()))

        return answer

    async def _state(self, session: OutsideSession, body: None) -> SessionState:
        return session.state()

    async def _reward(self, session: OutsideSession, body: PostedReward) -> SessionState:
        self._sessions.post(session, body)
        return session.state()

    async def _end(self, session: OutsideSession, body: EndBody) -> SessionState:
        if not session.ended.is_set() and not session.over.is_set():
            rewards = [PostedReward(rewards=body.rewards)] if body.rewards else []
            if body.reward is not None:
                rewards.append(PostedReward(reward=body.reward))
            self._sessions.post(session, *rewards)
        await self._sessions.end(session, body.error)
        return session.state()

    async def _trajectory(self, session: OutsideSession, body: None) -> Any:
        if not session.over.is_set():
            raise Refusal("this session is open: end it first", status=409)
        return session.export()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the sampler's loop."""
        if self.bridge is None:
            work.close()
            raise Refusal("the gateway is starting: try again", status=503, kind="server_error")
        async with asyncio.timeout(MARGIN_S):
            return await self.bridge.submit(work, contextvars.copy_context())


def _describe_opened(session: OutsideSession) -> OpenedSession:
    own = session.gateway_session
    task = session.task
    assert own is not None
    return OpenedSession(
        **msgspec.structs.asdict(session.state()),
        key=own.key,
        base_url=own.base_url,
        anthropic_base_url=own.base,
        reward_url=own.reward_url,
        end_url=f"{own.base}/sessions/{session.id}/end",
        task=ShownTask(id=task.id, query=task.query, metadata=task.metadata),
    )


async def _read(request: Request, kind: type[T]) -> T:
    """The body as such a record; an empty body is a record without fields."""
    value = await json_body(request, MAX_BODY_BYTES, of="of a session", may_be_empty=True)
    return record_of(value, kind, "the body")
