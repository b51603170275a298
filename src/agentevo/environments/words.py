"""Grid worlds in words, relative to the player: an observation for policies that can't read a grid
yet.

A small model learns to use "goal two up, one right" in hundreds of episodes, and a grid of symbols
only in many thousands.
"""

from __future__ import annotations

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen",
)  # fmt: skip


def offset(rows: int, columns: int) -> str:
    """The position `rows` down and `columns` to the right (negative: up, left) in words: "two up,
    one right"."""
    vertical = f"{_number(rows)} {'down' if rows > 0 else 'up'}" if rows else "same row"
    horizontal = (
        f"{_number(columns)} {'right' if columns > 0 else 'left'}" if columns else "same column"
    )
    return f"{vertical}, {horizontal}"


def _number(distance: int) -> str:
    return NUMBERS[abs(distance)] if abs(distance) < len(NUMBERS) else str(abs(distance))
