"""RUN/now.json: what a run does, for others, whatever its disk does."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from agentevo.errors import ConfigError
from agentevo.observability import current_activity as now_file
from agentevo.observability.current_activity import NOW, Moment, NowFile, read_moment

WAIT_S = 300.0


def until(folder: Path, phase: str) -> Moment:
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        moment = read_moment(folder / NOW)
        if moment is not None and moment.phase == phase:
            return moment
        time.sleep(0.01)
    raise AssertionError(f"{phase} was not written")


def test_it_says_what_the_run_does_and_how_it_ended(tmp_path: Path) -> None:
    shown = [Moment(phase="sampling", detail="step 3", done=37, total=64, unit="attempts")]
    with NowFile(tmp_path, lambda: shown[-1], least_s=0.01):
        assert until(tmp_path, "sampling").words() == "sampling, step 3: 37 of 64 attempts"
        shown.append(Moment(phase="training"))
        moment = until(tmp_path, "training")
        assert moment.ended == "" and moment.silent_s() < WAIT_S and moment.process

    last = read_moment(tmp_path / NOW)
    assert last is not None and last.ended == "finished"
    assert [path.name for path in tmp_path.iterdir()] == [NOW]


@pytest.mark.parametrize(
    ("error", "ended", "reason"),
    [
        (ConfigError("the disk is full: make room"), "failed", "the disk is full: make room"),
        (ValueError("two\nlines"), "failed", "ValueError: two lines"),
        (ConfigError("half \ud800 of a pair"), "failed", "half ? of a pair"),
        (KeyboardInterrupt(), "stopped", ""),
        (SystemExit(143), "stopped", ""),
    ],
)
def test_it_says_why_the_run_ended(
    error: BaseException, ended: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(type(error)), NowFile(tmp_path, Moment):
        raise error
    last = read_moment(tmp_path / NOW)
    assert last is not None and (last.ended, last.reason) == (ended, reason)


@pytest.mark.slow
def test_it_is_written_once_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    monkeypatch.setattr(now_file, "write_atomic", lambda *_: written.append(time.monotonic()))
    steps = iter(range(10**9))
    with NowFile(tmp_path, lambda: Moment(step=next(steps))):
        ends = time.monotonic() + WAIT_S
        while len(written) < 3 and time.monotonic() < ends:
            time.sleep(0.01)

    gaps = [after - before for before, after in pairwise(written[:-1])]  # the last ends the run
    assert len(gaps) >= 2 and min(gaps) > 0.99


def test_a_disk_that_takes_nothing_costs_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    with NowFile(tmp_path / "gone", Moment, note=notes.append):
        pass
    assert len(notes) == 1 and "No such file" in notes[0]
    assert not (tmp_path / "gone").exists()


def test_a_disk_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    answers = threading.Event()
    monkeypatch.setattr(now_file, "write_atomic", lambda *_: answers.wait(WAIT_S))
    monkeypatch.setattr(now_file, "END_TIMEOUT_S", 0.1)
    began = time.monotonic()

    with NowFile(tmp_path, Moment, note=notes.append):
        pass
    assert time.monotonic() - began < WAIT_S / 2

    answers.set()
    assert "does not answer" in notes[0]


def test_another_of_several_processes_writes_nothing(tmp_path: Path) -> None:
    with NowFile(tmp_path, Moment, is_written=False):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 50_000,
        b'{"phase": 3}',
        b'{"heartbeat_at": 1e300}',
        b'{"since": NaN}',
        b'{"done": Infinity}',
        b"\xff\xfe",
        b" " * 200_000,
    ],
)
def test_a_file_of_somebody_else_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NOW).write_bytes(content)
    assert read_moment(tmp_path / NOW) is None


def test_a_file_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / NOW).write_text(json.dumps({"phase": "paused", "of_tomorrow": [1]}))
    moment = read_moment(tmp_path / NOW)
    assert moment is not None and moment.words() == "paused"


@pytest.mark.parametrize(
    ("moment", "ended"),
    [
        (Moment(step=3, planned=8, is_stopping=True), "stopped"),
        (Moment(step=8, planned=8, is_stopping=True), "finished"),
        (Moment(step=3, is_stopping=True), "stopped"),
        (Moment(step=3), "finished"),
    ],
)
def test_a_run_that_was_asked_to_stop_before_its_last_step_was_stopped(
    moment: Moment, ended: str, tmp_path: Path
) -> None:
    with NowFile(tmp_path, lambda: moment):
        pass
    last = read_moment(tmp_path / NOW)
    assert last is not None and last.ended == ended
