"""Worlds in the text of a message: rows of symbols, as the grid worlds of RAGEN and AgentEvo write
them, drawn as the grids that they are. The text stays the text: only how it is set differs."""

from __future__ import annotations

from typing import NamedTuple

SYMBOLS = {
    "#": "wall",
    "W": "wall",
    "_": "floor",
    ".": "floor",
    "-": "floor",
    "O": "goal",
    "G": "goal",
    "√": "done",
    "V": "done",
    "C": "done",
    "X": "box",
    "B": "box",
    "P": "player",
    "A": "player",
    "S": "player",
    "@": "player",
    "H": "hole",
    "F": "floor",
}
"""Symbol -> the class that it is drawn with; others are drawn as they are."""
MAX_SIDE = 40
MIN_ROWS, MIN_COLUMNS = 2, 3


class Piece(NamedTuple):
    """Of a message: running text, or the rows of a world."""

    text: str
    rows: list[list[tuple[str, str]]]
    """(symbol, class) of each cell; empty for text."""


def pieces(text: str) -> list[Piece]:
    """The message in its order; the texts of all pieces together are the message."""
    found: list[Piece] = []
    plain: list[str] = []
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        end = start
        width = _width(lines[start])
        while width and end < len(lines) and _width(lines[end]) == width and end - start < MAX_SIDE:
            end += 1
        if width and end - start >= MIN_ROWS:
            if plain:
                found.append(Piece("\n".join(plain), []))
                plain = []
            rows = [_cells(line) for line in lines[start:end]]
            found.append(Piece("\n".join(lines[start:end]), rows))
            start = end
        else:
            plain.append(lines[start])
            start += 1
    if plain:
        found.append(Piece("\n".join(plain), []))
    return found


def _width(line: str) -> int:
    """Of a line that can be a row of a world; 0 of another one."""
    if not MIN_COLUMNS <= len(line.strip()) <= 4 * MAX_SIDE:
        return 0
    symbols = _symbols(line)
    known = sum(symbol in SYMBOLS for symbol in symbols)
    if not MIN_COLUMNS <= len(symbols) <= MAX_SIDE or known < len(symbols):
        return 0
    return len(symbols)


def _symbols(line: str) -> list[str]:
    """Cells stand beside each other, or apart by spaces or tabs."""
    parts = line.split()
    return parts if len(parts) > 1 and all(len(part) == 1 for part in parts) else list(line.strip())


def _cells(line: str) -> list[tuple[str, str]]:
    return [(symbol, SYMBOLS[symbol]) for symbol in _symbols(line)]
