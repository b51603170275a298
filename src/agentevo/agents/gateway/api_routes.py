"""The routes of the gateway's APIs.

    POST /v1/chat/completions        chat_completions.py, and so on: every API is a file (api.py)
    POST /v1/completions             completions.py
    GET  /v1/responses/ID            an answer that is kept; DELETE forgets it
    GET  /v1/responses/ID/input_items    what it was asked (memory.py)
    POST /v1/messages/count_tokens   tokens of a prompt, in the form of anthropic_messages.py
    GET  /v1/models                  the policy's name; GET /v1/models/NAME whether it is one
    POST /s/KEY/reward               {"reward": 1.0}, {"rewards": {"name": 1.0}} or with "turn": 0

They are open to the keys of sessions. A failure has the form of the client's API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Scope

from agentevo.agents.gateway import anthropic_messages, openapi, responses
from agentevo.agents.gateway.api import Api
from agentevo.agents.gateway.body import (
    json_body,
    json_response,
    object_of,
    read_body,
    record_of,
    refuse_length,
)
from agentevo.agents.gateway.delivery import Awaited, DeliveredTokens, EventStream, WholeAnswer
from agentevo.agents.gateway.images import (
    DECODING_S,
    DecodedImages,
    RequestImages,
    may_have_images,
)
from agentevo.agents.gateway.memory import Memory, find_response, forget, input_items
from agentevo.agents.gateway.refusals import Refusal
from agentevo.agents.gateway.request import Delivery, ModelReply, ModelRequest
from agentevo.agents.gateway.routes import APIS, Caller, GatewayRoute, Routes, session_of
from agentevo.agents.gateway.session import GatewaySession, refuse_key
from agentevo.agents.posted_rewards import PostedReward
from agentevo.errors import shown
from agentevo.inference.serving.admission import AdmittedConnection
from agentevo.runtime import trace_header
from agentevo.runtime.event_loop import in_thread
from agentevo.store.trace_context import TracePlace, read_traceparent

Q = TypeVar("Q", bound=ModelRequest)

MARGIN_S = 30.0
"""The seconds beyond the engine's own deadline after which a request fails."""
KEPT: tuple[tuple[str, str, str, Callable[[Memory, str, Mapping[str, str]], Any]], ...] = (
    ("GET", "", "A stored answer", lambda memory, name, _: find_response(memory, name).body),
    ("DELETE", "", "Deletes a stored answer", lambda memory, name, _: forget(memory, name)),
    ("GET", "/input_items", "The input of a stored answer", input_items),
)
"""Method, path below an answer's, summary, and the answer's answer."""

_OF_ATTEMPT = {
    404: "An answer or a model that the session does not have.",
    409: "The attempt was broken off while the request waited.",
}
_TRACEPARENT = trace_header.HEADER.encode()


class ApiRoutes(Routes):
    """See the module and Routes. `sessions`: the open session of each key; `count_tokens` is called
    with every whole answer."""

    def __init__(
        self,
        sessions: Mapping[str, GatewaySession],
        *,
        model: str,
        timeout_s: float,
        max_body: int,
        max_image_body: int,
        count_tokens: Callable[[Sequence[ModelReply]], None],
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._timeout_s = timeout_s
        self._max_body = max_body
        self._max_image_body = max(max_body, max_image_body)
        self._decoded_images = DecodedImages()
        self._count = count_tokens
        self._started_at = int(time.time())
        self.handlers = {api.path: partial(self._complete, api) for api in APIS}
        """The handler of each API, by its path below /v1."""

    def table(self) -> Iterator[GatewayRoute]:
        for prefix in ("/v1", "/s/{key}/v1", "/s/{key}"):
            for method, path, handler, page in self._below_v1():
                shown_page = page if prefix == "/v1" else None
                yield GatewayRoute(method, prefix + path, handler, shown_page)

        page = openapi.describe(
            "A reward of the attempt",
            body=openapi.BODIES["/reward"],
            in_path="key",
            failures=_OF_ATTEMPT,
        )
        yield GatewayRoute("POST", "/s/{key}/reward", self._reward, page)

    def _below_v1(self) -> Iterator[GatewayRoute]:
        for path, handler in self.handlers.items():
            page = openapi.describe(
                f"A completion: {path}",
                body=openapi.BODIES[path],
                events=True,
                failures=_OF_ATTEMPT,
            )
            yield GatewayRoute("POST", path, handler, page)

        path = anthropic_messages.COUNT_PATH
        page = openapi.describe(
            "Tokens of a prompt", body=openapi.BODIES[path], failures=_OF_ATTEMPT
        )
        yield GatewayRoute("POST", path, self._count_tokens, page)

        kept_path = f"{responses.API.path}/{{response_id}}"
        for method, path, summary, about in KEPT:
            handler = partial(self._tell_kept, about)
            missing = {400: "The request is not valid.", 404: "There is no such answer."}
            page = openapi.describe(summary, in_path="response_id", failures=missing)
            yield GatewayRoute(method, kept_path + path, handler, page)

        yield GatewayRoute("GET", "/models", self._models, openapi.describe("The models"))
        missing = {404: "There is no such model."}
        page = openapi.describe("A model", in_path="name", failures=missing)
        yield GatewayRoute("GET", "/models/{name:path}", self._model_named, page)

    async def find_caller(self, key: str, path: str) -> Caller | None:
        session = self._sessions.get(key) if key else None
        return None if session is None else Caller(session)

    def refuse_stranger(self) -> Refusal:
        return refuse_key()

    async def _read(self, request: Request) -> dict[str, Any]:
        return await json_body(request, self._max_body, of="gateway.max_body_mb")

    async def _read_question(
        self, request: Request, read: Callable[[Mapping[str, Any], RequestImages], Q]
    ) -> Q:
        """The question in a body. Images are decoded on a thread. Raises Refusal for a body that is
        too long, and the errors of `read`. Where no model sees, no body may have images."""
        if session_of(request).sees_images:
            body = await read_body(request, self._max_image_body, of="gateway.max_image_body_mb")
        else:
            body = await read_body(request, self._max_body, of="gateway.max_body_mb")
        images = RequestImages(self._decoded_images)

        def read_it() -> Q:
            question = read(object_of(body), images)
            if len(body) - images.num_characters > self._max_body:
                raise refuse_length(self._max_body, "gateway.max_body_mb")
            return replace(question, images=tuple(images.files.values()))

        if not may_have_images(body):
            if len(body) > self._max_body:
                raise refuse_length(self._max_body, "gateway.max_body_mb")
            return read_it()

        try:
            async with asyncio.timeout(DECODING_S):
                return await in_thread(read_it)
        except TimeoutError:
            raise Refusal(
                f"the images were not decoded within {DECODING_S:g} s: send fewer, or smaller ones",
                status=408,
            ) from None

    async def _complete(self, api: Api[Any], request: Request) -> Response:
        session = session_of(request)
        client: AdmittedConnection = request.scope["state"]["connection"]
        delivery = Delivery(place=_place_in(request.scope))
        question = await self._read_question(
            request, lambda body, images: api.request_of(body, session.memory, images)
        )
        if question.stream:
            return await self._stream_answer(api, session, question, delivery, client)

        try:
            work = session.submit(session.complete(question, delivery))
            who, within_s = session.wait_of(question.model, self._timeout_s)
            with Awaited(work, client, within_s + MARGIN_S, who) as awaited:
                replies = await awaited.result()

            self._count(replies)
            content = msgspec.json.encode(api.answer(question, replies))
        except BaseException:
            session.lose(delivery)
            raise

        return WholeAnswer(content, delivery, session)

    async def _stream_answer(
        self,
        api: Api[Any],
        session: GatewaySession,
        question: Any,
        delivery: Delivery,
        client: AdmittedConnection,
    ) -> Response:
        """Streams the answer as it comes. A failure before the first token is an answer of its
        own."""
        delivered = DeliveredTokens()
        on_pieces = session.bridge_pieces(delivered.add)
        work = session.submit(session.complete(question, delivery, on_pieces))
        who, within_s = session.wait_of(question.model, self._timeout_s)
        awaited = Awaited(work, client, within_s + MARGIN_S, who).__enter__()
        awaited.when_done(delivered.wake)
        try:
            await delivered.wait()
            if not delivered.has_news:
                await awaited.result()
            return EventStream(api, question, delivered, awaited, delivery, session, self._count)
        except BaseException:
            awaited.__exit__(None, None, None)
            session.lose(delivery)
            raise

    async def _count_tokens(self, request: Request) -> Response:
        session = session_of(request)
        prompt = await self._read_question(request, anthropic_messages.counted_of)
        work = session.submit(session.count_tokens(prompt))
        client: AdmittedConnection = request.scope["state"]["connection"]
        with Awaited(work, client, self._timeout_s + MARGIN_S, "the policy") as awaited:
            return json_response({"input_tokens": await awaited.result()})

    async def _reward(self, request: Request) -> Response:
        session = session_of(request)
        reward = record_of(await self._read(request), PostedReward, "the reward")

        async def post_reward() -> None:
            session.post(reward)

        async with asyncio.timeout(MARGIN_S):
            await session.submit(post_reward())
        return json_response({"posted": len(session.posted)})

    async def _tell_kept(
        self, about: Callable[[Memory, str, Mapping[str, str]], Any], request: Request
    ) -> Response:
        memory = session_of(request).memory
        return json_response(
            about(memory, request.path_params["response_id"], request.query_params)
        )

    async def _models(self, request: Request) -> Response:
        names = self._model_names(session_of(request))
        return json_response({"object": "list", "data": list(map(self._about, names))})

    async def _model_named(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = self._model_names(session_of(request))
        if name not in names:
            raise Refusal(
                f"there is no model {shown(name)} (there is: {', '.join(names)})",
                status=404,
                code="model_not_found",
                param="model",
            )
        return json_response(self._about(name))

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


def _place_in(scope: Scope) -> TracePlace | None:
    """The place in a trace that a request names."""
    traceparent = next((value for name, value in scope["headers"] if name == _TRACEPARENT), None)
    return None if traceparent is None else read_traceparent(traceparent.decode("latin-1"))
