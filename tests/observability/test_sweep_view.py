"""What a sweep shows: lines for a log, and a table with the time left for a terminal."""

import io

import pytest
from rich.console import Console

from agentevo.observability.sweep_view import SweepView


def test_a_log_has_a_line_for_each_beginning_and_end():
    stream = io.StringIO()
    with SweepView("zoo", stream=stream) as view:
        view.plan(3, ["leave-0"])
        view.note_start("ppo-0", "resumed")
        view.running({"ppo-0": (3.0, "step 1/4")})
        view.note_end("ppo-0", "success 10.0% -> 60.0%", 31.0, ok=True)

    assert stream.getvalue().splitlines() == [
        "zoo: 3 runs, 1 of them finished already",
        "ppo-0: resumed",
        "ppo-0: success 10.0% -> 60.0%, 31.0s (2 of 3)",
    ]


def test_what_had_finished_and_runs_again_is_counted_once():
    stream = io.StringIO()
    with SweepView("shop", stream=stream) as view:
        view.plan(3, ["a", "b"])
        for name in ("b", "c", "b"):
            view.note_start(name, "started")
            view.note_end(name, "done", 1.0, ok=True)

    counted = [line.partition("(")[2] for line in stream.getvalue().splitlines() if "(" in line]
    assert counted == ["2 of 3)", "3 of 3)", "3 of 3)"]


def drawn(view: SweepView, runs: dict[str, tuple[float, str]]) -> str:
    page = io.StringIO()
    Console(file=page, width=100).print(view._draw(runs))
    return page.getvalue()


def test_a_terminal_shows_the_runs_under_way_and_the_time_left(terminal, clock):
    with SweepView("zoo", stream=terminal, clock=clock) as view:
        view.plan(6, [])
        assert "left" not in drawn(view, {"a-0": (1.0, "step 1/4")})
        view.note_end("a-0", "success", 20.0, ok=True)
        view.note_end("a-1", "failed", 999.0, ok=False)
        clock.now = 65.0
        shown = drawn(view, {"b-0": (5.0, "step 3/4 | reward 0.5"), "b-1": (15.0, "-- evaluating")})

    assert "zoo  2 of 6 ended" in shown
    assert "step 3/4 | reward 0.5" in shown
    assert "1m05s" in shown
    assert "about 30.0s left" in shown  # 2 waiting x 20 s + 15 s + 5 s, two at a time
    assert "a-1: failed, 16m39s (2 of 6)" in terminal.getvalue()


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_text_that_looks_like_markup_is_shown_as_it_is(monkeypatch, terminal, term):
    monkeypatch.setenv("TERM", term)
    with SweepView("zoo", stream=terminal) as view:
        view.note("error: [bold]: sweep.seeds[0]")
    assert "[bold]: sweep.seeds[0]" in terminal.getvalue()
    assert "[bold] line" in drawn(view, {"a": (1.0, "[bold] line")})


def test_a_stream_without_unicode_gets_escapes_and_no_panel(terminal, monkeypatch):
    log = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with SweepView("zoo", stream=log) as view:
        view.note_start("müll-0", "started")

    log.seek(0)
    assert log.read() == "m\\xfcll-0: started\n"

    monkeypatch.setattr(terminal, "encoding", "ascii", raising=False)

    with SweepView("zoo", stream=terminal) as view:
        view.note_start("a-0", "started")

    assert terminal.getvalue() == "a-0: started\n"
