"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from agentevo.runtime.files import create_atomic, write_atomic


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_at_once(durable, tmp_path):
    path = tmp_path / "a.json"
    write_atomic(path, "old ü", durable=durable)
    assert path.read_text(encoding="utf-8") == "old ü"

    with path.open("rb") as reader:
        write_atomic(path, b"new\r\n", durable=durable)
        assert reader.read() == "old ü".encode(), "who reads meanwhile reads the old one to its end"

    assert path.read_bytes() == b"new\r\n"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("broken", ["replace", "open"])
def test_what_fails_leaves_the_old_file_and_nothing_else(broken, tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new", durable=True)

    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / ".a.json.tmp").write_text("half of something longer")
    write_atomic(tmp_path / "a.json", "new")
    assert names(tmp_path) == ["a.json"]


def test_one_of_many_creates_a_file(tmp_path):
    path = tmp_path / "secret"
    barrier = threading.Barrier(8)
    wins = []

    def create(number):
        barrier.wait(timeout=300)
        if create_atomic(path, f"{number}\n" * 1000, mode=0o600):
            wins.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(wins) == 1
    assert path.read_text() == f"{wins[0]}\n" * 1000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["secret"]
