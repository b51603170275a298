"""The forms of the dashboard's pages. Only a POST of such a form can change something.

The form must come from a page of this server (`Sec-Fetch-Site`, `Origin`), and have at most
MAX_BODY bytes that arrive within BODY_TIMEOUT_S seconds. It must contain the token of the
dashboard's forms, which other sites can't know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.types import Receive

FORM_TOKEN = "form"
"""The name of the form field that contains `Visitor.form_token`."""
MAX_BODY = 1_000_000
BODY_TIMEOUT_S = 10.0
MAX_FIELDS = 1000
CONTENT_TYPE = "application/x-www-form-urlencoded"


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
