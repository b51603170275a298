"""Engines that announce themselves in an object store."""

import asyncio
import logging
import threading
import time

import msgspec
import pytest

from agentevo.inference.serving import announcements
from agentevo.inference.serving.announcements import (
    AnnouncementWatcher,
    SignedAnnouncement,
    StoreAnnouncements,
)
from agentevo.inference.serving.directory import Announcement
from agentevo.inference.serving.secret import RunSecret
from agentevo.inference.weights.objects import Objects


def engine(name="one", port=8000, version=None):
    return Announcement(
        url=f"https://10.0.0.7:{port}", name=name, pid=1, started_at=1.0, certificate="ab" * 32,
        version=version,
    )  # fmt: skip


@pytest.fixture
def board(tmp_path):
    """`board()`: of the run; `board("other")`: of who has another secret."""

    def make(run="run"):
        return StoreAnnouncements(Objects(f"file://{tmp_path}/bucket"), RunSecret(tmp_path / run))

    return make


def test_who_has_the_secret_is_believed_and_nobody_else(board, caplog):
    board().announce(engine("one"))
    board("other").announce(engine("stranger", 9000))
    reader = board()
    with caplog.at_level(logging.WARNING):
        assert reader.living() == [engine("one")]
        assert reader.living() == [engine("one")]
    assert len(caplog.records) == 1 and "signed with another secret" in caplog.text


def test_an_entry_that_somebody_changed_is_not_believed(board, tmp_path):
    board().announce(engine("one"))
    (file,) = (tmp_path / "bucket" / "engines").iterdir()
    signed = msgspec.json.decode(file.read_bytes(), type=SignedAnnouncement)
    elsewhere = msgspec.structs.replace(signed.announcement, url="https://10.9.9.9:1")
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(signed, announcement=elsewhere)))
    assert board().living() == []

    file.write_bytes(b"no entry")
    assert board().living() == []

    board().announce(engine("one"))
    assert board().living() == [engine("one")]


def test_who_announces_itself_no_more_is_dead_by_the_readers_clock(board, monkeypatch):
    reader = board()
    now = [1000.0]
    monkeypatch.setattr(announcements.time, "monotonic", lambda: now[0])
    board().announce(engine("silent"))
    board().announce(engine("two", 8001))
    assert len(reader.living()) == 2

    now[0] += 61
    board().announce(engine("two", 8001, version=7))
    assert reader.living() == [engine("two", 8001, version=7)]

    board().withdraw(engine("two", 8001))
    assert reader.living() == []


def test_two_of_one_name_are_two(board):
    board().announce(engine("one"))
    board().announce(engine("one", 9000))
    assert {one.url for one in board().living()} == {
        "https://10.0.0.7:8000",
        "https://10.0.0.7:9000",
    }


def test_old_entries_are_swept_up(board, monkeypatch, tmp_path):
    then = time.time() - 7200
    with monkeypatch.context() as patched:
        patched.setattr(announcements.time, "time", lambda: then)
        board().announce(engine("old"))
    board().announce(engine("new", 9000))
    board().forget_dead()
    assert board().living() == [engine("new", 9000)]


def test_a_store_that_is_away_costs_no_engine(board, monkeypatch):
    board().announce(engine("one"))
    reader = board()
    watcher = AnnouncementWatcher(reader)
    asyncio.run(watcher.look())

    def away():
        raise OSError("no route")

    monkeypatch.setattr(reader, "living", away)
    asyncio.run(watcher.look())
    assert watcher.found == [engine("one")] and "no route" in watcher.trouble


def test_an_engine_is_announced_while_it_serves(board, tmp_path):
    async def work():
        versions = iter(range(100))
        async with board().keep_announced(
            engine("one"), serves=lambda: next(versions), every_s=0.01
        ):
            deadline = time.monotonic() + 300
            while not (found := board().living()) or found[0].version < 2:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        assert board().living() == []

    asyncio.run(work())


def test_an_announcement_that_is_being_written_does_not_outlive_its_engine(board, monkeypatch):
    writes = board()
    writing = threading.Event()
    go_on = threading.Event()
    announce = writes.announce

    def slowly(announcement):
        writing.set()
        assert go_on.wait(300)
        announce(announcement)

    monkeypatch.setattr(writes, "announce", slowly)

    async def work():
        async with writes.keep_announced(engine("one"), serves=lambda: 1):
            while not writing.is_set():
                await asyncio.sleep(0.01)
            asyncio.get_running_loop().call_later(0.1, go_on.set)

    asyncio.run(work())
    assert board().living() == []
