"""The limit of requests a second for each key, and for each address that sends wrong keys.

A token bucket that holds a second's worth, kept as one number: the time when it will be full again
(the generic cell rate algorithm). It belongs to the gateway's event loop.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentevo.agents.gateway.refusals import Refusal

if TYPE_CHECKING:
    from fastapi import Request

MAX_ADDRESSES = 1024
"""The number of addresses with wrong keys that are remembered; the one that has been quiet longest
is dropped."""


class Allowance:
    """The remaining allowance of one key or address."""

    __slots__ = ("full_at",)

    def __init__(self) -> None:
        self.full_at = 0.0
        """When its bucket is full, by the clock of the limit."""


class RateLimit:
    """See the module. `per_s` of 0 is no limit."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._refill_s = max(1.0, 1.0 / per_s) if per_s else 0.0
        """The time from an empty to a full bucket, which holds at least one request."""
        self._addresses: OrderedDict[str, Allowance] = OrderedDict()

    def take(self, allowance: Allowance) -> None:
        """Counts a request. Raises Refusal if there are too many."""
        if not self._per_s:
            return

        now = self._clock()
        full_at = max(allowance.full_at, now) + 1.0 / self._per_s
        if (wait_s := full_at - now - self._refill_s) > 1e-9:
            raise Refusal(
                f"more than gateway.requests_per_s={self._per_s:g} requests a second: wait "
                f"{wait_s:.3g} s",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

        allowance.full_at = full_at

    def take_wrong_key(self, address: str) -> None:
        """Counts a request from this address with a wrong key."""
        if not self._per_s:
            return
        allowance = self._addresses.setdefault(address, Allowance())
        self._addresses.move_to_end(address)
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        self.take(allowance)


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def retry_headers(refusal: Refusal) -> dict[str, str]:
    """When to ask again: whole seconds, as HTTP has them, and milliseconds, as OpenAI's and
    Anthropic's clients read them as well."""
    if refusal.retry_after_s is None:
        return {}
    milliseconds = math.ceil(refusal.retry_after_s * 1000)
    return {
        "retry-after": str(math.ceil(refusal.retry_after_s)),
        "retry-after-ms": str(milliseconds),
    }
