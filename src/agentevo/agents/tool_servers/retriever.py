"""`agentevo tools serve --search-r1`: a corpus behind Search-R1's HTTP API.

    POST /retrieve   {"queries": ["..."], "topk": 3, "return_scores": true}
    200              {"result": [[{"document": {"id", "title", "text", "contents"}, "score": 1.5}]]}

Without `return_scores`, the answer has no scores. An invalid request gets an error with the reason,
{"error": {"message": ...}}. Sizes are bounded.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

import msgspec

from agentevo.agents.tools.corpus import Index, Passage
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.event_loop import in_thread

MAX_BODY = 2**20
"""The maximum bytes of a request."""
MAX_QUERIES = 512
"""The maximum number of queries of one request."""
MAX_TOP_K = 100


class _RetrievalRequest(msgspec.Struct, kw_only=True):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class _RetrievalRefusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Retriever:
    """The ASGI application. `top_k`: the default of requests; `key`: the bearer token that clients
    must send."""

    def __init__(self, index: Index, *, top_k: int = 3, key: str | None = None) -> None:
        self._index = index
        self._top_k = top_k
        self._key = key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await _handle_lifespan(scope, receive, send)
            return

        try:
            status = 200
            answer = await self._answer(scope, receive)
        except _RetrievalRefusal as error:
            status = error.status
            answer = {"error": {"message": str(error)}}

        body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, receive: Any) -> dict[str, Any]:
        """Raises _Refusal."""
        if scope["path"] == "/health" and scope["method"] == "GET":
            return {"status": "ok"}
        if scope["path"] != "/retrieve":
            raise _RetrievalRefusal(404, "unknown path: POST /retrieve")
        if scope["method"] != "POST":
            raise _RetrievalRefusal(405, "unknown method: use POST")

        headers = dict(scope["headers"])
        if self._key is not None and not hmac.compare_digest(
            headers.get(b"authorization", b""), f"Bearer {self._key}".encode()
        ):
            raise _RetrievalRefusal(401, "the key is missing or wrong: Authorization: Bearer KEY")

        request = self._read(await _body(receive))
        return await in_thread(lambda: self._found(request))

    def _read(self, body: bytes) -> _RetrievalRequest:
        try:
            request = decode_json(body, _RetrievalRequest)
        except (msgspec.DecodeError, RecursionError) as error:
            example = '{"queries": ["..."], "topk": 3, "return_scores": true}'
            raise _RetrievalRefusal(400, f"{error}: write {example}") from None

        top_k = self._top_k if request.topk is None else request.topk
        if not 1 <= top_k <= MAX_TOP_K:
            raise _RetrievalRefusal(400, f"topk is {str(top_k)[:20]}: give 1 to {MAX_TOP_K}")
        if not 1 <= len(request.queries) <= MAX_QUERIES:
            raise _RetrievalRefusal(400, f"{len(request.queries)} queries: give 1 to {MAX_QUERIES}")

        request.topk = top_k
        return request

    def _found(self, request: _RetrievalRequest) -> dict[str, Any]:
        lists = []
        for query in request.queries:
            matches = self._index.find(query, request.topk or self._top_k)
            lists.append(
                [
                    {"document": _document(passage), "score": score}
                    if request.return_scores
                    else _document(passage)
                    for passage, score in matches
                ]
            )

        return {"result": lists}


def _document(passage: Passage) -> dict[str, str]:
    return {
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "contents": passage.contents,
    }


async def _body(receive: Any) -> bytes:
    """Raises _Refusal for a body that is too long, or incomplete."""
    content = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise _RetrievalRefusal(400, "the request broke off")

        content += message.get("body", b"")
        if len(content) > MAX_BODY:
            raise _RetrievalRefusal(413, f"a request can have at most {MAX_BODY:,} bytes")
        if not message.get("more_body"):
            return content


async def _handle_lifespan(scope: Any, receive: Any, send: Any) -> None:
    """Answers the events for the server's start and end. Refuses other protocols."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
