"""Folders of processes: those of a killed process are deleted, those of a living one stay."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from agentevo.runtime import process_folders

PROGRAM = """
import sys
from agentevo.runtime.process_folders import new_folder
print(new_folder(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_deleted_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_folders.tempfile, "tempdir", str(tmp_path))
    prefix = f"agentevo-test-{uuid.uuid4().hex}-"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    ) as program:
        assert program.stdout is not None
        theirs = Path(program.stdout.readline().strip())
        (theirs / "file").write_text("content")
        foreign = tmp_path / f"{prefix}notes"
        foreign.mkdir()

        first = process_folders.new_folder(prefix)
        assert theirs.exists()
        program.kill()

    second = process_folders.new_folder(prefix)
    assert sorted(tmp_path.iterdir()) == sorted([foreign, first, second])
