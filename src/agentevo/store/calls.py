"""Calls in the store, and their rows.

The recorder of the process that makes a call (call_log.py) writes the call while it runs, and again
when it has ended. While the call runs, the recorder renews its time stamp every few seconds. A call
without an end is `running` if its time stamp is recent. Otherwise it is `lost`: its process was
killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

import msgspec

from agentevo.errors import StoreError
from agentevo.store.clock import CLOCK_TOLERANCE_S
from agentevo.store.damage_errors import readable
from agentevo.types import Call

CallState = Literal["running", "lost", "ended"]

LOST_S = 30.0
"""The number of seconds without a renewal after which a call without an end counts as lost."""
NEVER_SEEN = -1e9
"""`seen_at` of a call from another store, whose clock has no meaning here."""

_JSON = msgspec.json.Encoder(order="deterministic")
_ATTRIBUTES = msgspec.json.Decoder(dict[str, str | int | float | bool])
COLUMNS = tuple(Call.__struct_fields__)


class StoredCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call and its state."""

    call: Call
    state: CallState


class CallFilter(TypedDict, total=False):
    """A filter of calls, in the order of their first writes. An absent key or None matches any
    value."""

    trajectory_id: str | None
    state: CallState | None
    limit: int | None
    newest_first: bool


def checked_call_filters(filters: CallFilter) -> tuple[str | None, CallState | None, int | None]:
    """The filters as (trajectory id, state, limit). Refuses an unknown state and a negative
    limit."""
    state = filters.get("state")
    limit = filters.get("limit")
    if state is not None and state not in get_args(CallState):
        raise StoreError(
            f"calls: state={state!r} is unknown: use one of {', '.join(get_args(CallState))}"
        )

    if limit is not None and limit < 0:
        raise StoreError(f"calls: limit={limit} is negative: leave it out to get all")

    return filters.get("trajectory_id"), state, limit


def check_recorder(recorder: str) -> None:
    if not re.fullmatch("[0-9a-f]+", recorder):
        raise StoreError(f"{recorder!r} is not a recorder of calls: use the beginning of their ids")


def encode_call(call: Call, seen_at: float | None) -> dict[str, Any]:
    """The row of a call, without `seq`. `seen_at` is set only for a call without an end."""
    try:
        attributes = _JSON.encode(call.attributes).decode()
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise StoreError(
            f"call {call.id!r} of {call.trajectory_id!r} can't be stored: {error}; attributes "
            f"must be texts, numbers or booleans"
        ) from error

    row = {name: getattr(call, name) for name in COLUMNS}
    seen_at = seen_at if call.ended_at is None else None
    return row | {"attributes": attributes, "seen_at": seen_at}


@readable("call")
def decode_call(row: Mapping[Any, Any], now: float) -> StoredCall:
    """`now` is a time of the store's steady clock. A time in the future comes from another clock:
    the machine was restarted, or the call is from another store."""
    fields = {name: row[name] for name in COLUMNS}
    call = Call(**(fields | {"attributes": _ATTRIBUTES.decode(row["attributes"])}))
    state: CallState = "ended"
    if row["seen_at"] is not None:
        is_seen = -CLOCK_TOLERANCE_S <= now - row["seen_at"] <= LOST_S
        state = "running" if is_seen else "lost"
    return StoredCall(call=call, state=state)
