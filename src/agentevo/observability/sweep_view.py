"""The terminal output during a sweep.

On a terminal: a table of the running runs, each with the last line of its log, below the lines of
ended runs. Anywhere else: a plain line for each start and each end of a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Self, TextIO

from agentevo.runtime.console import format_duration, open_console, print_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


class SweepView:
    """A context manager. The sweep's own thread calls the methods. `plain=None`: plain lines unless
    `stream` is a terminal."""

    def __init__(
        self,
        title: str,
        *,
        stream: TextIO | None = None,
        plain: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._started_at = clock()
        self._ended: set[str] = set()
        self._total = 0
        self._spent: list[float] = []
        self._console = open_console(self._stream, plain)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console is not None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def plan(self, total: int, finished: Collection[str]) -> None:
        """Sets the total number of runs. `finished` are the names of runs that finished before. If
        one of them starts again, it counts again when it ends."""
        self._total = total
        self._ended = set(finished)
        self.note(
            f"{self.title}: {total} runs"
            + (f", {len(finished)} of them finished already" if finished else "")
        )

    def note_start(self, name: str, how: str) -> None:
        """Shows that a run starts. `how` is a word such as `started` or `resumed`."""
        self._ended.discard(name)
        if self._console is None:
            self.note(f"{name}: {how}")

    def note_end(self, name: str, outcome: str, seconds: float, *, ok: bool) -> None:
        """Shows that a run has ended, finished or failed."""
        self._ended.add(name)
        if ok:
            self._spent.append(seconds)
        self.note(
            f"{name}: {outcome}, {format_duration(seconds)} ({len(self._ended)} of {self._total})",
            style="" if ok else "bold red",
        )

    def running(self, runs: Mapping[str, tuple[float, str]]) -> None:
        """Shows the running runs: name -> (seconds so far, last line of its log). It may be called
        several times a second."""
        if self._live is not None:
            self._live.update(self._draw(runs))

    def note(self, text: str, *, style: str = "") -> None:
        """A line for the record."""
        if self._console is None:
            print_line(self._stream, text)
        else:
            from rich.text import Text

            self._console.print(Text(text, style))

    def _draw(self, runs: Mapping[str, tuple[float, str]]) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        for name, (seconds, line) in runs.items():
            table.add_row(Text(name, "bold"), format_duration(seconds), Text(line, "dim"))

        time_left = self._time_left(runs)
        heading = f"{self.title}  {len(self._ended)} of {self._total} ended" + (
            "" if time_left is None else f", about {format_duration(time_left)} left"
        )
        return Panel(
            table,
            title=heading,
            title_align="left",
            subtitle=format_duration(self._clock() - self._started_at),
            subtitle_align="right",
        )

    def _time_left(self, runs: Mapping[str, tuple[float, str]]) -> float | None:
        """The time left, by the mean time of the runs that finished here, at the current
        parallelism."""
        if not self._spent or not runs:
            return None
        mean = sum(self._spent) / len(self._spent)
        waiting = self._total - len(self._ended) - len(runs)
        return (waiting * mean + sum(max(mean - seconds, 0) for seconds, _ in runs.values())) / len(
            runs
        )
