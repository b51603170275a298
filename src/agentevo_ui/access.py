"""Access control: who may see the dashboard, and who may change something.

A visitor with the token sees the dashboard by GET, under a host name of this server.

The token is only in the first URL (`/?token=...`). A redirect to the same URL without the token
sets a cookie instead, so no address, referrer, bookmark or log contains the token. Every request
needs the cookie, also for static files. A request with an unknown name in `Host` is refused, so a
page of another site can't reach this server under that site's name (DNS rebinding).

GET and HEAD change nothing. Without `control`, all other methods are refused. With `control`, there
is a second token with its own URL (`/?control=...`) and cookie. A visitor with that token may POST
forms of the dashboard's pages. A visitor with only the first token gets a 403, and sees no buttons.

A form must come from a page of this server (`Sec-Fetch-Site`, `Origin`), and have at most MAX_BODY
bytes that arrive within BODY_TIMEOUT_S seconds. It must contain the token of the dashboard's forms,
which other sites can't know.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentevo.errors import describe_error
from agentevo.inference.serving.http_server import is_own_host
from agentevo.runtime.console import to_stderr

TOKEN = "token"
"""The URL parameter of a read-only visitor's token."""
CONTROL = "control"
"""The URL parameter of the control token."""
METHODS = ("GET", "HEAD")
VISITOR = "agentevo.visitor"
"""The key of a request's scope for its visitor."""
FORM = "agentevo.form"
"""The key of a request's scope for the fields of a POST. The guard reads the body."""
STREAM_PATHS = re.compile("/live|/runs/[^/]+/try/chat")
"""The paths with endless answers (live.py, try_page.py), which have their own deadlines."""
ANSWER_TIMEOUT_S = 60.0
"""The deadline of every other answer, in seconds."""
SEND_S = 30.0
"""A client that does not read its answer for this time, in seconds, is disconnected."""
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
"""The headers of every answer. A page may override `cache-control`."""
FORM_TOKEN = "form"
"""The name of the form field that contains `Visitor.form_token`."""
MAX_BODY = 1_000_000
BODY_TIMEOUT_S = 10.0
MAX_FIELDS = 1000
CONTENT_TYPE = "application/x-www-form-urlencoded"
CLOSED_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>AgentEvo</title><h1>AgentEvo</h1>'
    "<p>This dashboard needs its token: open the URL that <code>agentevo ui</code> printed.</p>"
    '<p>If you have just done that, <a href="">continue</a>.</p></html>'
)


@dataclass(frozen=True)
class Visitor:
    """The sender of a request."""

    address: str = ""
    who: str = ""
    """The name of the visitor's control token in records. Empty without control."""
    form_token: str = ""
    """The token that every form must have. Empty for a read-only visitor."""

    @property
    def may_change(self) -> bool:
        return bool(self.form_token)


class FormRefusedError(Exception):
    """A form is refused. The error has the HTTP status and the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_origin(headers: Headers, *, secure: bool) -> None:
    """Raises FormRefusedError unless the browser reports a page of this dashboard as the origin. A
    request without an origin is also refused, because every current browser names the origin of a
    POST."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    own_origin = f"{'https' if secure else 'http'}://{headers.get('host', '')}".lower()
    is_same_origin = origin is not None and origin.lower() == own_origin
    if site not in (None, "same-origin") or not is_same_origin:
        raise FormRefusedError(403, "the form was not sent by a page of this dashboard")


async def read_form(receive: Receive, headers: Headers) -> dict[str, str]:
    """The fields of a request's form. If several fields have the same name, the first one counts.
    Raises FormRefusedError."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != CONTENT_TYPE:
        raise FormRefusedError(415, f"the content type of a form is {CONTENT_TYPE}")

    length = headers.get("content-length", "0")
    too_long = FormRefusedError(413, f"a form has at most {MAX_BODY:,} bytes")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_long

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise FormRefusedError(400, "the connection ended before the end of the form")

                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise too_long
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise FormRefusedError(408, f"a form has to arrive within {BODY_TIMEOUT_S:.0f} s") from None

    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:
        raise FormRefusedError(400, "the form is not in UTF-8") from None

    return {name: text.replace("\r\n", "\n") for name, text in reversed(pairs)}


class Access:
    """The access rules of a dashboard. `hosts`: the names, in addition to addresses, under which
    browsers may call this server. `secure`: whether the server encrypts."""

    def __init__(
        self,
        *,
        hosts: Iterable[str] = (),
        secure: bool = False,
        token: str | None = None,
        control: str | bool = False,
    ) -> None:
        """`control`: whether visitors may change anything, or the token that they need for that."""
        self.token = token or new_token()
        self.control = "" if control is False else new_token() if control is True else control
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)} - {""}
        self.secure = secure
        self._pass = _seal("ui", self.token)
        """The cookie's value, which does not reveal the token."""
        self._control_pass = _seal("control", self.control)
        self._form_token = _seal("form", self.control)
        self.cookie = f"agentevo-ui-{self._pass[:8]}"
        """The cookie's name. All ports of a host share cookies, so the name differs for each
        dashboard."""
        self.control_cookie = f"agentevo-control-{self._control_pass[:8]}"

    def is_our_host(self, host: str) -> bool:
        """Whether a `Host` header names this server."""
        return is_own_host(host, self._hosts)

    def is_token(self, token: str) -> bool:
        """Whether this is the token of a read-only visitor."""
        return _is_same(token, self.token)

    def is_control_token(self, token: str) -> bool:
        """Whether this is the control token. False for a read-only dashboard."""
        return bool(self.control) and _is_same(token, self.control)

    def has_pass(self, cookies: str) -> bool:
        """Whether the `Cookie` header contains our cookie."""
        return _is_same(cookie_parser(cookies).get(self.cookie, ""), self._pass)

    def visitor(self, cookies: str, address: str) -> Visitor:
        """The visitor with these cookies."""
        cookie_value = cookie_parser(cookies).get(self.control_cookie, "")
        if not self.control or not _is_same(cookie_value, self._control_pass):
            return Visitor(address)
        return Visitor(address, f"control token {self._control_pass[:8]}", self._form_token)

    def is_form_token(self, token: str) -> bool:
        """Whether a page of this dashboard made the form, for a visitor with control."""
        return bool(self.control) and _is_same(token, self._form_token)

    def set_cookies(self, *, control: bool) -> list[str]:
        """The values of the headers that set the cookie, or with `control` both cookies."""
        cookies = [(self.cookie, self._pass)]
        cookies += [(self.control_cookie, self._control_pass)] if control else []
        secure = "; Secure" if self.secure else ""
        return [
            f"{name}={text}; Path=/; HttpOnly; SameSite=Strict{secure}" for name, text in cookies
        ]

    def url(self, base: str) -> str:
        """The URL that a visitor opens first."""
        return f"{base}/?{TOKEN}={self.token}"

    def control_url(self, base: str) -> str:
        """The URL that a visitor with control opens first."""
        return f"{base}/?{CONTROL}={self.control}"


class AccessGuard:
    """An ASGI application that protects another application by `Access`."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._headers = dict(HEADERS)
        if access.control:  # without a referrer, browsers don't name the origin of a form
            self._headers["referrer-policy"] = "same-origin"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        headers = Headers(scope=scope)
        cookies = "; ".join(headers.getlist("cookie"))
        connection: Any = (scope.get("state") or {}).get("connection")

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                response_headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    response_headers.setdefault(name, value)

            async with asyncio.timeout(SEND_S):
                await send(message)

        answer = self._refusal(scope, headers, cookies)
        if answer is not None:
            await answer(scope, receive, sending)
            return

        if connection is not None and not connection.admit():
            text = "too many connections: close some pages, and try again\n"
            await PlainTextResponse(text, 503)(scope, receive, sending)
            return

        try:
            visitor = self._access.visitor(cookies, _address_of(scope))
            scope = {**scope, VISITOR: visitor}
            if scope["method"] == "POST":
                scope[FORM] = await self._form(receive, headers, visitor)

            async with asyncio.timeout(
                None if STREAM_PATHS.fullmatch(scope["path"]) else ANSWER_TIMEOUT_S
            ):
                await self._app(scope, receive, sending)
        except FormRefusedError as refused:
            text = f"nothing was changed: {refused}\n"
            answer = PlainTextResponse(text, refused.status, {"connection": "close"})
            await answer(scope, receive, sending)
        # the deadline above has passed; the application's own timeouts have answers of their own
        except TimeoutError:
            to_stderr(f"ui: {scope['path']}: no complete answer within {ANSWER_TIMEOUT_S:g} s")
        except Exception as error:  # noqa: BLE001 (the failure of one page ends no other)
            to_stderr(f"ui: {scope['path']}: {describe_error(error)}")
        finally:
            if connection is not None:
                connection.leave()

    async def _form(self, receive: Receive, headers: Headers, visitor: Visitor) -> dict[str, str]:
        """The form of a request that may change something. Raises FormRefusedError if it may
        not."""
        if not visitor.may_change:
            raise FormRefusedError(403, "this needs the other URL that `agentevo ui` printed")
        check_origin(headers, secure=self._access.secure)
        form = await read_form(receive, headers)
        if not self._access.is_form_token(form.get(FORM_TOKEN, "")):
            raise FormRefusedError(403, "the form is out of date: load its page again")
        return form

    def _refusal(self, scope: Scope, headers: Headers, cookies: str) -> Response | None:
        """The answer to a request that is refused. None for an allowed request."""
        access = self._access
        method = scope["method"]
        if not access.is_our_host(headers.get("host", "")):
            text = "this server does not have that name: open the URL that was printed\n"
            return PlainTextResponse(text, 421)

        methods = (*METHODS, "POST") if access.control else METHODS
        if method not in methods:
            text = "only GET is allowed: this dashboard is read-only\n"
            return PlainTextResponse(text, 405, {"allow": ", ".join(methods)})

        closed = HTMLResponse(CLOSED_PAGE, 401, {"cache-control": "no-store"})
        query = scope["query_string"].decode("latin-1")
        pairs = parse_qsl(query, keep_blank_values=True)
        tokens = [value for name, value in pairs if name == TOKEN]
        controls = [value for name, value in pairs if name == CONTROL]
        if (tokens or controls) and method in METHODS:
            is_control = bool(controls) and access.is_control_token(controls[0])
            if not is_control and (controls or not access.is_token(tokens[0])):
                return closed

            query = urlencode([pair for pair in pairs if pair[0] not in (TOKEN, CONTROL)])
            # A single slash at the beginning, because two would name another host.
            path = "/" + quote(scope["path"].lstrip("/"), safe="/~:@!$&'()*+,;=-._")
            place = f"{path}?{query}" if query else path
            answer = Response(None, 303, {"location": place, "cache-control": "no-store"})
            for cookie in access.set_cookies(control=is_control):
                answer.headers.append("set-cookie", cookie)
            return answer

        return None if access.has_pass(cookies) else closed


def new_token() -> str:
    """A random token that can't be guessed."""
    return secrets.token_urlsafe(24)


def _seal(purpose: str, token: str) -> str:
    return hashlib.sha256(f"agentevo {purpose} {token}".encode()).hexdigest()


def _is_same(token: str, secret: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(token.encode("utf-8", "replace"), secret.encode())


def _address_of(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def names_of_this_machine() -> set[str]:
    """The names under which other machines can reach this one."""
    return {socket.gethostname(), socket.getfqdn()}
