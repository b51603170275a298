"""Who may see the dashboard: whoever has the token, from a host that is this one, by GET.

The token comes once, in the first URL (`/?token=...`), and is exchanged for a cookie by a redirect
to the same URL without it: no page has it in its address, so no referrer, bookmark or log has it
either. Everything needs the cookie, static files too. A name in `Host` that is not ours is refused,
by which a page elsewhere can't reach this server under a name of its own (DNS rebinding).

Nothing is changed by any request: GET and HEAD alone are answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN = "token"
METHODS = ("GET", "HEAD")
ENDLESS = "/live"
"""The one path whose answer goes on (live.py)."""
LONGEST_S = 60.0
"""The deadline of every other answer."""
SEND_S = 30.0
"""How long a client may take nothing of its answer."""
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "private, no-cache",
}
"""Of every answer; a page may set `cache-control` otherwise."""
CLOSED_PAGE = (
    b'<!doctype html><html lang="en"><meta charset="utf-8"><title>AgentEvo</title><h1>AgentEvo</h1>'
    b"<p>This dashboard needs its token: open the URL that <code>agentevo ui</code> printed.</p>"
    b'<p>If you have just done that, <a href="">go on</a>.</p></html>'
)


class Access:
    """See the module. `hosts`: names, beside addresses, by which browsers may call this server;
    `secure`: whether it encrypts."""

    def __init__(
        self, *, hosts: Iterable[str] = (), secure: bool = False, token: str | None = None
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)} - {""}
        self._secure = secure
        self._pass = hashlib.sha256(f"agentevo ui {self.token}".encode()).hexdigest()
        """What the cookie holds: whoever reads it there does not know the token."""
        self.cookie = f"agentevo-ui-{self._pass[:8]}"
        """Cookies are shared by all ports of a host, so each dashboard has a name of its own."""

    def is_our_host(self, host: str) -> bool:
        """Whether a `Host` header names us: an address can't be somebody else's name for us."""
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.lower().rstrip(".")
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def is_token(self, given: str) -> bool:
        """Takes as long for any wrong one."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def has_pass(self, cookies: str) -> bool:
        """Whether the `Cookie` header holds our cookie."""
        try:
            held = SimpleCookie(cookies).get(self.cookie)
        except CookieError:
            return False
        given = "" if held is None else held.value
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._pass.encode())

    def set_cookie(self) -> str:
        """The header that gives the cookie."""
        secure = "; Secure" if self._secure else ""
        return f"{self.cookie}={self._pass}; Path=/; HttpOnly; SameSite=Strict{secure}"

    def url(self, base: str) -> str:
        """What a person opens first."""
        return f"{base}/?{TOKEN}={self.token}"


class Guard:
    """The application behind `Access`; ASGI."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = _headers_of(scope)
        connection: Any = (scope.get("state") or {}).get("connection")
        answer = self._refusal(scope, headers)
        if answer is not None:
            await _send(send, *answer, is_head=scope["method"] == "HEAD")
            return
        if connection is not None and not connection.admit():
            await _send(send, 503, {}, b"too many connections: close some pages, and try again\n")
            return
        try:
            async with asyncio.timeout(None if scope["path"] == ENDLESS else LONGEST_S):
                await self._app(scope, receive, _with_headers(send))
        except Exception:  # noqa: BLE001 (app.py has told of it, and answered)
            pass
        finally:
            if connection is not None:
                connection.leave()

    def _refusal(
        self, scope: Scope, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes] | None:
        """The answer to a request that gets no further."""
        access = self._access
        if not access.is_our_host(headers.get("host", "")):
            return 421, {}, b"this server does not go by that name: open the URL that was printed\n"
        if scope["method"] not in METHODS:
            return 405, {"allow": ", ".join(METHODS)}, b"only GET: this dashboard changes nothing\n"
        query = scope["query_string"].decode("latin-1")
        pairs = parse_qsl(query, keep_blank_values=True)
        given = [value for name, value in pairs if name == TOKEN]
        if given:
            if not access.is_token(given[0]):
                return 401, _HTML, CLOSED_PAGE
            rest = urlencode([pair for pair in pairs if pair[0] != TOKEN])
            # One slash at the beginning: two would be another host.
            path = "/" + quote(scope["path"].lstrip("/"), safe="/~:@!$&'()*+,;=-._")
            place = f"{path}?{rest}" if rest else path
            more = {"location": place, "set-cookie": access.set_cookie()}
            return 303, more | {"cache-control": "no-store"}, b""
        if not access.has_pass(headers.get("cookie", "")):
            return 401, _HTML, CLOSED_PAGE
        return None


_HTML = {"content-type": "text/html; charset=utf-8", "cache-control": "no-store"}


def names_of_this_machine() -> set[str]:
    """Names by which other machines may call it."""
    return {socket.gethostname(), socket.getfqdn()}


def _headers_of(scope: Scope) -> dict[str, str]:
    """The first of each name, but all of `Cookie`."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key == "cookie" and key in headers:
            headers[key] += f"; {text}"
        else:
            headers.setdefault(key, text)
    return headers


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            has = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [
                *message["headers"],
                *(
                    (name.encode(), value.encode())
                    for name, value in HEADERS.items()
                    if name.encode() not in has
                ),
            ]
        async with asyncio.timeout(SEND_S):
            await send(message)

    return sending


async def _send(
    send: Send, status: int, headers: dict[str, str], body: bytes, *, is_head: bool = False
) -> None:
    plain = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
    guarded = _with_headers(send)
    await guarded(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (name.encode(), value.encode("latin-1"))
                for name, value in (plain | headers).items()
            ],
        }
    )
    await guarded({"type": "http.response.body", "body": b"" if is_head else body})
