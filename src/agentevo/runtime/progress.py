"""Progress of work that takes a while: a bar, the rate and the time left, on stderr.

    with bar("store export", total=50_000, unit="rows") as progress:
        for row in rows:
            progress.advance()

If a command has called `showing(stderr)`, a thread reads the number now and then and draws it. On a
terminal it draws a bar, which disappears at the end. Elsewhere it prints a complete line after
FIRST_LINE_S seconds and then every LINE_S seconds. Work that ends earlier prints nothing. Without
`showing`, as from Python, nothing is ever drawn. Within a bar, no other bar is drawn. Within
`hidden`, another view shows the progress, and can read the running bars. The time left follows from
the pace of the last WINDOW_S seconds, including standstills. `advance` costs an addition.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO, TypeVar

from agentevo.runtime.console import format_duration, open_console, print_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

T = TypeVar("T")
FIRST_BAR_S = 1.0
FIRST_LINE_S = 2.0
LINE_S = 15.0
FRAME_S = 0.2
WINDOW_S = 30.0
MIN_PACE_S = 2.0
"""The shortest observation of the pace, in seconds, before a time left is shown."""


class Display:
    """The output on which bars are drawn, one at a time."""

    def __init__(self, stream: TextIO, plain: bool | None = None) -> None:
        self.stream = stream
        self.plain = plain
        self.taken = threading.Lock()


class Hidden:
    """Bars that are not drawn."""

    def __init__(self) -> None:
        self._bars: tuple[ProgressBar, ...] = ()

    def newest(self) -> ProgressBar | None:
        """The running bar that started last. Any thread may call this."""
        bars = self._bars
        return bars[-1] if bars else None

    @contextmanager
    def has(self, bar: ProgressBar) -> Iterator[None]:
        """A block around the work that the bar counts."""
        self._bars = (*self._bars, bar)
        try:
            yield
        finally:
            self._bars = tuple(other_bar for other_bar in self._bars if other_bar is not bar)


_display: ContextVar[Display | Hidden | None] = ContextVar("agentevo_progress", default=None)


@contextmanager
def showing(stream: TextIO, *, plain: bool | None = None) -> Iterator[None]:
    """Bars within this block are drawn on the stream. `plain=None`: plain lines unless the stream
    is a terminal."""
    token = _display.set(Display(stream, plain))
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def hidden() -> Iterator[Hidden]:
    """No bar is drawn within this block, because another view shows the progress."""
    bars = Hidden()
    token = _display.set(bars)
    try:
        yield bars
    finally:
        _display.reset(token)


def is_shown() -> bool:
    """Whether a bar that starts now would be drawn."""
    display = _display.get()
    return isinstance(display, Display) and not display.taken.locked()


class ProgressBar:
    """Counts the work that is done."""

    def __init__(
        self, what: str, total: float | None, unit: str, look: Callable[[], float] | None = None
    ) -> None:
        self.what = what
        self.total = total
        self.unit = unit
        self.done = 0.0
        self._read_done = look
        self._began = time.monotonic()
        self._seen: deque[tuple[float, float]] = deque([(self._began, 0.0)])

    def advance(self, count: float = 1) -> None:
        self.done += count

    def to(self, done: float) -> None:
        """Sets the amount of work that is done."""
        self.done = done

    def counted_now(self) -> float:
        """The amount of work that is done now."""
        if self._read_done is not None:
            self.done = self._read_done()
        return self.done

    def pace(self) -> float:
        """The recent rate of work per second. Only one thread may call this."""
        self.counted_now()
        now = time.monotonic()
        self._seen.append((now, self.done))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        first_time, before = self._seen[0]
        return max(self.done - before, 0.0) / (now - first_time) if now > first_time else 0.0

    def time_left(self, pace: float) -> float | None:
        """The time left in seconds. None if it can't be known."""
        if self.total is None or pace <= 0 or self.elapsed < MIN_PACE_S:
            return None
        return max(self.total - self.done, 0.0) / pace

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def count_text(self) -> str:
        """`12,000 of 50,000 rows (24%)`. Empty for a bar without a number."""
        if self.total is None:
            return f"{_amount(self.done, self.unit)}" if self.done else ""
        share = f" ({min(self.done / self.total, 1.0):.0%})" if self.total else ""
        done = _amount(self.done, self.unit)
        total = _amount(self.total, self.unit)
        return f"{done.removesuffix(f' {self.unit}')} of {total}{share}"

    def facts(self) -> list[str]:
        """The number, the rate, and the time left, or else the elapsed time."""
        pace = self.pace()
        seconds_left = self.time_left(pace)
        texts = [self.count_text(), f"{_amount(pace, self.unit, rate=True)}/s" if pace else ""]
        texts.append(
            f"{format_duration(self.elapsed)} so far"
            if seconds_left is None
            else f"about {format_duration(seconds_left)} left"
        )
        return [fact for fact in texts if fact]


@contextmanager
def bar(
    what: str,
    total: float | None = None,
    unit: str = "rows",
    look: Callable[[], float] | None = None,
) -> Iterator[ProgressBar]:
    """A block with a bar. `unit`: a plural noun, or `bytes`. `look` returns the amount of work that
    is done, if no code counts it. Another thread calls it."""
    new_bar = ProgressBar(what, total, unit, look)
    display = _display.get()
    if isinstance(display, Hidden):
        with display.has(new_bar):
            yield new_bar
        return

    if display is None or not display.taken.acquire(blocking=False):
        yield new_bar
        return

    over = threading.Event()
    thread = threading.Thread(target=_draw, args=(new_bar, display, over), daemon=True)
    thread.start()
    try:
        yield new_bar
    finally:
        over.set()
        thread.join(5.0)  # a terminal that accepts no output does not block the work
        display.taken.release()


def over(
    items: Iterable[T], what: str, total: float | None = None, unit: str = "rows"
) -> Iterator[T]:
    """Yields the items and counts them."""
    with bar(what, total, unit) as progress_bar:
        for item in items:
            yield item
            progress_bar.advance()


def _draw(progress_bar: ProgressBar, display: Display, over: threading.Event) -> None:
    if over.wait(FIRST_BAR_S):
        return

    try:
        console = open_console(display.stream, display.plain)
        if console is None:
            _print_lines(progress_bar, display.stream, over)
        else:
            _draw_frames(progress_bar, console, over)
    except (OSError, ValueError):  # the stream's reader is gone, or its file is full
        return


def _print_lines(progress_bar: ProgressBar, stream: TextIO, over: threading.Event) -> None:
    if over.wait(FIRST_LINE_S - FIRST_BAR_S):
        return

    while True:
        print_line(stream, f"{progress_bar.what}: {', '.join(progress_bar.facts())}")
        if over.wait(LINE_S):
            end = _amount(progress_bar.done, progress_bar.unit) if progress_bar.done else "done"
            print_line(
                stream, f"{progress_bar.what}: {end} in {format_duration(progress_bar.elapsed)}"
            )
            return


def _draw_frames(progress_bar: ProgressBar, console: Console, over: threading.Event) -> None:
    from rich.live import Live

    frame = _frame(progress_bar)
    with Live(
        frame, console=console, transient=True, auto_refresh=False, redirect_stdout=False
    ) as live:
        while not over.wait(FRAME_S):
            live.update(_frame(progress_bar), refresh=True)


def _frame(progress_bar: ProgressBar) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    share = ProgressBar(
        total=progress_bar.total,
        completed=progress_bar.done,
        width=30,
        pulse=progress_bar.total is None,
    )
    grid.add_row(Text(progress_bar.what), share, Text(", ".join(progress_bar.facts()), "dim"))
    return grid


def _amount(count: float, unit: str, *, rate: bool = False) -> str:
    if unit == "bytes":
        return f"{count / 1e6:,.1f} MB"
    number = f"{count:,.1f}" if rate and count < 10 else f"{count:,.0f}"
    return f"{number} {unit}"
