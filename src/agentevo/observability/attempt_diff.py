"""Two attempts side by side, turn by turn and message by message, as lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from agentevo.observability.attempt_view import MORE, ending
from agentevo.store.calls import StoredCall
from agentevo.types import Message, TextPart, Trajectory

MAX_LINES = 1_500
"""The maximum number of lines of an attempt."""
CONTEXT = 3
"""The number of lines of context around a difference. Longer equal stretches are skipped."""
Played = tuple[Trajectory, Sequence[StoredCall]]
"""An attempt, and its recorded calls."""


def lines_of(attempt: Played) -> list[list[tuple[str, str]]]:
    """The (who, line) pairs of all messages of each turn, and of the last observation, at most
    MAX_LINES."""
    trajectory, calls = attempt
    turns: list[list[tuple[str, str]]] = []
    budget = MAX_LINES
    for turn in trajectory.turns:
        lines: list[tuple[str, str]] = []
        for message in turn.messages:
            texts = [message.reasoning or "", *_texts(message)]
            texts += [f"{call.name} {call.arguments}" for call in message.tool_calls]
            for text in filter(None, texts):
                lines += [(message.role, line) for line in text[:MORE].split("\n")][:budget]

        turns.append(lines[:budget])
        budget -= len(turns[-1])
        if budget <= 0:
            break

    end = "\n".join(piece.text for piece in ending(trajectory, calls))
    return [*turns, [("world", line) for line in end.split("\n") if end]]


def _texts(message: Message) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content if isinstance(part, TextPart)]


class DiffRow(NamedTuple):
    """Two lines side by side. `kind`: same, gone, new, changed, skipped, or turn. A row of the kind
    `turn` starts the turn that `who` names."""

    kind: str
    who: str
    left: str
    right: str
    skipped: int = 0


def diff(left: Played, right: Played) -> list[DiffRow]:
    """The messages of two attempts, side by side, turn by turn and line by line. Long equal
    stretches are skipped. Turns behind MAX_LINES of either attempt are not compared, and the last
    row says so."""
    *ones, one_end = lines_of(left)
    *twos, two_end = lines_of(right)
    sides = ((left[0], ones), (right[0], twos))
    cut = [len(turns) for trajectory, turns in sides if len(turns) < len(trajectory.turns)]
    rows: list[DiffRow] = []
    for number in range(min(cut, default=max(len(ones), len(twos)))):
        rows.append(DiffRow("turn", f"Turn {number}", "", ""))
        first_turn = ones[number] if number < len(ones) else []
        second_turn = twos[number] if number < len(twos) else []
        for first_lines, second_lines in _pairs(first_turn, second_turn):
            rows += _compare_lines(first_lines, second_lines)

    if cut:
        rest = f"Turns from {min(cut)} on are too long to be compared"
        rows.append(DiffRow("turn", rest, "", ""))

    if one_end or two_end:
        rows += [DiffRow("turn", "At the end", "", ""), *_compare_lines(one_end, two_end)]

    return rows


Lines = list[tuple[str, str]]


def _pairs(first: Lines, second: Lines) -> list[tuple[Lines, Lines]]:
    """Pairs of the lines of each message, if both turns have the same roles in the same order. Else
    a single pair of all their lines."""
    ones, twos = (
        [(who, list(of)) for who, of in groupby(x, lambda s: s[0])] for x in (first, second)
    )
    if [who for who, _ in ones] != [who for who, _ in twos]:
        return [(first, second)]
    return [
        (first_lines, second_lines)
        for (_, first_lines), (_, second_lines) in zip(ones, twos, strict=True)
    ]


def _compare_lines(first: Lines, second: Lines) -> list[DiffRow]:
    from difflib import SequenceMatcher

    rows: list[DiffRow] = []
    is_long = max(len(first), len(second)) > 300
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=is_long).get_opcodes():
        if kind == "equal":
            rows += _same(first[a:b])
            continue

        for index in range(max(b - a, d - c)):
            old = first[a + index] if a + index < b else None
            new = second[c + index] if c + index < d else None
            who = (old or new or ("", ""))[0]
            what = "changed" if old and new else "gone" if old else "new"
            rows.append(DiffRow(what, who, old[1] if old else "", new[1] if new else ""))

    return rows


def _same(lines: Sequence[tuple[str, str]]) -> list[DiffRow]:
    rows = [DiffRow("same", who, line, line) for who, line in lines]
    if len(rows) <= 2 * CONTEXT + 2:
        return rows
    left_out: Any = len(rows) - 2 * CONTEXT
    return [*rows[:CONTEXT], DiffRow("skipped", "", "", "", left_out), *rows[-CONTEXT:]]
