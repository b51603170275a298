"""The header of W3C's Trace Context that links a request to the call that makes it. Every package
that sends requests uses this header, including those below the store, which records the calls.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

HEADER = "traceparent"


current: ContextVar[Any] = ContextVar("agentevo call", default=None)
"""The call that this code runs in, which has its `place` in a trace. store/call_log.py sets it."""


def traceparent() -> str | None:
    """The header with the call that this code runs in. None without tracing."""
    call = current.get()
    place = None if call is None else call.place
    return None if place is None else str(place.header)


def trace_headers() -> dict[str, str]:
    """`traceparent` as a request's headers. Empty without tracing."""
    parent = traceparent()
    return {} if parent is None else {HEADER: parent}
