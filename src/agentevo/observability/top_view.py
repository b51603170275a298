"""Runs as the table of `agentevo top`, with a row for each run, and the calls of one run below
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentevo.observability.pages.words import sparkline
from agentevo.observability.trajectory_view import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = ("run", "state", "step", "reward", "success", "tok/s", "stale", "playing", "failed", "warns")
SHOWN_WARNINGS = 3
MAX_NAME_CHARS = 40
LIVING = ("running", "paused", "silent")
"""The states of a run whose process has its lock."""
SPARKS_SHOWN = 20
HELP = "j/k choose   enter calls   q quit"


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
    rewards: tuple[float, ...] = ()
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


def plain_lines(runs: Sequence[RunLine], *, calls: bool = False) -> list[str]:
    """The table without a terminal."""
    rows = [HEAD, *(run.cells() for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for run in runs:
        run_lines = [*run.words(), *(run.calls if calls else ())]
        lines += [f"{visible(run.name)[:MAX_NAME_CHARS]}: {line}" for line in run_lines]

    return lines


def draw(
    runs: Sequence[RunLine], chosen: int, *, calls: bool, height: int, width: int = 120
) -> RenderableType:
    """The table for a terminal of that size, with the chosen run marked, and its details below. A
    narrow terminal shows only the first columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    rows = [run.cells() for run in runs]
    heads = (*HEAD, "rewards")
    widths = [max(len(row[column]) for row in [HEAD, *rows]) for column in range(len(HEAD))]
    widths.append(SPARKS_SHOWN)
    fitting = [sum(widths[: number + 1]) + number < width for number in range(len(heads))]
    num_columns = max(fitting.count(True), 2)
    for number, title in enumerate(heads[:num_columns]):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)

    room = max(height // 2, 3)
    first = max(0, min(chosen - room // 2, len(runs) - room))
    for number, run in enumerate(runs[first : first + room], start=first):
        style = "reverse" if number == chosen else "" if run.state in LIVING else "dim"
        cells = (*run.cells(), sparkline(run.rewards[-SPARKS_SHOWN:]))
        table.add_row(*(Text(cell) for cell in cells[:num_columns]), style=style)

    below: list[RenderableType] = []
    if runs:
        run = runs[chosen]
        below += [Text(line, "yellow") for line in run.words()]
        if calls:
            shown = list(run.calls) or ["nothing is running"]
            num_shown = max(height - room - len(below) - 6, 3)
            below += [
                Text(),
                Text(visible(run.name), "bold"),
                *(Text(line) for line in shown[:num_shown]),
            ]
            if len(shown) > num_shown:
                below.append(Text(f"and {len(shown) - num_shown} more", "dim"))

    return Group(table, Text(), *below, Text(), Text(HELP, "dim"))


def _number(value: float | int | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)
