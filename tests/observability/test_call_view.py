"""Running attempts as lines of text."""

from __future__ import annotations

from typing import Any

from agentevo.observability.call_view import running_lines
from agentevo.store import StoredCall
from agentevo.types import Call

NOW = 1.7e9


def stored(number: str, parent: str | None = None, **changes: Any) -> StoredCall:
    """A call that is named as its id; ago: seconds since its start; took: None while it runs."""
    ago = changes.pop("ago", 10.0)
    took = changes.pop("took", None)
    state = changes.pop("state", "running" if took is None else "ended")
    fields: dict[str, Any] = {
        "id": number,
        "trajectory_id": "t#0",
        "parent": parent,
        "kind": "tool",
        "name": number,
        "started_at": NOW - ago,
        "ended_at": None if took is None else NOW - ago + took,
        "status": None if took is None else "completed",
    }
    return StoredCall(call=Call(**(fields | changes)), state=state)


def attempt(number: str, **changes: Any) -> StoredCall:
    return stored(number, kind="attempt", name="Player", **changes)


def test_a_line_for_each_attempt_that_runs_with_what_it_waits_for() -> None:
    calls = [
        attempt("young", ago=3.0, trajectory_id="task-10#1"),
        attempt("old", ago=400.0),
        stored("plan", "old", ago=100.0),
        stored("search", "plan", ago=0.25),
        stored("ask\n", "plan", ago=1.5, kind="policy"),
    ]
    assert running_lines(calls, NOW) == [
        "t#0        7 min     tool search 250 ms, policy ask↵ 1.5 s",
        "task-10#1  3.0 s     -",
    ]

    many = [attempt(str(number), trajectory_id=str(number)) for number in range(45)]
    assert running_lines(many, NOW)[-1] == "and 5 more"
    assert running_lines([], NOW) == []
