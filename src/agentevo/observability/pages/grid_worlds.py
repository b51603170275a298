"""Draws the grid worlds of RAGEN and AgentEvo in the text of a message, rows of symbols, as grids.
Only the layout changes, not the text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
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
"""Symbol -> its default class, without a legend of the world."""
MEANINGS = (
    ("hole", ("hole",)),
    ("player", ("player on target",)),
    ("done", (" on goal", " on the goal", " on target", " on a target")),
    ("wall", ("wall",)),
    ("box", ("box",)),
    ("player", ("player", "agent", "you")),
    ("goal", ("goal", "target", "exit")),
    ("floor", ("floor", "frozen", "ice", "empty", "ground")),
)
"""Class -> words of a legend for it; the first match counts."""
LEGEND = re.compile(r"^Symbols: (.{1,400})$", re.MULTILINE)
MAX_SIDE = 40
MIN_ROWS = 2
MIN_COLUMNS = 3


class WorldPiece(NamedTuple):
    """A piece of a message: running text, or the rows of a world."""

    text: str
    rows: list[list[tuple[str, str]]]
    """(symbol, class) of each cell; empty for text."""


Legend = Mapping[str, str]
NO_LEGEND: Legend = MappingProxyType({})


def legend_of(texts: Iterable[str]) -> Legend:
    """The legend of a world, such as `Symbols: P player, O hole.`: symbol -> class. The same sign
    is a hole in one world and a goal in another."""
    legend: dict[str, str] = {}
    for text in texts:
        for line in LEGEND.findall(text):
            for part in line.rstrip(". ").split(","):
                symbol, _, meaning = part.strip().partition(" ")
                kind = next(
                    (name for name, words in MEANINGS if any(word in meaning for word in words)), ""
                )
                if len(symbol) == 1 and kind:
                    legend[symbol] = "lost" if kind == "hole" and "player" in meaning else kind

    return legend


def pieces(text: str, legend: Legend = NO_LEGEND) -> list[WorldPiece]:
    """The message in its order; the texts of all pieces together are the message. `legend`: that of
    earlier messages; the message's own legend has priority."""
    symbols = {**SYMBOLS, **legend, **legend_of([text])}
    parts: list[WorldPiece] = []
    plain: list[str] = []
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        end = start
        width = _width(lines[start], symbols)
        while (
            width
            and end < len(lines)
            and _width(lines[end], symbols) == width
            and end - start < MAX_SIDE
        ):
            end += 1

        if width and end - start >= MIN_ROWS:
            if plain:
                parts.append(WorldPiece("\n".join(plain), []))
                plain = []

            rows = [
                [(symbol, symbols[symbol]) for symbol in _symbols(line)]
                for line in lines[start:end]
            ]
            parts.append(WorldPiece("\n".join(lines[start:end]), rows))
            start = end
        else:
            plain.append(lines[start])
            start += 1

    if plain:
        parts.append(WorldPiece("\n".join(plain), []))

    return parts


def _width(line: str, legend: Legend) -> int:
    """The width of a line that can be a row of a world; 0 for any other line."""
    if not MIN_COLUMNS <= len(line.strip()) <= 4 * MAX_SIDE:
        return 0
    symbols = _symbols(line)
    if not MIN_COLUMNS <= len(symbols) <= MAX_SIDE or not legend.keys() >= set(symbols):
        return 0
    return len(symbols)


def _symbols(line: str) -> list[str]:
    """The cells of a line: single characters, with or without spaces or tabs between them."""
    parts = line.split()
    return parts if len(parts) > 1 and all(len(part) == 1 for part in parts) else list(line.strip())
