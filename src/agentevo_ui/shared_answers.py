"""One answer for all viewers of the same page, so that fifty viewers cost about as much as one.

For read-only visitors, a page of PATHS is made once for an address, a theme and the known state of
the run. A request that arrives during that time waits for the same page. A request within KEPT_S
seconds gets the page again, unless the state of the run has changed.

Invariants. A shared page does not depend on the viewer. The application sees only the address,
whether htmx sent the request, and the theme, so no page can contain a viewer's own data. Visitors
with control get their own pages, which are never cached. At most MAX_ANSWERS answers with at most
MAX_BYTES bytes together are cached. A viewer who leaves does not cancel the page for others who
wait for it.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import time
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentevo.runtime.event_loop import in_thread
from agentevo_ui.forms import Visitor
from agentevo_ui.run_watcher import Watcher

PATHS = re.compile(
    r"/|/runs/(?P<run>[^/]+)"
    r"(?:/(?:work|metrics|series|attempts|evaluation|evaluation/series|data|processes|steps/\d+))?"
)
KEPT_S = 0.5
MAX_ANSWERS = 64
MAX_BYTES = 32_000_000
MAX_QUERY_BYTES = 2_000
"""The maximum number of bytes of a query whose answer is cached."""
MADE_S = 60.0
"""The deadline in seconds of a page that other requests wait for."""
SMALLEST_GZIPPED = 1_000
LEVEL = 4
THEME = "agentevo-theme"
THEMES = ("light", "dark")


class AnswerKey(NamedTuple):
    """What a page depends on."""

    path: str
    query: bytes
    is_part: bool
    theme: str


class SharedAnswer(NamedTuple):
    """An answer as the application returned it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    gzipped: bytes
    """Empty if compression would save nothing."""


@dataclass
class _AnswerEntry:
    making: asyncio.Task[SharedAnswer]
    watched_state: tuple[int, int]
    """The watcher's state at the start of the answer."""
    at: float
    size: int = 0


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

        headers = dict(reversed(scope["headers"]))  # the first header of each name counts
        is_part = headers.get(b"hx-request") == b"true"
        theme = _theme(headers.get(b"cookie", b""))
        key = AnswerKey(scope["path"], scope["query_string"], is_part, theme)
        # Shielded, because other requests wait for it too.
        answer = await asyncio.shield(self._making(key, match["run"], scope))
        await _send(send, answer, headers.get(b"accept-encoding", b""))

    def _making(self, key: AnswerKey, run: str | None, scope: Scope) -> asyncio.Task[SharedAnswer]:
        """The task that makes the answer, or has made it."""
        now = time.monotonic()
        watched_state = self._watcher.known(run)
        entry = self._answers.get(key)
        is_fresh = entry is not None and (not entry.making.done() or now - entry.at < KEPT_S)
        if entry is not None and is_fresh and entry.watched_state == watched_state:
            return entry.making

        self._forget(now)
        making = asyncio.ensure_future(self._make(key, scope))
        entry = self._answers[key] = _AnswerEntry(making, watched_state, now)
        making.add_done_callback(lambda _: self._done(key, entry))

        return making

    def _done(self, key: AnswerKey, entry: _AnswerEntry) -> None:
        """Caches an answer if that is allowed."""
        failed = entry.making.cancelled() or entry.making.exception() is not None
        if failed or entry.making.result().status != 200:
            if self._answers.get(key) is entry:
                del self._answers[key]
            return

        answer = entry.making.result()
        entry.at = time.monotonic()
        entry.size = len(answer.body) + len(answer.gzipped)

    def _forget(self, now: float) -> None:
        """Removes old answers, and the oldest ones above the limits."""
        for key, entry in list(self._answers.items()):
            if entry.making.done() and now - entry.at >= KEPT_S:
                del self._answers[key]
        size = sum(entry.size for entry in self._answers.values())
        while self._answers and (len(self._answers) >= MAX_ANSWERS or size > MAX_BYTES):
            size -= self._answers.pop(next(iter(self._answers))).size

    async def _make(self, key: AnswerKey, scope: Scope) -> SharedAnswer:
        self.num_made += 1
        headers = [(b"host", b"localhost")]
        headers += [(b"hx-request", b"true")] if key.is_part else []
        headers += [(b"cookie", f"{THEME}={key.theme}".encode())] if key.theme else []
        copied_keys = (
            "type",
            "asgi",
            "http_version",
            "method",
            "scheme",
            "path",
            "raw_path",
            "root_path",
        )
        inner_scope = {name: scope[name] for name in copied_keys if name in scope}
        inner_scope |= {
            "query_string": key.query,
            "headers": headers,
            "client": None,
            "server": None,
            self._visitor_key: Visitor(),
        }

        start: list[Message] = []
        body: list[bytes] = []
        bodies: list[bytes] = []

        async def collect(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
            elif message["type"] == "http.response.body":
                body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    bodies.append(b"".join(body))

        try:
            async with asyncio.timeout(MADE_S):
                await self.app(inner_scope, _nothing_more(), collect)
        except Exception:
            if not bodies:  # app.py has reported the error, and usually answered
                raise

        gzipped = b""
        if len(bodies[0]) >= SMALLEST_GZIPPED:
            gzipped = await in_thread(gzip.compress, bodies[0], LEVEL, mtime=0)

        return SharedAnswer(start[0]["status"], list(start[0]["headers"]), bodies[0], gzipped)


def _nothing_more() -> Receive:
    """A request without a body, from a client that stays connected."""
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.sleep(MADE_S)
        return {"type": "http.disconnect"}

    return receive


def _theme(cookies: bytes) -> str:
    theme = cookie_parser(cookies.decode("latin-1")).get(THEME, "")
    return theme if theme in THEMES else ""


def _takes_gzip(header: bytes) -> bool:
    for coding in header.decode("latin-1").lower().split(","):
        name, _, quality = coding.partition(";")
        if name.strip() == "gzip":
            return not re.fullmatch(r"q=0(\.0*)?", quality.strip())
    return False


async def _send(send: Send, answer: SharedAnswer, accepted: bytes) -> None:
    headers = [pair for pair in answer.headers if pair[0] not in (b"content-length", b"vary")]
    vary = [text for name, text in answer.headers if name == b"vary"]

    body = answer.body
    if answer.gzipped and _takes_gzip(accepted):
        body = answer.gzipped
        headers.append((b"content-encoding", b"gzip"))

    headers.append((b"vary", b", ".join([*vary, b"Accept-Encoding"])))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
