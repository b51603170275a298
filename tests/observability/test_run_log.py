"""The log of a run: all that it says, and what it ended with."""

from __future__ import annotations

import io
import re

import pytest

from agentevo.observability import LiveView, run_log
from agentevo.observability.run_log import RunLog
from agentevo.runtime.console import to_stderr

STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


def lines_of(folder):
    text = (folder / "logs/train.log").read_text(encoding="utf-8")
    return STAMP.sub("", text).splitlines()


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["plain", "drawn"])
def test_it_has_what_is_said_whether_it_is_printed_or_drawn(stream, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = stream()
    with RunLog() as log, LiveView("a run", stream=shown) as view:
        view.record = log.write
        view.phase("loading", "tiny")
        assert not (tmp_path / "logs").exists()
        log.begin(tmp_path, "agentevo train, process 7")
        view.phase("loading", "tiny")
        view.note("resumed from postgresql://me:secret@host/db")
        view.warn("nothing was learnt")
        view.step(1, 2, {"critic/score/mean": 0.5}, {})
        view.evaluation(1, {"val-core/coins/success/greedy": 1.0, "val-core/coins/n": 3.0})
        to_stderr("the attempt a failed: KeyError\nTraceback ...")

    lines = lines_of(tmp_path)
    assert lines[:5] == [
        "agentevo train, process 7",
        "-- loading: tiny",
        "resumed from postgresql://me:***@host/db",
        "WARNING nothing was learnt",
        "step 1/2 | reward 0.500",
    ] or lines[4].startswith("step 1/2 | reward 0.500")
    assert "held-out evaluation at step 1: coins, 3 tasks" in lines
    assert lines[-2:] == ["the attempt a failed: KeyError", "Traceback ..."]


def test_it_ends_with_the_traceback_and_hears_nothing_afterwards(tmp_path):
    def end(words, error):
        with RunLog() as log:
            log.begin(tmp_path, words)
            raise error

    with pytest.raises(KeyError):
        end("first", KeyError("colour"))

    to_stderr("later")
    lines = lines_of(tmp_path)
    assert lines[-1] == "KeyError: 'colour'" and any("in end" in line for line in lines)

    with pytest.raises(KeyboardInterrupt):
        end("again", KeyboardInterrupt())
    assert lines_of(tmp_path)[-2:] == ["again", "ended by KeyboardInterrupt"]


def test_it_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "MAX_BYTES", 1000)
    with RunLog() as log:
        log.begin(tmp_path, "first")
        for number in range(200):
            log.write(f"line {number}")

    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["train.log", "train.log.1"]
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "logs").iterdir())
    assert lines_of(tmp_path)[-1] == "line 199"


def test_a_log_that_can_not_be_written_costs_nothing_else(tmp_path, capsys):
    (tmp_path / "logs/train.log").mkdir(parents=True)
    with RunLog() as log:
        log.begin(tmp_path, "first")
        log.write("second")
    assert capsys.readouterr().err.count("is no longer written") == 1
