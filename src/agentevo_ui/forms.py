"""The only kind of request that can change something: a form of the dashboard's pages, by POST.

The form must come from a page of this server (`Sec-Fetch-Site`, `Origin`), and have at most
MAX_BODY bytes that arrive within BODY_S seconds. It must contain the token of the dashboard's
forms, which no other site can know.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.types import Receive

FORM_TOKEN = "form"
"""The field of every form with `Visitor.form_token`."""
MAX_BODY = 1_000_000
BODY_S = 10.0
MAX_FIELDS = 1000
KIND = "application/x-www-form-urlencoded"


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
    """A request that changes nothing, with its status and the reason."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def check_from_here(headers: Headers, *, secure: bool) -> None:
    """Raises FormRefusedError unless the browser names a page of this dashboard as the sender. A
    request without a sender is also refused, because every current browser names the origin of a
    POST."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    own_origin = f"{'https' if secure else 'http'}://{headers.get('host', '')}".lower()
    is_ours = origin is not None and origin.lower() == own_origin
    if site not in (None, "same-origin") or not is_ours:
        raise FormRefusedError(403, "this was not sent by a page of this dashboard")


async def read_form(receive: Receive, headers: Headers) -> dict[str, str]:
    """The fields of a request's form. Of several with the same name, the first counts. Raises
    FormRefusedError."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != KIND:
        raise FormRefusedError(415, f"a form is {KIND}")

    length = headers.get("content-length", "0")
    too_long = FormRefusedError(413, f"a form has at most {MAX_BODY:,} bytes")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_BODY):
        raise too_long

    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise FormRefusedError(400, "the connection has ended within the form")

                body += message.get("body", b"")
                if len(body) > MAX_BODY:
                    raise too_long
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise FormRefusedError(408, f"a form has to arrive within {BODY_S:.0f} s") from None

    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:
        raise FormRefusedError(400, "this form is not in UTF-8") from None

    return {name: text.replace("\r\n", "\n") for name, text in reversed(pairs)}
