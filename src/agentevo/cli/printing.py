"""What commands print: tables of two columns, notes on stderr, and accounts of rows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentevo.data import RowReport

_SENTENCE_END = re.compile(r"(?<=\.)\s")


def print_note(line: str) -> None:
    """Prints a line for the user on stderr: stdout has only the results of the command."""
    print(line, file=sys.stderr, flush=True)


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    """Prints one row a line, its columns below those of the other rows."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def first_sentence(text: str) -> str:
    """The first sentence of a text on one line, without its full stop."""
    return " ".join(_SENTENCE_END.split(text)[0].split()).rstrip(".")


def tell_of_rows(report: RowReport, out: Path, what: str = "conversations") -> None:
    """Prints the account of rows that are now `what`, and names every row that was left out in
    OUT.bad_rows.jsonl."""
    for line in report.lines():
        print_note(line)

    bad = out.with_name(f"{out.name}.bad_rows.jsonl")
    bad.unlink(missing_ok=True)
    if report.bad:
        report.write(bad)
        print_note(f"{report.kind}: all that were left out: {bad}")

    print(f"{report.used} {what} written to {out}")
