"""The session routes (session_routes.py) in the OpenAPI page of `agentevo gateway`. Their bodies
and answers are these records, so the page always matches them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from agentevo.agents.posted_rewards import PostedReward
from agentevo.rollout.outside import SessionState
from agentevo.types import Trajectory


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
_OF_ALL = {
    401: "The key is missing, or is not valid here.",
    429: "Too many requests, sessions or rewards.",
    503: "The gateway is starting, or no engine serves yet.",
    504: "No answer in time.",
}
_OF_ONE = {404: "The session does not exist."}
_OF_BODY = {
    400: "The body is not valid.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
}


def _told(
    summary: str,
    answer: Any,
    failures: dict[int, str],
    *,
    status: int = 200,
    body: type | None = None,
    of_one: bool = True,
    links: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments of FastAPI's decorator for a route."""
    failure = {"application/json": {"schema": _SCHEMAS[FailureBody]}}
    answered = {"description": "The answer.", "content": {"application/json": {"schema": answer}}}

    extra: dict[str, Any] = {"security": [{"bearer": []}]}
    if body is not None:
        content = {"application/json": {"schema": _SCHEMAS[body]}}
        extra["requestBody"] = {"required": False, "content": content}
        failures = failures | _OF_BODY

    if of_one:
        name = {"name": "session", "in": "path", "required": True, "schema": {"type": "string"}}
        extra["parameters"] = [name]
        failures = failures | _OF_ONE

    return {
        "summary": summary,
        "status_code": status,
        "responses": {status: answered | ({"links": links} if links else {})}
        | {
            code: {"description": text, "content": failure}
            for code, text in sorted((failures | _OF_ALL).items())
        },
        "openapi_extra": extra,
    }


def _link(path: str, method: str) -> dict[str, Any]:
    """From the answer that opens a session to a request about it."""
    reference = f"#/paths/{path.replace('/', '~1')}/{method}"
    return {"operationRef": reference, "parameters": {"session": "$response.body#/id"}}


_BUSY = {409: "It is open, has ended, or does not fit its group."}
OPEN = _told(
    "Opens an attempt",
    _SCHEMAS[OpenedSession],
    _BUSY | {404: "With `next`: the run has made its last step."},
    status=201,
    body=OpenBody,
    of_one=False,
    links={
        "state": _link("/sessions/{session}", "get"),
        "reward": _link("/sessions/{session}/reward", "post"),
        "end": _link("/sessions/{session}/end", "post"),
        "trajectory": _link("/sessions/{session}/trajectory", "get"),
    },
)
ALL = _told("All attempts that are remembered", _SCHEMAS[SessionList], {}, of_one=False)
STATS = _told("Counts of sessions and engines", _COUNTS, {}, of_one=False)
STATE = _told("The progress of an attempt", _SCHEMAS[SessionState], {})
REWARD = _told("Post a reward for the attempt", _SCHEMAS[SessionState], _BUSY, body=PostedReward)
END = _told("End the attempt", _SCHEMAS[SessionState], _BUSY, body=EndBody)
TRAJECTORY = _told("The attempt as it was recorded", _SCHEMAS[Trajectory], _BUSY)
