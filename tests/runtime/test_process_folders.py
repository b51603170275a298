"""Folders of processes: those of a killed process are deleted, those of a living one stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentevo.runtime import process_folders
from agentevo.runtime.process_folders import is_gone, new_folder, owner, remove_folder

PREFIX = "agentevo-test-"
PROGRAM = """
import sys
from agentevo.runtime.process_folders import new_folder
print(new_folder(sys.argv[1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary folder."""
    monkeypatch.setattr(process_folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_deleted_with_the_next(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, PREFIX],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(temporary), "PYTHONPATH": ":".join(sys.path)},
    ) as program:
        assert program.stdout is not None
        theirs = Path(program.stdout.readline().strip())
        (theirs / "file").write_text("content")

        first = new_folder(PREFIX)
        assert theirs.exists()

        program.kill()
        deadline = time.monotonic() + 300
        while psutil.Process(program.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        second = new_folder(PREFIX)  # nobody has reaped the process yet

    assert sorted(temporary.iterdir()) == sorted([first, second])


def test_only_folders_of_ended_processes_of_this_machine_are_deleted(temporary: Path) -> None:
    namespace, pid, started = owner().split("-")
    another = f"{int(started, 16) + 1:x}"
    foreign = "0" * len(namespace)
    stale = temporary / f"{PREFIX}{namespace}-{pid}-{another}-suffix"
    stale.mkdir()
    kept = [
        temporary / f"{PREFIX}{namespace}-{pid}-{started}-suffix",
        temporary / f"{PREFIX}{foreign}-{pid}-{another}-suffix",
        temporary / f"{PREFIX}notes",
        temporary / "target",
    ]
    for folder in kept:
        folder.mkdir()
        (folder / "file").write_text("content")

    link = temporary / f"{PREFIX}{namespace}-{pid}-{another}-link"
    link.symlink_to(temporary / "target")

    new = new_folder(PREFIX)
    assert sorted(temporary.iterdir()) == sorted([*kept, link, new])
    assert all((folder / "file").exists() for folder in kept)


def test_a_process_lives_on_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = owner()
    start = psutil.Process().create_time()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: start + 3600)
    assert not is_gone(identity)


@pytest.mark.parametrize("name", ["d", "d" * 200])
def test_a_deep_folder_is_removed(temporary: Path, name: str) -> None:
    """Deeper than Python's recursion and, with long names, than the system's longest path."""
    namespace, pid, started = owner().split("-")
    stale = temporary / f"{PREFIX}{namespace}-{pid}-{int(started, 16) + 1:x}-suffix"
    stale.mkdir()
    make_chain(stale, name, 1500)

    new = new_folder(PREFIX)
    assert list(temporary.iterdir()) == [new]


def make_chain(top: Path, name: str, depth: int) -> None:
    """Makes folders in one another, each with a file."""
    folder = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        os.mkdir(name, dir_fd=folder)
        outer = folder
        folder = os.open(name, os.O_RDONLY, dir_fd=outer)
        os.close(outer)
    os.close(folder)


def test_what_a_folder_links_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("content")
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for place in (folder, folder / "inner"):
        (place / "link").symlink_to(kept)
        (place / "missing").symlink_to(tmp_path / "missing")
    top = tmp_path / "top"
    top.symlink_to(kept)

    remove_folder(folder)
    remove_folder(top)
    remove_folder(tmp_path / "missing")
    assert not folder.exists()
    assert top.is_symlink()
    assert (kept / "file").exists()
