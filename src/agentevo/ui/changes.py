"""For pages that change something: what a handler of a POST needs.

`agentevo ui --control` alone answers POST, and only to somebody who has the cookie of control, by
a form of our own pages (access.py and forms.py see to it before any handler is called). A page:

    {{ ui.change(visitor, run_url(view.key, "control"), "Stop", {"do": "stop"}) }}   a button,
    nothing for who may not use it; or a form of its own inside of
    {% if visitor.may_change %}<form method="post" action="...">{{ ui.form_token(visitor) }}...

    @router.post("/runs/{run}/control")
    async def change_it(request: Request, run: str) -> Response:
        view, change = await run_of(request, run), changes(request)
        if not change.is_sure:
            return ask_again(request, change, "Stop this run?", "It ends after ...", back=url)

        async def stop() -> str:                   # called once, however often the form is sent
            await change.record(view, "stop after the step", outcome="asked")
            ...
            return url                             # a redirect: reloading asks for nothing again

        return see(await change.once(stop))

`visitor` is in every page (`page(...)`); pass `visitor=visitor(request)` to `part(...)`. A script
sends the same form by `fetch` or htmx, with the field `form` from any form of the page. What was
confirmed are these very fields at this very address: `sure` is made of them, and is good for one
time (confirmations.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.responses import RedirectResponse, Response

from agentevo.event_loop import in_thread
from agentevo.runs.records import CHANGES, add_record, read_records
from agentevo.ui.access import FORM
from agentevo.ui.confirmations import Confirmations
from agentevo.ui.context import NotFoundError, dashboard, page, visitor
from agentevo.ui.forms import FORM_TOKEN, PostedForm, Visitor
from agentevo.ui.run_state import RunView

SURE = "sure"
ID = "id"
WRITE_S = 10.0
"""The deadline of a disk."""
MAX_ID = 64
SHOWN_RECORDS = 200


class RequestedChange:
    """One request to change something, by somebody who may."""

    def __init__(
        self, who: Visitor, form: PostedForm, path: str, confirmations: Confirmations
    ) -> None:
        self.visitor = who
        self.path = path
        self._confirmations = confirmations
        self.fields: tuple[tuple[str, str], ...] = tuple(
            (name, text) for name, text in form.fields if name not in (FORM_TOKEN, SURE, ID)
        )
        self._form = form
        self.id = form.by_name.get(ID, "")[:MAX_ID] or uuid.uuid4().hex
        """The same for every try to send one form."""

    def get(self, name: str, default: str = "") -> str:
        """The text of a field, the first of that name."""
        return self._form.by_name.get(name, default)

    def get_all(self, name: str) -> list[str]:
        return [text for key, text in self.fields if key == name]

    @property
    def is_sure(self) -> bool:
        """Whether exactly this was shown to somebody who has then confirmed it."""
        seal = self._seal(self.fields)
        is_same = hmac.compare_digest(self.get(SURE).encode(), seal.encode())
        return is_same and self._confirmations.is_asked(seal)

    def to_confirm(self, more: Mapping[str, str]) -> list[tuple[str, str]]:
        """The fields by which this is confirmed: its own, with `more` in place of those of the same
        names, its id, and the seal on all of it."""
        kept = (field for field in self.fields if field[0] not in more)
        fields = (*kept, *more.items())
        seal = self._seal(fields)
        self._confirmations.remember_seal(seal)
        return [*fields, (ID, self.id), (SURE, seal)]

    async def once(self, work: Callable[[], Coroutine[Any, Any, str]]) -> str:
        """What `work` returns, where this is confirmed (`is_sure`): the same confirmation again
        does nothing, and gets the same."""
        return await self._confirmations.once(self.get(SURE), work)

    def _seal(self, fields: Sequence[tuple[str, str]]) -> str:
        about = repr((self.path, tuple(fields), self.id)).encode("utf-8", "backslashreplace")
        return hmac.new(self.visitor.form_token.encode(), about, hashlib.sha256).hexdigest()

    async def record(self, view: RunView, what: str, **details: Any) -> None:
        """Adds who did what, and when, to the run's changes.jsonl. Raises ConfigError."""
        folder = view.source.folder
        if folder is None:
            raise NotFoundError("This run has no folder here, so nothing of it can be changed.")

        record = {
            "at": time.time(),
            "who": self.visitor.who,
            "address": self.visitor.address,
            "id": self.id,
            "what": what,
            **details,
        }
        async with asyncio.timeout(WRITE_S):
            await in_thread(add_record, folder / CHANGES, record)


def changes(request: Request) -> RequestedChange:
    """What a POST wants to change. Only for handlers of POST: see the module."""
    form = request.scope[FORM]
    assert isinstance(form, PostedForm)
    return RequestedChange(
        visitor(request), form, request.url.path, dashboard(request).confirmations
    )


def ask_again(
    request: Request,
    change: RequestedChange,
    heading: str,
    text: str,
    *,
    back: str,
    do: str = "Yes, do it",
    whole: tuple[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> Response:
    """The page that asks whether that is really wanted; its form sends the same fields again, and
    those of `more`. `heading` and `text`: what will happen, and to what; `do`: the words of the
    button; `whole`: a heading and a long text below it."""
    return page(
        request,
        "confirm.html",
        heading=heading,
        text=text,
        back=back,
        do=do,
        action=change.path,
        whole=whole,
        fields=change.to_confirm(more or {}),
    )


def see(url: str) -> Response:
    """Leads to a page of ours once the change is made."""
    return RedirectResponse(url, status_code=303)


async def records_of(folder: Path | None) -> Sequence[dict[str, Any]]:
    """The newest changes of a run, the newest first."""
    if folder is None:
        return []
    async with asyncio.timeout(WRITE_S):
        return (await in_thread(read_records, folder / CHANGES))[: -SHOWN_RECORDS - 1 : -1]
