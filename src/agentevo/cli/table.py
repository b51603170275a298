"""Two columns on standard output, for the commands of cli.py and those beside it."""

from __future__ import annotations

from collections.abc import Iterable


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """(name, text) a line."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())
