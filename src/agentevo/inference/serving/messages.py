"""The messages between an engine's server and its clients, and how errors travel.

Each client has one WebSocket per engine (`/requests`). A frame is a list of messages in
MessagePack: `list[ToEngine]` to the engine, `list[FromEngine]` from it. The sender puts all
messages that are waiting at that moment into one frame (`Outbox`). An answer has the id that the
client chose for its request. Answers come when they are ready, in any order. For scripts there are
routes with JSON over HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec

from agentevo.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnavailableError,
    GrammarError,
    RequestTooLongError,
)
from agentevo.inference.engine import InFlight
from agentevo.types import Completion, SamplingParams
from agentevo.types.images import PromptImage

SessionName = Annotated[str, msgspec.Meta(max_length=1024)]
PATH = "/requests"
"""The path of the WebSocket, appended to the engine's URL."""
MAX_BYTES = 64 * 2**20
"""The largest frame. A receiver refuses a larger one. Screenshots of a long conversation fit."""
MAX_MESSAGES = 4096
"""The most messages of a frame."""
FRAME_BYTES = 2**20
"""A frame that reaches this length is sent, and further messages go into the next frame."""
MAX_TOKENS = 4096
"""The most tokens of a DrawnTokens message."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine; also the JSON answer to GET /state, POST /sleep and POST /wake."""

    version: int
    asleep: bool
    stats: dict[str, float]
    name: str
    pid: int


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Answered by Completed or FailedRequest, unless it is cancelled."""

    id: int
    """Higher than all ids that the client has sent before, including ids of WatchRequest."""
    prompt_ids: list[int]
    sampling: SamplingParams
    session: SessionName | None = None
    deadline_s: float
    stream: bool = False
    """The client wants tokens as they are sampled, before Completed."""
    images: list[PromptImage] = []
    """The images of the prompt, with the bytes of their files."""


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Answered by Completed, with the given tokens and their log-probs, or FailedRequest, unless it
    is cancelled."""

    id: int
    """See Generate.id."""
    context_ids: list[int]
    ids: list[int]
    temperature: float = 1.0
    deadline_s: float
    images: list[PromptImage] = []
    """Those of the context, as in Generate."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The client no longer waits for this request. No answer."""

    id: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Frees the cache of a conversation. No answer."""

    session: SessionName


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """Asks for a StateReport now, every `every_s`, and whenever the version changes or the engine
    falls asleep or wakes."""

    id: int
    every_s: float


class DrawnTokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """The next tokens of a request with `stream`. Tokens that are not yet in a frame when Completed
    is sent are only in Completed."""

    id: int
    ids: list[int]
    logprobs: list[float]


class Completed(msgspec.Struct, frozen=True, kw_only=True, tag="completed"):
    id: int
    completion: Completion


class FailedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    id: int
    error: str
    """A name in ERRORS."""
    message: str


class StateReport(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The first message on a connection. Later reports are sent as WatchRequest asks."""

    state: EngineState
    yours: int
    """The number of this client's requests that are in the engine now."""
    watch: int = 0
    """Id of the last WatchRequest that arrived."""


ToEngine = Generate | ScoreRequest | Cancel | Release | WatchRequest
FromEngine = DrawnTokens | Completed | FailedRequest | StateReport


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /sleep, in JSON."""

    in_flight: InFlight = "finish"
    deadline_s: float = 60.0


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every HTTP error answer, in JSON."""

    error: str
    """A name in ERRORS."""
    message: str


ERRORS: dict[str, tuple[int, type[EngineError]]] = {
    "RequestTooLongError": (413, RequestTooLongError),
    "GrammarError": (400, GrammarError),
    "EngineUnavailableError": (503, EngineUnavailableError),
    "DeadlineExceededError": (504, DeadlineExceededError),
    "EngineError": (500, EngineError),
}
"""Name -> (HTTP status, class). Subclasses come before their parents."""


def status_and_answer(error: EngineError) -> tuple[int, ErrorAnswer]:
    """An error as the server's answer over HTTP."""
    name, (status, _) = next(
        (name, entry) for name, entry in ERRORS.items() if isinstance(error, entry[1])
    )
    return status, ErrorAnswer(error=name, message=str(error))


def failure_of(request: int, error: EngineError) -> FailedRequest:
    """Converts an error to the answer for the client whose request failed."""
    answer = status_and_answer(error)[1]
    return FailedRequest(id=request, error=answer.error, message=answer.message)


def error_of(answer: FailedRequest) -> EngineError:
    """Converts the answer to the error that the client raises."""
    return ERRORS.get(answer.error, (500, EngineError))[1](answer.message)


Requests = Annotated[list[ToEngine], msgspec.Meta(max_length=MAX_MESSAGES)]
read_requests = msgspec.msgpack.Decoder(Requests).decode
"""A frame's messages. Raises msgspec.MsgspecError for anything else."""
read_answers = msgspec.msgpack.Decoder(list[FromEngine]).decode
"""A frame's messages. Raises msgspec.MsgspecError for anything else."""


class Outbox:
    """A queue of messages to send. A message is encoded when it is put in, and a frame has all
    messages that wait. Streamed tokens fill the remaining room of a frame. The waiting tokens of a
    request are one list, so they take little memory if frames are sent slowly."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._waiting: deque[bytes] = deque()
        self._tokens: dict[int, tuple[list[int], list[float]]] = {}
        """Request -> its tokens that are not yet in a frame. The oldest request comes first."""
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """The number of messages that are not yet in a frame, without tokens."""
        return len(self._waiting)

    def put(self, message: ToEngine | FromEngine) -> None:
        """Adds a message. Raises RequestTooLongError if it is larger than a frame."""
        encoded = self._encoder.encode(message)
        if len(encoded) + 16 > MAX_BYTES:
            raise RequestTooLongError(
                f"a request of {len(encoded)} bytes is more than an engine's server takes "
                f"({MAX_BYTES}): shorten it, or show fewer or smaller images"
            )

        self._waiting.append(encoded)
        self._filled.set()

    def put_tokens(self, request: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds the next tokens of a running request."""
        waiting = self._tokens.setdefault(request, ([], []))
        waiting[0].extend(ids)
        waiting[1].extend(logprobs)
        self._filled.set()

    def drop_tokens(self, request: int) -> None:
        """Drops the request's tokens that are not yet in a frame, because the request has ended."""
        self._tokens.pop(request, None)

    def frame(self) -> bytes | None:
        """The next frame; None when nothing is left."""
        taken: list[msgspec.Raw] = []
        size = 0
        while (
            self._waiting
            and len(taken) < MAX_MESSAGES
            and (not taken or size + len(self._waiting[0]) <= FRAME_BYTES)
        ):
            size += len(self._waiting[0])
            taken.append(msgspec.Raw(self._waiting.popleft()))

        while self._tokens and len(taken) < MAX_MESSAGES and size < FRAME_BYTES:
            encoded = self._encoder.encode(self._next_tokens())
            size += len(encoded)
            taken.append(msgspec.Raw(encoded))

        if not self._waiting and not self._tokens:
            self._filled.clear()

        return self._encoder.encode(taken) if taken else None

    def _next_tokens(self) -> DrawnTokens:
        request = next(iter(self._tokens))
        ids, logprobs = self._tokens.pop(request)
        if len(ids) > MAX_TOKENS:
            self._tokens[request] = (ids[MAX_TOKENS:], logprobs[MAX_TOKENS:])
        return DrawnTokens(id=request, ids=ids[:MAX_TOKENS], logprobs=logprobs[:MAX_TOKENS])

    async def next_frame(self) -> bytes:
        """Waits for the next frame."""
        while (frame := self.frame()) is None:
            await self._filled.wait()
        return frame
