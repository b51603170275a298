"""Running attempts and trees of calls as lines of text."""

from __future__ import annotations

from typing import Any

from agentevo.observability.call_view import running_lines, tree_lines
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


def test_a_tree_of_calls_with_every_try_of_the_attempt() -> None:
    calls = [
        stored("search", "first", ago=59.0, state="lost"),
        attempt("first", ago=60.0, state="lost"),
        attempt("second", ago=10.0),
        stored("late", "second", ago=2.0),
        stored("ask", "second", ago=9.5, took=0.5, kind="policy", attributes={"turn": 0}),
        stored("fails", "ask", ago=9.4, took=0.1, status="failed", error="ValueError: no\n"),
        stored("orphan", "not recorded", ago=5.0, took=1.0),
    ]
    assert tree_lines(calls, NOW) == [
        "attempt Player  lost",
        "  tool search   lost",
        "attempt Player  10.0 s, running",
        "  policy ask    500 ms  turn=0",
        "    tool fails  100 ms, failed: ValueError: no↵",
        "  tool late     2.0 s, running",
        "tool orphan     1.0 s",
    ]
