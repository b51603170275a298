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
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

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


class Retriever(Starlette):
    """The ASGI application. `top_k`: the default of requests; `key`: the bearer token that clients
    must send."""

    def __init__(self, index: Index, *, top_k: int = 3, key: str | None = None) -> None:
        super().__init__(
            routes=[
                Route("/retrieve", self._retrieve, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _refusal},
        )
        self._index = index
        self._top_k = top_k
        self._key = key

    async def _health(self, request: Request) -> Response:
        return _response({"status": "ok"})

    async def _retrieve(self, request: Request) -> Response:
        """Raises HTTPException."""
        shown = request.headers.get("authorization", "").encode("latin-1")
        if self._key is not None and not hmac.compare_digest(shown, f"Bearer {self._key}".encode()):
            raise HTTPException(401, "the key is missing or wrong: Authorization: Bearer KEY")

        retrieval = self._read(await _body(request))
        return _response(await in_thread(lambda: self._find(retrieval)))

    def _read(self, body: bytes) -> _RetrievalRequest:
        try:
            retrieval = decode_json(body, _RetrievalRequest)
        except msgspec.DecodeError as error:
            example = '{"queries": ["..."], "topk": 3, "return_scores": true}'
            raise HTTPException(400, f"{error}: write {example}") from None

        top_k = self._top_k if retrieval.topk is None else retrieval.topk
        if not 1 <= top_k <= MAX_TOP_K:
            raise HTTPException(400, f"topk is {str(top_k)[:20]}: give 1 to {MAX_TOP_K}")
        if not 1 <= len(retrieval.queries) <= MAX_QUERIES:
            raise HTTPException(400, f"{len(retrieval.queries)} queries: give 1 to {MAX_QUERIES}")

        retrieval.topk = top_k
        return retrieval

    def _find(self, retrieval: _RetrievalRequest) -> dict[str, Any]:
        lists = []
        for query in retrieval.queries:
            matches = self._index.find(query, retrieval.topk or self._top_k)
            lists.append(
                [
                    {"document": _document(passage), "score": score}
                    if retrieval.return_scores
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


async def _body(request: Request) -> bytes:
    """Raises HTTPException for a body that is too long, or incomplete."""
    content = b""
    try:
        async for part in request.stream():
            content += part
            if len(content) > MAX_BODY:
                raise HTTPException(413, f"a request can have at most {MAX_BODY:,} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the request broke off") from None

    return content


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = ": POST /retrieve" if error.status_code in (404, 405) else ""
    return _response({"error": {"message": f"{error.detail}{hint}"}}, error.status_code)


def _response(answer: dict[str, Any], status: int = 200) -> Response:
    """A corpus can have halves of surrogate pairs, which UTF-8 does not allow."""
    body = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status, media_type="application/json")
