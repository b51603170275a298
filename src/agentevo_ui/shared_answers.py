"""One answer for all viewers of the same page, so that fifty viewers cost about as much as one.

For read-only visitors, a page of PATHS is made once for an address, a theme and the known state of
the run. A request that arrives during that time waits for the same page. A request within KEPT_S
seconds gets the page again, unless the state of the run has changed.

Invariants. A shared page does not depend on the viewer. The application sees only the address,
whether htmx sent the request, the theme and whether the viewer takes gzip, so no page can contain a
viewer's own data. Visitors with control get their own pages, which are never cached or compressed.
A viewer who leaves does not cancel the page for others who wait for it.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentevo.errors import describe_error
from agentevo.runtime.console import to_stderr
from agentevo_ui.access import Visitor
from agentevo_ui.run_watcher import Watcher

PATHS = re.compile(
    r"/|/runs/(?P<run>[^/]+)"
    r"(?:/(?:work|metrics|series|attempts|evaluation|evaluation/series|data|processes|steps/\d+))?"
)
KEPT_S = 0.5
MAX_ANSWERS = 64
MAX_BYTES = 500_000
"""The maximum size of a page that is cached."""
MAX_QUERY_BYTES = 2_000
"""The maximum number of bytes of a query whose answer is cached."""
MADE_S = 60.0
"""The deadline in seconds of a page that other requests wait for."""
SMALLEST_GZIPPED = 1_000
LEVEL = 4
THEME = "agentevo-theme"
THEMES = ("light", "dark")
_COPIED = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "root_path")


class AnswerKey(NamedTuple):
    """What a page depends on."""

    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class _AnswerEntry(NamedTuple):
    making: asyncio.Task[list[Message]]
    watched_state: tuple[int, int]
    """The watcher's state at the start of the answer."""


class SharedAnswers:
    """Shares answers among viewers. An ASGI application behind the guard. `visitor_key`: the key of
    a request's scope for its visitor. It belongs to the dashboard's event loop."""

    def __init__(self, app: ASGIApp, watcher: Watcher, visitor_key: str) -> None:
        self.app = app
        self.num_made = 0
        """The number of answers that were made to be shared."""
        self._watcher = watcher
        self._visitor_key = visitor_key
        self._answers: dict[AnswerKey, _AnswerEntry] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = PATHS.fullmatch(scope["path"])
        is_ours = scope["method"] == "GET" and len(scope["query_string"]) <= MAX_QUERY_BYTES
        if match is None or not is_ours or scope[self._visitor_key].may_change:
            await self.app(scope, receive, send)
            return

        key = AnswerKey(scope["path"], scope["query_string"], _kept_headers(Headers(scope=scope)))
        state = self._watcher.known(match["run"])
        entry = self._answers.get(key)
        if entry is None or entry.watched_state != state:
            entry = _AnswerEntry(asyncio.ensure_future(self._make(key, scope)), state)
            entry.making.add_done_callback(partial(self._keep, key))
            self._answers[key] = entry
            while len(self._answers) > MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]

        # Shielded, because other requests wait for it too.
        for message in await asyncio.shield(entry.making):
            await send(message)

    def _keep(self, key: AnswerKey, making: asyncio.Task[list[Message]]) -> None:
        """Caches a complete page of at most MAX_BYTES for KEPT_S seconds."""

        def forget() -> None:
            if key in self._answers and self._answers[key].making is making:
                del self._answers[key]

        failed = making.cancelled() or making.exception() is not None
        if failed or making.result()[0]["status"] != 200 or _size(making.result()) > MAX_BYTES:
            forget()
        else:
            asyncio.get_running_loop().call_later(KEPT_S, forget)

    async def _make(self, key: AnswerKey, scope: Scope) -> list[Message]:
        self.num_made += 1
        inner_scope = {name: scope[name] for name in _COPIED if name in scope} | {
            "query_string": key.query,
            "headers": list(key.headers),
            "client": None,
            "server": None,
            self._visitor_key: Visitor(),
        }
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        compressing = GZipMiddleware(self.app, SMALLEST_GZIPPED, LEVEL)
        try:
            async with asyncio.timeout(MADE_S):
                await compressing(inner_scope, _nothing_more(), collect)
        except Exception as error:
            if not messages or messages[-1].get("more_body", True):
                raise  # each request reports it, and has no answer
            to_stderr(f"ui: {scope['path']}: {describe_error(error)}")

        return messages


def _size(messages: list[Message]) -> int:
    return sum(len(message.get("body", b"")) for message in messages)


def _nothing_more() -> Receive:
    """A request without a body, from a client that stays connected."""
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.sleep(MADE_S)
        return {"type": "http.disconnect"}

    return receive


def _kept_headers(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that a shared page depends on."""
    kept = [(b"host", b"localhost")]
    if headers.get("hx-request") == "true":
        kept.append((b"hx-request", b"true"))
    if "gzip" in headers.get("accept-encoding", ""):
        kept.append((b"accept-encoding", b"gzip"))

    theme = cookie_parser("; ".join(headers.getlist("cookie"))).get(THEME, "")
    if theme in THEMES:
        kept.append((b"cookie", f"{THEME}={theme}".encode()))
    return tuple(kept)
