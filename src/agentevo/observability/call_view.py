"""The calls that are running now, as lines of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from agentevo.observability.trajectory_view import visible
from agentevo.store import StoredCall

MAX_SHOWN = 40
"""The maximum number of attempts in a list of running calls."""


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


def _title(stored: StoredCall) -> str:
    return visible(f"{stored.call.kind} {stored.call.name}")
