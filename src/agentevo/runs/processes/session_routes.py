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
sampler's. The records of bodies and answers also make the page of the gateway's OpenAPI.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import Request, Response

from agentevo.agents.gateway import openapi
from agentevo.agents.gateway.api_routes import MARGIN_S
from agentevo.agents.gateway.body import json_body, json_response, record_of
from agentevo.agents.gateway.bridge import Bridge
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.routes import Caller, GatewayRoute, Handler, Routes
from agentevo.agents.posted_rewards import PostedReward
from agentevo.inference.serving.secret import RunSecret
from agentevo.rollout.external_attempts import OutsideSession, OutsideSessions, SessionState
from agentevo.rollout.next_tasks import NextTasks
from agentevo.runtime.event_loop import in_thread
from agentevo.types import Task, Trajectory

T = TypeVar("T")

MAX_BODY_BYTES = 2**20


class OpenTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a task; see types.Task."""

    id: str
    query: str | None = None
    answer: Any = None
    scorer: str | None = None
    metadata: dict[str, Any] = {}


class OpenBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that opens an attempt."""

    next: bool = False
    task: OpenTask | None = None
    group: str | None = None
    size: int | None = None


class EndBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that ends an attempt."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    error: str | None = None


class ShownTask(msgspec.Struct, frozen=True):
    """A task as its agent gets it."""

    id: str
    query: str | None
    metadata: dict[str, Any]


class OpenedSession(SessionState, frozen=True, kw_only=True):
    """An attempt, and how its agent reaches the policy."""

    key: str
    base_url: str
    anthropic_base_url: str
    reward_url: str
    end_url: str
    task: ShownTask


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts that the gateway remembers."""

    object: Literal["list"] = "list"
    data: list[SessionState]


class SessionFailure(msgspec.Struct, frozen=True):
    """The reason of a refusal."""

    message: str
    type: str
    param: str | None
    code: str | None


class FailureBody(msgspec.Struct, frozen=True):
    """The body of a refusal."""

    error: SessionFailure


_RECORDS = (
    OpenBody,
    EndBody,
    PostedReward,
    OpenedSession,
    SessionState,
    SessionList,
    Trajectory,
    FailureBody,
)
_REFERENCES, SCHEMAS = msgspec.json.schema_components(
    _RECORDS, ref_template="#/components/schemas/{name}"
)
_SCHEMAS: dict[type, Any] = dict(zip(_RECORDS, _REFERENCES, strict=True))
_COUNTS = {"type": "object", "additionalProperties": {"type": "number"}}
_BUSY = {409: "It is open, has ended, or does not fit its group."}


def _link(path: str, method: str) -> dict[str, Any]:
    """From the answer that opens a session to a request about it."""
    reference = f"#/paths/{path.replace('/', '~1')}/{method}"
    return {"operationRef": reference, "parameters": {"session": "$response.body#/id"}}


def _describe(
    summary: str,
    answer: type | dict[str, Any],
    body: type | None = None,
    failures: dict[int, str] | None = None,
    *,
    is_of_session: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """See openapi.describe."""
    missing = {404: "The session does not exist."} if is_of_session else {}
    return openapi.describe(
        summary,
        _SCHEMAS[answer] if isinstance(answer, type) else answer,
        body=None if body is None else _SCHEMAS[body],
        needs_body=False,
        in_path="session" if is_of_session else "",
        failure=_SCHEMAS[FailureBody],
        failures=missing | (failures or {}),
        **more,
    )


OPEN = _describe(
    "Opens an attempt",
    OpenedSession,
    OpenBody,
    _BUSY | {404: "With `next`: the run has made its last step."},
    is_of_session=False,
    status=201,
    links={
        "state": _link("/sessions/{session}", "get"),
        "reward": _link("/sessions/{session}/reward", "post"),
        "end": _link("/sessions/{session}/end", "post"),
        "trajectory": _link("/sessions/{session}/trajectory", "get"),
    },
)
ALL = _describe("All attempts that are remembered", SessionList, is_of_session=False)
STATS = _describe("Counts of sessions and engines", _COUNTS, is_of_session=False)
STATE = _describe("The progress of an attempt", SessionState)
REWARD = _describe("Post a reward for the attempt", SessionState, PostedReward, _BUSY)
END = _describe("End the attempt", SessionState, EndBody, _BUSY)
TRAJECTORY = _describe("The attempt as it was recorded", Trajectory, failures=_BUSY)


class SessionRoutes(Routes):
    """See the module and Routes. `secret` is the gateway's key; `stats` gives what GET /stats
    answers, on the sampler's loop."""

    prefixes = ("/sessions", "/stats")
    schemas = SCHEMAS

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
        yield GatewayRoute("POST", "/sessions", self._open, OPEN)
        yield GatewayRoute("GET", "/sessions", self._all, ALL)
        yield GatewayRoute("GET", "/stats", self._counts, STATS)
        for method, below, work, body, page in (
            ("GET", "", self._state, None, STATE),
            ("POST", "/reward", self._reward, PostedReward, REWARD),
            ("POST", "/end", self._end, EndBody, END),
            ("GET", "/trajectory", self._trajectory, None, TRAJECTORY),
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
