"""What an engine's server and its clients say to one another, as JSON, and how errors travel."""

from __future__ import annotations

import msgspec

from agentevo.errors import DeadlineExceededError, EngineError, EngineUnavailableError, RequestTooLongError
from agentevo.inference.engine import InFlight
from agentevo.types import SamplingParams


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /generate; the answer is a Completion."""

    prompt_ids: list[int]
    sampling: SamplingParams
    session: str | None = None
    deadline_s: float


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /release."""

    session: str


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /sleep."""

    in_flight: InFlight = "finish"
    deadline_s: float = 60.0


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /state, POST /sleep and POST /wake."""

    version: int
    asleep: bool
    stats: dict[str, float]
    name: str
    pid: int


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is no success."""

    error: str
    """A name in ERRORS."""
    message: str


ERRORS: dict[str, tuple[int, type[EngineError]]] = {
    "RequestTooLongError": (413, RequestTooLongError),
    "EngineUnavailableError": (503, EngineUnavailableError),
    "DeadlineExceededError": (504, DeadlineExceededError),
    "EngineError": (500, EngineError),
}
"""Name -> (HTTP status, class), the more specific before their parents."""


def status_and_answer(error: EngineError) -> tuple[int, ErrorAnswer]:
    """How the server says it."""
    name, (status, _) = next((name, entry) for name, entry in ERRORS.items() if isinstance(error, entry[1]))
    return status, ErrorAnswer(error=name, message=str(error))


def raised(body: bytes, status: int) -> EngineError:
    """The error that the client raises for an answer that is no success."""
    try:
        answer = msgspec.json.decode(body, type=ErrorAnswer)
    except msgspec.MsgspecError:
        return EngineError(f"the engine's server answered with HTTP status {status}: {body[:200].decode(errors='replace')}")
    return ERRORS.get(answer.error, (status, EngineError))[1](answer.message)
