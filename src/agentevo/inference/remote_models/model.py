"""Remote models: send a history of messages over HTTP and return the reply.

A model with `api: engine` has no server. For it, "server" in this module means engine_server.py in
this process.

Requests run on threads of this package, so an engine's step, which blocks the event loop, does not
make a server look slow. An abandoned call is still recorded in the price log when its answer
arrives. After a temporary failure (too many requests, a failure of the server, a lost connection)
the request is repeated, after pauses that double, or after the server's `Retry-After`. A permanent
refusal is raised immediately. Every call ends within its deadline.

A key is read from the environment when the object is created. It is sent only to its server. If the
server's answer contains the key, messages show the answer without it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from agentevo.config.remote_models import RemoteModelSection
from agentevo.data.message_images import ImageCollector
from agentevo.data.messages import messages_of, tools_of
from agentevo.errors import BadRequestError, ConfigError, UnknownNameError
from agentevo.inference.remote_models import anthropic_messages, openai_chat, token_scores
from agentevo.inference.remote_models.cache import ReplyCache
from agentevo.inference.remote_models.http import ModelServer, Unanswered
from agentevo.inference.remote_models.images import (
    EncodedImage,
    encode_images,
    most_prompt_tokens,
)
from agentevo.inference.remote_models.ledger import Ledger, LedgerLine, RemoteModelError, Spent
from agentevo.inference.remote_models.wire import Listen, RemoteReply, Usage, WireRequest
from agentevo.models.chat.answer_form import AnswerForm
from agentevo.models.files.resolve import missing_model
from agentevo.models.tool_calls import ContentDelta, ReasoningDelta
from agentevo.runtime.credentials import REFERENCE
from agentevo.runtime.event_loop import in_thread
from agentevo.runtime.registry import nearest
from agentevo.runtime.seeds import derive_seed
from agentevo.runtime.trace_header import trace_headers
from agentevo.types import Message, SamplingOverrides
from agentevo.types.images import ImageFile

if TYPE_CHECKING:
    from agentevo.inference.remote_models.engine_server import EngineServer

T = TypeVar("T")
WIRES = {
    "openai": openai_chat.WIRE,
    "anthropic": anthropic_messages.WIRE,
    "engine": openai_chat.WIRE,
}
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_REFUSED = (400, 415, 422, 501)
"""The statuses with which servers refuse the requested form of the answer."""
MARGIN_S = 2.0
"""How far a call can exceed its deadline, in seconds, if a server keeps its thread busy."""


class RemoteModel:
    """See the module. `folder` has its price log and its cache. Without it, the price log is in
    memory and nothing is cached. Any thread and any event loop may use it."""

    def __init__(self, name: str, section: RemoteModelSection, folder: Path | None = None) -> None:
        """Raises ConfigError for a key that is not in the environment."""
        self.name = name
        self.section = section

        self._wire = WIRES[section.api]
        key = key_of_model(name, section)
        self._server: ModelServer | EngineServer
        if section.api == "engine":
            from agentevo.inference.remote_models.engine_server import (
                EngineServer,  # it imports torch
            )

            self._server = EngineServer(name, section)
        else:
            self._server = ModelServer(name, section.url, self._wire, key, section.api_key)

        file = f"{quote(name, safe='')}.jsonl"  # of this name and no other
        self.ledger = Ledger(folder and folder / file, section.budget, name)
        cache_dir = section.cache_dir or (folder and folder / "cache")
        limit = section.cache_mib * 2**20
        self._cache = ReplyCache(cache_dir, limit) if cache_dir and section.cache else None
        self._workers = ModelWorkers(section.max_at_once, f"agentevo-{name}")
        self._num_calls = 0
        self._takes_schemas = True

    @property
    def sees_images(self) -> bool:
        """Whether it takes images."""
        return self.section.sees_images

    @property
    def within_s(self) -> float:
        """The longest duration of a call, in seconds."""
        return self.section.deadline_s + MARGIN_S

    async def generate(  # noqa: PLR0913 (what a request can have)
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        form: AnswerForm | None = None,
        sampling: SamplingOverrides | None = None,
        seed: int | None = None,
        role: str = "",
        attempt: str = "",
        listen: Listen | None = None,
        schema: Mapping[str, Any] | None = None,
        images: Mapping[str, ImageFile] = MappingProxyType({}),
    ) -> RemoteReply:
        """Returns the answer to a whole history. `images`: maps a digest to the image, for the
        images that messages name by digest; messages in OpenAI's form can also have data URLs.
        `tool_choice`: auto, none, required or the name of a function; `form` is the required form
        of the answer, and its `calls` replace `tool_choice`; `sampling` replaces the recipe's
        values; `role` and `attempt` name the purpose of the request in the price log. `listen`
        receives the answer as it arrives, on a thread of this package; received pieces can't be
        withdrawn, so an answer that breaks off after the first piece is not retried. `schema` is a
        JSON schema that the server enforces if it can. If a server refuses schemas, later requests
        have none.

        Raises BudgetExceededError, RemoteModelError if there is no answer, and BadRequestError
        for an invalid request.
        """
        if schema is not None:
            return await self._by_schema(
                schema,
                partial(
                    self.generate,
                    messages,
                    tools=tools,
                    tool_choice=tool_choice,
                    sampling=sampling,
                    seed=seed,
                    role=role,
                    attempt=attempt,
                    listen=listen,
                    images=images,
                ),
            )

        if form is not None and form.calls != "auto":
            tool_choice = form.tool or form.calls

        read_messages, encoded = await self._read(messages, images)
        wire_request = WireRequest(
            messages=read_messages,
            images=encoded,
            tools=None if not tools else tools_of(tools),
            tool_choice=tool_choice,
            form=form,
            sampling=self._sampling(sampling, seed),
        )
        if not wire_request.messages:
            raise BadRequestError("messages is a list with at least one message")

        section = self.section
        body = self._wire.body(section.url, section.model, wire_request) | section.extra
        content = self._written(body)
        most = most_prompt_tokens(content, read_messages, encoded)
        limit = TokenLimit(most, wire_request.max_new_tokens)
        call = self._call(self._server, body, content, limit, role, attempt, listen)
        return await self._result_of(call)

    async def _read(
        self, messages: Sequence[Message | Mapping[str, Any]], images: Mapping[str, ImageFile]
    ) -> tuple[list[Message], dict[str, EncodedImage]]:
        """The messages, and the images that they name by digest. Images are read on a thread.
        Raises BadRequestError, also for images if the recipe does not say that the model takes
        any."""
        collector = ImageCollector()
        collector.files.update(images)

        def read() -> tuple[list[Message], dict[str, EncodedImage]]:
            read_messages = messages_of(messages, collector)
            return read_messages, encode_images(read_messages, collector.files)

        if all(isinstance(_content_of(message), str | None) for message in messages):
            return messages_of(messages), {}

        read_messages, encoded = await in_thread(read)
        if encoded and not self.section.sees_images:
            raise BadRequestError(
                f"the messages have images, and the remote model {self.name} reads text alone: "
                f"set remote_models.{self.name}.sees_images=true if it takes images"
            )
        return read_messages, encoded

    async def score(
        self,
        context_ids: Sequence[int],
        ids: Sequence[int],
        *,
        role: str = "",
        attempt: str = "",
    ) -> list[float]:
        """The natural log-prob of each of `ids`, given `context_ids` and the preceding `ids`, at
        temperature 1. The ids are those of the model's own tokenizer. Raises the errors of
        `generate`."""
        section = self.section
        if section.api == "anthropic":
            raise RemoteModelError(f"remote model {self.name}: its API gives no log-probs")
        if not context_ids or not ids:
            raise BadRequestError("score: the context and the tokens have at least one token each")

        body = section.extra | token_scores.score_body(section.model, context_ids, ids)
        server = self._server
        if isinstance(server, ModelServer):
            server = server.speaking(token_scores.wire_of(len(context_ids) + len(ids)), section.url)
        else:
            body["num_context"] = len(context_ids)

        content = self._written(body)
        limit = TokenLimit(len(content), 1)
        reply = await self._result_of(self._call(server, body, content, limit, role, attempt, None))
        return reply.logprobs[len(context_ids) - 1 :]

    async def _result_of(self, call: Callable[[], RemoteReply]) -> RemoteReply:
        """The reply of a call, which runs on a thread."""
        answer = self._workers.submit(call)
        try:
            async with asyncio.timeout(self.within_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise self._late("its server keeps all of max_at_once connections") from None

    def close(self) -> None:
        """Ends the model's threads and connections. Waiting calls fail."""
        self._workers.close()
        self._server.close()

    async def _by_schema(
        self, schema: Mapping[str, Any], generate: Callable[..., Awaitable[RemoteReply]]
    ) -> RemoteReply:
        """The answer, with the schema enforced unless the server has refused schemas."""
        if self._takes_schemas:
            try:
                return await generate(form=AnswerForm(schema=schema, strict=True))
            except RemoteModelError as error:
                if error.status not in _REFUSED:
                    raise

        reply = await generate()
        self._takes_schemas = False  # if it refuses this too, the schema was not the reason
        return reply

    def _written(self, body: Mapping[str, Any]) -> bytes:
        try:
            return msgspec.json.encode(body)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise BadRequestError(f"the request can't be written as JSON: {error}") from error

    def _call(
        self,
        server: ModelServer | EngineServer,
        body: Mapping[str, Any],
        content: bytes,
        limit: TokenLimit,
        role: str,
        attempt: str,
        listen: Listen | None,
    ) -> Callable[[], RemoteReply]:
        """A request to a server, as a call for a thread. `content` is the `body` in JSON."""
        sent = content if listen is None else self._written({**self._wire.stream, **body})
        self._num_calls += 1
        line = LedgerLine(
            id="", state="failed", model=self.name, role=role, attempt=attempt, at=time.time()
        )
        until = time.monotonic() + self.section.deadline_s
        request = _RemoteRequest(
            server, sent, limit, until, self._num_calls, listen, trace_headers()
        )
        return partial(self._answer, content, request, line)

    def _sampling(self, overrides: SamplingOverrides | None, seed: int | None) -> SamplingOverrides:
        section = self.section
        base: dict[str, Any] = {
            "temperature": section.temperature,
            "top_p": section.top_p,
            "max_new_tokens": section.max_new_tokens,
            "seed": seed,
        }
        return SamplingOverrides(**base | ({} if overrides is None else overrides.given()))

    def _answer(self, content: bytes, request: _RemoteRequest, call: LedgerLine) -> RemoteReply:
        """On a thread: the answer from the cache or the server. Retries while a retry may help.
        `content` is the request, without the fields for an answer in events."""
        cached_reply = (
            None if self._cache is None else self._cache.find(request.server.url, content)
        )
        if cached_reply is not None:
            self.ledger.end(msgspec.structs.replace(call, id="cache", state="cached", requests=0))
            return cached_reply

        problem: RemoteModelError | None = None
        for attempt in range(self.section.max_tries):
            try:
                reply = self._request(request, call)
            except Unanswered as error:
                problem = RemoteModelError(str(error), error.status)
                if not error.is_retryable or request.has_told:
                    raise problem from error
                self._pause(error, attempt, request)
                continue

            if self._cache is not None:
                self._cache.keep(request.server.url, content, reply)

            return reply

        assert problem is not None

        tries = self.section.max_tries
        raise RemoteModelError(
            f"no usable answer after {tries} requests: {problem}", problem.status
        )

    def _request(self, request: _RemoteRequest, call: LedgerLine) -> RemoteReply:
        """Makes one request, and records it in the price log."""
        if request.until <= time.monotonic():
            raise self._late("it waited for its turn")

        content = request.content
        most_prompt, max_new = request.limit
        cost = self._price(most_prompt, 0, max_new)
        most = Spent(requests=1, tokens=most_prompt + max_new, cost=cost)
        number = self.ledger.begin(most, role=call.role, until=request.until)
        line = msgspec.structs.replace(call, id=number, at=time.time())
        started_at = time.monotonic()
        try:
            time_left = min(self.section.timeout_s, request.until - started_at)
            listen = None if request.listen is None else request.on_delta
            reply, status = request.server.post(content, time_left, listen, request.headers)
        except BaseException as error:
            line.seconds = time.monotonic() - started_at
            line.error = str(error)[:300]
            line.status = getattr(error, "status", 0)
            if getattr(error, "may_cost", True):
                line.tokens = most.tokens
                line.cost = most.cost
                line.is_estimated = True

            self.ledger.end(line)
            raise

        line.seconds = time.monotonic() - started_at
        line.status = status
        line.state = "completed"
        usage = reply.usage or Usage(prompt_tokens=most_prompt, completion_tokens=max_new)
        line.is_estimated = reply.usage is None
        line.prompt_tokens = usage.prompt_tokens
        line.cached_tokens = usage.cached_tokens
        line.completion_tokens = usage.completion_tokens
        line.tokens = usage.tokens
        line.cost = self._price(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self.ledger.end(line)

        return msgspec.structs.replace(reply, cost=line.cost)

    def _price(self, prompt: int, cached: int, completion: int) -> float:
        price = self.section.price
        return 0.0 if price is None else price.of(prompt, cached, completion)

    def _pause(self, error: Unanswered, attempt: int, request: _RemoteRequest) -> None:
        """The pause before the next request, in seconds. Half of it depends on the call, so that
        calls that failed at the same time are not repeated at the same time."""
        pause = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
        share = derive_seed(self.name, "pause", request.number, attempt) / 2**63
        pause = pause * (0.5 + 0.5 * share)
        if error.retry_after_s is not None:
            pause = error.retry_after_s
            request.server.pause_requests(pause)

        if attempt + 1 == self.section.max_tries:
            return
        if time.monotonic() + pause >= request.until:
            raise self._late(f"the next request would start in {pause:.1f} s: {error}") from error
        if self._workers.ended.wait(pause):
            raise RemoteModelError(f"remote model {self.name}: the run has ended")

    def _late(self, why: str) -> RemoteModelError:
        deadline = self.section.deadline_s
        return RemoteModelError(
            f"remote model {self.name}: no answer within deadline_s={deadline:g}: {why}", 504
        )


class TokenLimit(NamedTuple):
    """The most tokens of a request."""

    prompt: int
    """A byte of text has at most one."""
    completion: int


def _content_of(message: Message | Mapping[str, Any]) -> Any:
    return message.content if isinstance(message, Message) else message.get("content")


@dataclass(slots=True)
class _RemoteRequest:
    """A request, which may be sent several times."""

    server: ModelServer | EngineServer
    content: bytes
    limit: TokenLimit
    until: float
    """The monotonic time at which the call must end."""
    number: int
    """The number of this call among the model's calls."""
    listen: Listen | None
    headers: Mapping[str, str]
    """The headers with the call's position in a trace."""
    has_told: bool = False

    def on_delta(self, delta: ContentDelta | ReasoningDelta) -> None:
        self.has_told = True
        if self.listen is not None:
            self.listen(delta)


class RemoteModels(dict[str, RemoteModel]):
    """The remote models of a run, by name. `folder` is the folder of their price logs, within the
    run's folder. Without it nothing is written. An unknown name raises UnknownNameError."""

    def __init__(
        self, sections: Mapping[str, RemoteModelSection], folder: Path | None = None
    ) -> None:
        super().__init__(
            {name: RemoteModel(name, section, folder) for name, section in sections.items()}
        )

    def __missing__(self, name: str) -> RemoteModel:
        guess = nearest(name, list(self))
        hint = f"did you mean {guess!r}? " if guess else ""
        known_names = ", ".join(self) or "none: add the section remote_models"
        raise UnknownNameError(
            f"there is no remote model {name!r}: {hint}the recipe has {known_names}"
        )

    def totals(self) -> list[dict[str, Any]]:
        """The usage of each model by each role, in all processes of the run."""
        return [row for model in self.values() for row in model.ledger.totals()]

    def summary(self) -> dict[str, Any]:
        """The entry of remote models in summary.json: `totals`, and what is left of the budgets.
        Empty without remote models."""
        if not self:
            return {}
        limits_left = {name: model.ledger.remaining() for name, model in self.items()}
        return {
            "asked": self.totals(),
            "budget_left": {name: limits for name, limits in limits_left.items() if limits},
        }

    def account(self) -> list[str]:
        """`totals` as readable text with a line for each, and what is left of the budgets."""
        lines = [
            f"remote model {row['model']}, asked by {row['role'] or 'no named role'}: "
            f"{row['answers']} answers ({row['from_cache']} from the cache), "
            f"{row['failed_requests']} failed requests, {row['tokens']} tokens, cost "
            f"{row['cost']:.4g}"
            for row in self.totals()
        ]
        for name, model in self.items() if lines else ():
            if budget_left := model.ledger.remaining():
                limits = ", ".join(f"{value:.4g} {what}" for what, value in budget_left.items())
                lines.append(f"remote model {name}: left of its budget: {limits}")

        return lines

    def close(self) -> None:
        """Closes all models."""
        for model in self.values():
            model.close()


def check_keys(sections: Mapping[str, RemoteModelSection]) -> None:
    """Raises ConfigError for a key that is not in the environment, and for a model that runs in
    this process and is not on this machine."""
    for name, section in sections.items():
        key_of_model(name, section)
        if section.api == "engine" and (missing := missing_model(section.model)):
            raise ConfigError(f"remote_models.{name}.model: {missing}")


def key_of_model(name: str, section: RemoteModelSection) -> str | None:
    """The environment's key for a remote model; None for a model without one. Raises ConfigError if
    the key is missing."""
    if section.api_key is None:
        return None

    reference = REFERENCE.fullmatch(section.api_key)
    if reference is None:
        raise ConfigError(
            f"remote_models.{name}.api_key: write ${{env:NAME}}, the environment variable that "
            "holds the key"
        )

    key = os.environ.get(reference[1], "").strip()
    if not key:
        raise ConfigError(
            f"remote_models.{name}.api_key: the environment variable {reference[1]} is not set: "
            "set it for every process of the run"
        )

    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"remote_models.{name}.api_key: the environment variable {reference[1]} holds a line "
            "break or a character that is not ASCII, which no HTTP header can carry: set it to the "
            "key alone"
        )

    return key


class ModelWorkers:
    """A limited number of daemon threads, started when they are needed."""

    def __init__(self, limit: int, name: str) -> None:
        self.ended = threading.Event()
        self._limit = limit
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_busy = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Runs the work on a thread, and returns a future with its result or error."""
        future: Future[T] = Future()
        with self._lock:
            if self.ended.is_set():
                raise RemoteModelError(f"{self._name}: the run has ended")
            self._num_busy += 1
            if self._num_threads < min(self._num_busy, self._limit):
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()

        self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """Accepts no more work. Waiting work fails."""
        with self._lock:
            self.ended.set()
            num_threads = self._num_threads

        with suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0].set_exception(RemoteModelError(f"{self._name}: the run has ended"))

        for _ in range(num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (handed to the waiting caller)
                future.set_exception(error)
            finally:
                with self._lock:
                    self._num_busy -= 1

            del job, future, work
