"""Runs as the table of `agentevo top`, with a row for each run, and their running calls below
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentevo.observability.trajectory_view import visible

HEAD = ("run", "state", "step", "reward", "success", "tok/s", "stale", "playing", "failed", "warns")
SHOWN_WARNINGS = 3
MAX_NAME_CHARS = 40


@dataclass(frozen=True)
class RunLine:
    """The content of a row."""

    name: str
    state: str
    step: int = 0
    planned: int | None = None
    reward: float | None = None
    success: float | None = None
    tokens_per_s: float | None = None
    staleness: float | None = None
    playing: int | None = None
    """The number of running attempts. None if the store was not read, or is unavailable."""
    failed: float | None = None
    """The number of attempts of the newest step that failed."""
    warnings: tuple[str, ...] = ()
    problem: str = ""
    doing: str = field(default="", compare=False)
    """The current activity of the run's process."""
    reason: str = field(default="", compare=False)
    """Why the run stopped, or writes no heartbeat."""
    calls: tuple[str, ...] = field(default=(), compare=False)
    """A line for each running attempt."""

    def cells(self) -> tuple[str, ...]:
        return (
            visible(self.name)[:MAX_NAME_CHARS],
            self.state,
            str(self.step) if self.planned is None else f"{self.step}/{self.planned}",
            _number(self.reward, "{:.3f}"),
            _number(self.success, "{:.0%}"),
            _number(self.tokens_per_s, "{:,.0f}"),
            _number(self.staleness, "{:.1f}"),
            _number(self.playing, "{:d}"),
            _number(self.failed, "{:.0f}"),
            str(len(self.warnings)) if self.warnings else "-",
        )

    def words(self) -> list[str]:
        """The run's activity and its problems, the newest last."""
        warning_lines = [f"! {visible(text)}" for text in self.warnings[-SHOWN_WARNINGS:]]
        wrong = [f"! {visible(text)}" for text in (self.reason, self.problem) if text]
        return [*([visible(self.doing)] if self.doing else []), *wrong, *warning_lines]


def plain_lines(runs: Sequence[RunLine]) -> list[str]:
    """The table, the activity and problems of each run, and its running attempts."""
    rows = [HEAD, *(run.cells() for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for run in runs:
        run_lines = [*run.words(), *run.calls]
        lines += [f"{visible(run.name)[:MAX_NAME_CHARS]}: {line}" for line in run_lines]

    return lines


def _number(value: float | int | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
