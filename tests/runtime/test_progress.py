"""Progress: nothing of quick work, whole lines where there is no terminal, honest time left."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest

from agentevo.runtime import progress

PATIENCE_S = 300.0


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is drawn at once, and again and again."""
    for name in ("FIRST_BAR_S", "FIRST_LINE_S", "LINE_S", "FRAME_S"):
        monkeypatch.setattr(progress, name, 0.001)


def wait_for(stream: io.StringIO, words: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while words not in stream.getvalue():
        assert time.monotonic() < until, stream.getvalue()
        threading.Event().wait(0.01)


def test_quick_work_leaves_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with progress.showing(stream):
            assert list(progress.over(range(1000), "count", 1000)) == list(range(1000))
        assert stream.getvalue() == ""


def test_nothing_is_drawn_unless_a_command_says_so(soon: None) -> None:
    stream = io.StringIO()
    with progress.showing(stream), progress.hidden(), progress.bar("work") as bar:
        bar.advance()
    with progress.bar("work"):
        assert not progress.is_shown()
    assert stream.getvalue() == ""


def test_lines_stand_on_their_own(soon: None) -> None:
    stream = io.StringIO()
    with progress.showing(stream), progress.bar("export", 2000, "rows") as bar:
        bar.advance(1500)
        wait_for(stream, "export: 1,500 of 2,000 rows (75%)")
        with progress.bar("inner"):
            assert not progress.is_shown()

    lines = stream.getvalue().splitlines()
    assert all(re.match(r"export: .*\d", line) and "\x1b" not in line for line in lines)
    assert re.fullmatch(r"export: 1,500 rows in .*s", lines[-1])


def test_a_bar_is_gone_at_the_end(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress.showing(stream), progress.bar("[red]load", 4e6, "bytes") as bar:
        bar.to(1e6)
        wait_for(stream, "1.0 MB of 4.0 MB (25%)")
    assert "[red]load" in stream.getvalue(), "no markup"
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))


def test_the_time_left_grows_in_a_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.ProgressBar("work", 100, "rows")
    assert bar.time_left(bar.pace()) is None

    now[0] += 10
    bar.to(10)
    assert bar.time_left(bar.pace()) == pytest.approx(90)

    now[0] += 10
    assert bar.time_left(bar.pace()) == pytest.approx(180)

    now[0] += 1000
    assert bar.time_left(bar.pace()) is None, "nothing has moved for long"
    assert "so far" in bar.facts()[-1]


def test_a_reader_that_is_gone_ends_nothing(soon: None) -> None:
    stream = io.StringIO()
    stream.close()
    with progress.showing(stream), progress.bar("work", 10) as bar:
        bar.advance()
        threading.Event().wait(0.05)
