"""Output for a terminal or a log: lines with the time on stderr, next to any view, and the parts of
views and bars."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move a terminal's cursor, change its state, or change the reading order. Line
breaks and tabs are not among them."""


def without_controls(text: str) -> str:
    """Makes a foreign text safe to print: control characters become JSON escapes."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_listeners: list[Callable[[str], None]] = []


def listen(listener: Callable[[str], None]) -> None:
    """From now on, calls the listener with each line of `to_stderr`, on the thread that prints the
    line."""
    _listeners.append(listener)


def unlisten(listener: Callable[[str], None]) -> None:
    """Ends the calls of the listener."""
    _listeners.remove(listener)


def to_stderr(line: str) -> None:
    """Prints a line. A closed stream is not an error."""
    for listener in list(_listeners):
        listener(line)
    with suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def format_duration(seconds: float) -> str:
    """`0.42s`, `8.3s`, `3m07s`, `2h05m`, `3d04h`: three figures at most."""
    if seconds < 1:
        return f"{max(seconds, 0):.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"

    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes}m{round(seconds) % 60:02d}s"
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"

    return f"{minutes // 1440}d{minutes % 1440 // 60:02d}h"


def open_console(stream: TextIO, plain: bool | None) -> Console | None:
    """A console that draws on `stream`. None if plain lines are printed, because the caller
    requests them or `stream` is not a terminal that can draw."""
    if not stream.isatty() if plain is None else plain:
        return None
    from rich.console import Console

    console = Console(file=stream)
    drawable = not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    return console if drawable else None


def print_line(stream: TextIO, text: str, end: str = "\n") -> None:
    """Prints a line, with escapes for characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(
        text.encode(encoding, "backslashreplace").decode(encoding), file=stream, end=end, flush=True
    )
