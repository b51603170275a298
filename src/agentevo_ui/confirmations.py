"""Confirmations of requests that a page has shown. Each is valid for one request.

A page that needs a confirmation adds it, and the page's form sends the id back. Above
MAX_CONFIRMATIONS, the oldest are forgotten, used or not, and their forms need a new confirmation.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict

MAX_CONFIRMATIONS = 2_000


class Confirmations:
    """The confirmations of a dashboard. They belong to the dashboard's event loop, and no call here
    waits on it."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._used: set[str] = set()

    def add(self, *request: str) -> str:
        """The id of a confirmation for exactly this request, which a page is about to show."""
        id = uuid.uuid4().hex
        self._shown[id] = request
        while len(self._shown) > MAX_CONFIRMATIONS:
            oldest, _ = self._shown.popitem(last=False)
            self._used.discard(oldest)

        return id

    def covers(self, id: str, *request: str) -> bool:
        """Whether a page has shown exactly this request under that id."""
        return self._shown.get(id) == request

    def use(self, id: str) -> bool:
        """Whether this is the first use of the confirmation. A later use is a form that was sent
        again."""
        is_first = id not in self._used
        self._used.add(id)
        return is_first

    def withdraw(self, id: str) -> None:
        """Forgets a confirmation whose request has failed. Its form needs a new one."""
        self._shown.pop(id, None)
        self._used.discard(id)
