"""Two attempts beside each other: what is compared, and what is too long for that."""

from __future__ import annotations

import pytest

from agentevo.observability import attempt_diff
from agentevo.types import Message, Trajectory, Turn


def played(*texts: str) -> attempt_diff.Played:
    turns = [
        Turn(
            index=number,
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[-1.0],
            versions=[0],
            finish_reason="stop",
            temperature=1.0,
            seed=0,
            messages=[Message("assistant", text)],
        )
        for number, text in enumerate(texts)
    ]
    trajectory = Trajectory(id="a", task_id="t", group_id="g", attempt=0, turns=turns)
    return trajectory, []


def test_turns_stand_beside_each_other_and_lines_that_differ_are_told() -> None:
    rows = attempt_diff.diff(played("one\ntwo", "same"), played("one\nthree"))
    assert [(row.kind, row.left or row.who, row.right) for row in rows] == [
        ("turn", "Turn 0", ""),
        ("same", "one", "one"),
        ("changed", "two", "three"),
        ("turn", "Turn 1", ""),
        ("gone", "same", ""),
    ]


def test_what_lies_behind_a_long_turn_is_not_called_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_diff, "MAX_LINES", 3)
    long = played("a\nb\nc\nd\ne", "same", "same")
    short = played("a", "same", "same")
    for left, right in ((long, short), (short, long)):
        rows = attempt_diff.diff(left, right)
        assert not any("same" in (row.left, row.right) for row in rows)
        assert rows[-1].who == "Turns from 1 on are too long to be compared"
