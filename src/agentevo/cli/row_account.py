"""What a command says of rows that it has written and of those that it has left out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentevo.data import RowReport


def tell_of_rows(report: RowReport, out: Path, what: str = "conversations") -> None:
    """Prints the account of rows that are now `what`, and names every row that was left out in
    OUT.bad_rows.jsonl."""
    for line in report.lines():
        print(line, file=sys.stderr)

    bad = out.with_name(f"{out.name}.bad_rows.jsonl")
    bad.unlink(missing_ok=True)
    if report.bad:
        report.write(bad)
        print(f"{report.kind}: all that were left out: {bad}", file=sys.stderr)

    print(f"{report.used} {what} written to {out}")
