"""Where a run's folder can't be is said before anything is made."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path

import pytest

from agentevo.errors import ConfigError
from agentevo.runtime.paths import check_new_folder, name_problem, spelling_hint


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a\0b", "NUL"),
        ("a\ud800b", "UTF-8"),
        ("x" * 256, "a name of 256 bytes"),
        ("é" * 128, "a name of 256 bytes"),
        ("/".join(["x" * 200] * 30), "bytes, and systems take"),
        ("x" * 255, ""),
        ("a/b c/é", ""),
    ],
)
def test_a_text_that_can_be_no_path(path, expected):
    problem = name_problem(path)
    assert bool(problem) == bool(expected)
    assert expected in problem


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("file", "file is a file: give another run.dir"),
        ("file/a/b", "file is a file"),
        ("/dev/null", "is not a folder"),
        ("/dev/null/a", "/dev/null is not a folder"),
        ("loop", "can't be read"),
        ("loop/a", "can't be read"),
        ("dangling", "a link to nothing"),
        ("x" * 300, "a name of 300 bytes"),
        ("a\0b", "NUL"),
        ("locked/a", "no permission to write into"),
        ("/proc/x/y", "/proc accepts no file"),
        ("/sys/x", "can't be made: "),
    ],
)
def test_where_no_folder_can_be_made(tmp_path, monkeypatch, path, expected):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("no-such")
    Path("locked").mkdir()

    may = os.access  # tests may run as root, who may write anywhere
    monkeypatch.setattr(
        os, "access", lambda place, mode: "locked" not in str(place) and may(place, mode)
    )
    before = sorted(os.listdir())

    with pytest.raises(ConfigError) as raised:
        check_new_folder(Path(path), "run.dir")

    assert expected in str(raised.value)
    assert "give another run.dir" in str(raised.value)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("path", ["new", "new/deeper", "there", "there/new"])
def test_where_one_can(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    check_new_folder(Path(path), "run.dir")
    assert os.listdir() == ["there"]


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_file_is_refused_and_nothing_stays(tmp_path, monkeypatch, reason):
    class FullFile(io.BytesIO):
        def write(self, content):
            raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: FullFile())
    with pytest.raises(ConfigError, match=f"accepts no file .{os.strerror(reason)}"):
        check_new_folder(tmp_path / "run", "run.dir")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("job/helt_out.jsonl", "job/held_out.jsonl"),
        ("job/held_out.json", "job/held_out.jsonl"),
        ("job/first_jb", "job/first_job.yaml"),
        ("./runs/lapto", "runs/laptop"),
        ("runs/LAPTOP", "runs/laptop"),
        ("job/nothing.jsonl", None),
        ("job/held_out.jsonl", None),
        ("job/.hidde", None),
        ("nowhere/at/all", None),
        ("x" * 300, None),
        ("a\0b", None),
        ("\ud800", None),
    ],
)
def test_a_misspelt_path_leads_to_what_is_there(tmp_path, monkeypatch, path, expected):
    monkeypatch.chdir(tmp_path)
    for file in ("job/held_out.jsonl", "job/first_job.yaml", "job/.hidden", "runs/laptop/log"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()

    hint = spelling_hint(Path(path))
    assert hint == (f"did you mean {expected!r}? " if expected else "")
    assert spelling_hint(Path(path), lambda place: False) == ""
