"""Tables of two columns on standard output, and the first sentence of a text for one."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SENTENCE_END = re.compile(r"(?<=\.)\s")


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Prints one (name, text) pair a line."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())


def first_sentence(text: str) -> str:
    """The first sentence of a text on one line, without its full stop."""
    return " ".join(_SENTENCE_END.split(text)[0].split()).rstrip(".")
