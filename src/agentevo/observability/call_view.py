"""Calls as lines of plain text: the calls that are running now, and the calls of an attempt as a
tree with durations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentevo.observability.trajectory_view import visible
from agentevo.store import StoredCall

MAX_SHOWN = 40
"""The maximum number of attempts in a list of running calls."""
LONG = 300
"""An attribute with more characters than this is shown as its length."""


def duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1000 * max(seconds, 0.0):.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min"


def running_lines(calls: Sequence[StoredCall], now: float) -> list[str]:
    """A line for each running attempt, the oldest first: its duration so far, and its current call.
    `now` is Unix time."""
    inner = {stored.call.parent for stored in calls}
    attempts = [stored.call for stored in calls if stored.call.kind == "attempt"]
    width = max((len(attempt.trajectory_id) for attempt in attempts), default=0)
    lines = []
    for attempt in sorted(attempts, key=lambda call: call.started_at):
        waits = [
            f"{_title(stored)} {duration(now - stored.call.started_at)}"
            for stored in calls
            if stored.call.trajectory_id == attempt.trajectory_id
            and stored.call.kind != "attempt"
            and stored.call.id not in inner
        ]
        since = duration(now - attempt.started_at)
        name = visible(attempt.trajectory_id)
        lines.append(f"{name:<{width}}  {since:<8}  {', '.join(waits) or '-'}")

    if len(lines) > MAX_SHOWN:
        lines[MAX_SHOWN:] = [f"and {len(lines) - MAX_SHOWN} more"]

    return lines


def tree_lines(calls: Iterable[StoredCall], now: float) -> list[str]:
    """Every call of an attempt below the call in which it was made, in the order of their starts.
    An attempt that was tried several times has several trees."""
    inside: dict[str | None, list[StoredCall]] = {}
    by_id = {stored.call.id: stored for stored in calls}
    for stored in by_id.values():
        parent = stored.call.parent if stored.call.parent in by_id else None
        inside.setdefault(parent, []).append(stored)

    lines: list[tuple[str, str]] = []
    waiting = [(stored, 0) for stored in reversed(_sort_by_start(inside.get(None, [])))]
    while waiting:
        stored, depth = waiting.pop()
        lines.append((f"{'  ' * depth}{_title(stored)}", _facts(stored, now)))
        within = _sort_by_start(inside.get(stored.call.id, []))
        waiting += [(child, depth + 1) for child in reversed(within)]

    width = max((len(title) for title, _ in lines), default=0)
    return [f"{title:<{width}}  {facts}" for title, facts in lines]


def _sort_by_start(calls: list[StoredCall]) -> list[StoredCall]:
    return sorted(calls, key=lambda stored: stored.call.started_at)


def _title(stored: StoredCall) -> str:
    return visible(f"{stored.call.kind} {stored.call.name}")


def _short(value: str | float) -> str:
    """An attribute in one line. A process's output is shown as its length."""
    text = str(value)
    return text if len(text) <= LONG else f"{len(text)} characters"


def _facts(stored: StoredCall, now: float) -> str:
    """`12 ms  turn=3 completion_tokens=9`, with the error if there is one."""
    call = stored.call
    if stored.state == "lost":
        time = "lost"
    elif call.ended_at is None:
        time = f"{duration(now - call.started_at)}, running"
    else:
        time = duration(call.ended_at - call.started_at)

    if call.status not in (None, "completed"):
        time += f", {call.status}" + (f": {visible(call.error)}" if call.error else "")

    facts = " ".join(f"{name}={_short(value)}" for name, value in call.attributes.items())
    return f"{time}  {visible(facts)}".rstrip()
