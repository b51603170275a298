"""Requests to a run through its folder: each is done once, by the trainer that it was meant for,
and answered; a folder that fails costs a note and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentevo.errors import ConfigError
from agentevo.runs.folder.control import (
    REQUESTS,
    SESSION,
    ControlAnswer,
    ControlSession,
    RunControl,
    answer_to,
    ask,
    read_session,
)
from agentevo.runs.folder.records import CHANGES, read_records

LONGEST_S = 300.0


def until(found: Callable[[], object]) -> None:
    ends = time.monotonic() + LONGEST_S
    while not found():
        assert time.monotonic() < ends
        time.sleep(0.01)


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stops = list[str]()
        self.notes = list[str]()
        self.control = RunControl(
            folder, lambda: self.stops.append("stop"), note=self.notes.append, look_s=0.01
        )

    @property
    def session(self) -> ControlSession:
        until(lambda: read_session(self.folder))
        found = read_session(self.folder)
        assert found is not None
        return found

    def ask(self, do: str, id: str, session: str | None = None) -> None:
        told = self.session.id if session is None else session
        ask(self.folder, do, id=id, session=told, who="me")  # type: ignore[arg-type]

    def answer(self, id: str) -> ControlAnswer:
        until(lambda: answer_to(self.folder, id))
        found = answer_to(self.folder, id)
        assert found is not None
        return found


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    with made.control:
        yield made


def test_a_request_is_done_once_and_answered_where_everybody_sees_it(trainer: Trainer) -> None:
    trainer.ask("stop", "request-1")
    assert trainer.answer("request-1").is_done

    until(lambda: not list((trainer.folder / REQUESTS).iterdir()))
    trainer.ask("stop", "request-1")  # sent again, after its answer was lost
    trainer.ask("save", "request-2")
    until(lambda: trainer.control._saves)
    until(lambda: len(list((trainer.folder / REQUESTS).iterdir())) == 1)
    assert trainer.stops == ["stop"]

    (save,) = trainer.control.take_saves()
    assert trainer.control.take_saves() == []

    trainer.control.answer(save, "saved")
    assert trainer.answer("request-2").result == "saved"

    records = read_records(trainer.folder / CHANGES)
    assert [record["id"] for record in records] == ["request-1", "request-2"]
    assert {record["who"] for record in records} == {"the trainer"}


def test_a_pause_is_answered_when_the_run_stands_still_and_ends_by_resume(
    trainer: Trainer,
) -> None:
    trainer.ask("pause", "pause-001")
    until(lambda: trainer.control.is_pause_asked)
    assert answer_to(trainer.folder, "pause-001") is None  # the step goes on

    trainer.control.note_pause(7)
    assert trainer.answer("pause-001").result == "paused after step 7"
    assert trainer.session.is_paused

    trainer.ask("resume", "resume-01")
    until(lambda: not trainer.control.is_pause_asked)
    trainer.control.note_resume()
    assert not trainer.session.is_paused

    trainer.ask("resume", "resume-02")
    assert trainer.answer("resume-02").result == "it was not paused"


def test_a_pause_that_is_taken_back_before_the_step_ends_is_none(trainer: Trainer) -> None:
    trainer.ask("pause", "pause-001")
    until(lambda: trainer.control.is_pause_asked)
    trainer.ask("resume", "resume-01")
    assert not trainer.answer("pause-001").is_done
    assert not trainer.control.is_pause_asked


def test_a_request_for_an_earlier_trainer_never_reaches_a_later_one(tmp_path: Path) -> None:
    first = Trainer(tmp_path)
    with first.control:
        old = first.session.id
        first.ask("pause", "pause-001")
        until(lambda: first.control.is_pause_asked)

    assert not first.answer("pause-001").is_done  # it ended before it could
    assert first.session.has_ended

    ask(tmp_path, "stop", id="too-late-1", session=old, who="me")  # it was killed, say
    later = Trainer(tmp_path)
    with later.control:
        until(lambda: not list((tmp_path / REQUESTS).iterdir()))
        assert later.answer("too-late-1") == later.answer("too-late-1")
        assert not later.answer("too-late-1").is_done

    assert later.stops == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "another-id", "do": "stop"}', "x" * 10**6])
def test_what_is_no_request_is_left_alone(text: str, trainer: Trainer) -> None:
    session = trainer.session
    (trainer.folder / REQUESTS).mkdir()
    text = text.replace('"do"', f'"session": "{session.id}", "do"')
    (trainer.folder / REQUESTS / "request-1.json").write_text(text)
    (trainer.folder / REQUESTS / "fifo-0001.json").symlink_to("/dev/zero")
    os.mkfifo(trainer.folder / REQUESTS / "fifo-0002.json")
    trainer.ask("save", "request-2")
    until(lambda: trainer.control._saves)
    assert trainer.stops == []


def test_a_folder_that_nobody_can_write_costs_a_note(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "gone")
    with trainer.control:
        until(lambda: trainer.notes)
        trainer.control.note_resume()
        trainer.control.note_resume()
    assert len(trainer.notes) == 1
    assert "accepts no requests" in trainer.notes[0]


def test_an_id_or_a_link_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    for wrong in ("../outside", "", "a" * 65, "a/b-------"):
        with pytest.raises(ConfigError):
            ask(tmp_path, "stop", id=wrong, session="x", who="me")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / REQUESTS).symlink_to(elsewhere)

    with pytest.raises(ConfigError):
        ask(run, "stop", id="request-1", session="x", who="me")

    assert list(elsewhere.iterdir()) == []
    assert read_session(run) is None

    (run / SESSION).write_text("damaged")
    assert read_session(run) is None


def test_a_folder_where_a_request_should_be_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / REQUESTS / "00000000.json").mkdir(parents=True)
    trainer = Trainer(tmp_path)
    with trainer.control:
        trainer.ask("resume", "request-1")
        assert trainer.answer("request-1").is_done

    (tmp_path / SESSION).unlink()
    (tmp_path / SESSION).mkdir()
    before = len(os.listdir("/proc/self/fd"))

    assert all(read_session(tmp_path) is None for _ in range(3))
    assert len(os.listdir("/proc/self/fd")) == before
