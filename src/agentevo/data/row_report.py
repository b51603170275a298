"""The report of every row: used, or left out for a reason that is shown, counted and stored."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentevo.errors import AgentEvoError

REASONS = {
    "not_utf8": "not UTF-8",
    "not_json": "not JSON",
    "not_csv": "not CSV",
    "unknown_form": "not in the file's form",
    "empty": "empty",
    "no_answer": "no answer to judge by",
    "wrong_roles": "wrong roles",
    "media": "pictures, sounds or films, and models read only text here",
    "image": "an image that can't be used",
    "bad_tool_call": "broken tool call",
    "template": "the chat template can't write it",
    "no_assistant_mask": "the chat template marks no assistant tokens",
    "special_token": "a special token in a text",
    "unknown_characters": "characters that the tokenizer has no token for",
    "too_long": "too long",
    "low_reward": "attempt without success, or below the lowest reward",
    "alike": "two attempts that are the same",
    "beyond_per_task": "attempt beyond the limit per task",
    "attempt_failed": "attempt that failed or was cancelled",
    "cut_off": "no complete answer",
    "failed_call": "call that failed",
    "no_content": "call whose messages were not recorded",
    "continued": "part of a longer one",
    "duplicate": "the same as an earlier one",
    "duplicate_task": "the same task as in an earlier row",
}
"""Maps the names of the reasons for leaving out a row, as in metrics, to their descriptions."""

SHOWN = 5
"""The number of rows that are shown for each reason. `bad_rows.jsonl` has all of them."""


class RowError(AgentEvoError):
    """A row that can't be trained on. The row is left out and reported, and the run continues."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class BadRow:
    """A row that is left out."""

    where: str
    """FILE:LINE, FILE:row N, or another name of the row."""
    reason: str
    """One of REASONS."""
    detail: str
    """The problem, and how to correct it."""


@dataclass
class RowReport:
    """The report of all rows of one kind (training, held-out)."""

    kind: str
    rows: int = 0
    """The number of rows read, good and bad."""
    shortened: int = 0
    """The number of rows that are used without their oldest turns, because they would be too
    long."""
    bad: list[BadRow] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    """The places of used rows without an answer."""

    def add(self, where: str, error: RowError) -> None:
        """Counts a bad row, which must also be counted in `rows`."""
        self.bad.append(BadRow(where, error.reason, error.detail))

    @property
    def used(self) -> int:
        return self.rows - len(self.bad)

    def counts(self) -> dict[str, int]:
        """Maps a reason to its number of bad rows, the most frequent reason first."""
        counts = Counter(row.reason for row in self.bad)
        return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))

    def lines(self) -> list[str]:
        """The report as readable lines: one for all rows, and one for each reason with its first
        rows."""
        lines = [
            f"{self.kind}: {self.used} of {self.rows} rows are used"
            + (f", {self.shortened} shortened" if self.shortened else "")
        ]
        count = len(self.unanswered)
        if 0 < count < self.used:  # if no row has an answer, the recipe's rewards need none
            rest = f", and {count - SHOWN} more" if count > SHOWN else ""
            lines.append(
                f"{self.kind}: {count} of {self.used} rows have no answer, while the others have "
                f"one: {', '.join(self.unanswered[:SHOWN])}{rest}"
            )

        for reason, count in self.counts().items():
            rows = [row for row in self.bad if row.reason == reason]
            rest = f", and {count - SHOWN} more" if count > SHOWN else ""
            lines.append(
                f"{self.kind}: {count} left out, {REASONS[reason]}: "
                f"{', '.join(row.where for row in rows[:SHOWN])}{rest}"
            )
            lines.append(f"{self.kind}: the first: {rows[0].where}: {rows[0].detail}")

        return lines

    def metrics(self) -> dict[str, float]:
        """The counts as metrics, `data/KIND/...`."""
        counts = {
            "rows": self.rows,
            "used": self.used,
            "shortened": self.shortened,
            "left_out": len(self.bad),
        }
        counts |= {f"left_out/{reason}": count for reason, count in self.counts().items()}
        return {f"data/{self.kind}/{name}": float(value) for name, value in counts.items()}

    def summary(self) -> dict[str, Any]:
        reasons = {
            reason: {
                "count": count,
                "first": [row.where for row in self.bad if row.reason == reason][:SHOWN],
            }
            for reason, count in self.counts().items()
        }
        return {
            "rows": self.rows,
            "used": self.used,
            "shortened": self.shortened,
            "left_out": reasons,
        }

    def write(self, path: Path) -> None:
        """Appends every bad row to a JSONL file: {"kind", "where", "reason", "detail"}."""
        with path.open("a", encoding="utf-8") as file:
            for row in self.bad:
                file.write(json.dumps({"kind": self.kind, **asdict(row)}) + "\n")
