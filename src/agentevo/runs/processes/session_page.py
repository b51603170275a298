"""The session routes (session_routes.py) in the OpenAPI page of `agentevo serve --gateway`. Their
bodies and answers are these records, so the page always matches them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from agentevo.agents.gateway import openapi
from agentevo.agents.posted_rewards import PostedReward
from agentevo.rollout.external_attempts import SessionState
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
