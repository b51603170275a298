"""Errors for rows that were damaged after they were written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentevo.errors import StoreError, UnusableStoreError

D = TypeVar("D", bound=Callable[..., Any])

_TEXT = ("id", "task_id", "group_id", "split", "status", "state")
_WHOLE = (
    "step",
    "attempt",
    "fencing_id",
    "num_leases",
    "num_failures",
    "num_expiries",
    "num_trajectories",
    "num_turns",
    "num_completion_tokens",
)
_NUMBER = ("reward", "started_at", "duration_s", "written_at", "committed_at")
TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXT, (str,)),
    **dict.fromkeys(_WHOLE, (int,)),
    **dict.fromkeys(_NUMBER, (int, float)),
    **dict.fromkeys(("success", "truncated"), (bool,)),
    **dict.fromkeys(("error", "drop_reason"), (str, type(None))),
    "trained_step": (int, type(None)),
}
"""Maps a column to its allowed types, because SQLite stores any type in any column."""
NULLABLE: Mapping[str, tuple[str, ...]] = {"call": ("status", "duration_s")}
"""Maps a kind of row to the columns that may also be NULL: a running call has no end."""


def readable(kind: str) -> Callable[[D], D]:
    """Decorator for functions that decode a row. A row that no store could have written raises
    UnusableStoreError, which names the row."""

    def wrap(decode: D) -> D:
        @functools.wraps(decode)
        def decode_row(row: Mapping[Any, Any], *arguments: Any, **named: Any) -> Any:
            try:
                _check_types(kind, row)
                return decode(row, *arguments, **named)
            except StoreError as error:
                raise UnusableStoreError(f"{kind} {_name_of(row)}: {error}") from error
            except Exception as error:
                raise UnusableStoreError(
                    f"the row of {kind} {_name_of(row)} can't be read ({error}): it was changed; "
                    "restore the store from a copy"
                ) from error

        return decode_row  # type: ignore[return-value]

    return wrap


def _check_types(kind: str, row: Mapping[Any, Any]) -> None:
    for column, value in row.items():
        if value is None and column in NULLABLE.get(kind, ()):
            continue
        if column in TYPES and not isinstance(value, TYPES[column]):
            raise TypeError(f"{column} is {str(value)[:40]!r}")


def _name_of(row: Mapping[Any, Any]) -> str:
    return repr(row.get("id", row.get("step")))[:100]
