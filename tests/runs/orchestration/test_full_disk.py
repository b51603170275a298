"""A disk that is full or may only be read: words that say which file and what to do, at once, and a
resume that lacks nothing."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from slow import soak

from agentevo.api.run import train
from agentevo.cli.main import main
from agentevo.errors import ConfigError, DiskError, StoreUnavailableError
from agentevo.observability import MetricsLog, read_metrics, report, report_from_run
from agentevo.runs.folder import chain
from agentevo.runs.folder.chain import SUMMARY, HeadFile
from agentevo.runs.folder.lock import LOCK, only_trainer
from agentevo.runs.orchestration import run_record
from agentevo.runtime.files import write_atomic
from agentevo.runtime.retry import with_retries


class FullDisk:
    """A file that takes half of the row with a mark, as a disk does that fills up."""

    def __init__(self, file: Any, mark: bytes) -> None:
        self._file = file
        self._mark = mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        full = self._mark in data
        return int(self._file.write(data[: len(data) // 2] if full else data))


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room_for_summary(path: Path, content: bytes) -> None:
    if path.name == SUMMARY:
        no_room()
    write_atomic(path, content)


def test_rows_that_do_not_fit_are_a_defined_failure_and_closing_is_none(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 (the log closes it)
    with pytest.raises(DiskError, match=r"metrics.jsonl could not be written \(No space left"), log:
        log.log(1, {"reward": 0.5})


def test_a_torn_row_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, {"reward": 0.5})
    log._file = FullDisk(log._file, b"step")
    with pytest.raises(DiskError, match="and resume"), log:
        log.log(2, {"reward": 0.5})
    assert not path.read_bytes().endswith(b"\n")

    with MetricsLog(path) as again:
        again.log(2, {"reward": 0.25})

    assert [row["reward"] for row in read_metrics(path)] == [0.5, 0.25]


def test_a_lock_that_can_t_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    message = rf"{LOCK} can't be written .*give another run.dir"
    with pytest.raises(ConfigError, match=message), only_trainer(tmp_path):
        raise AssertionError("nobody may train here")


@pytest.mark.parametrize("part", ["write_plots", "write_atomic"])
def test_a_report_without_room_says_how_to_make_it_again(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    monkeypatch.setattr(report, part, no_room)
    with pytest.raises(DiskError, match="write it again with `agentevo report`"):
        report_from_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_whatever_file_does_not_fit_the_command_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that nobody has thought of, too."""
    monkeypatch.setattr("agentevo.runs.folder.run_folder.run_store_url", no_room)
    assert main(["audit", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "No space left on device" in line


def test_a_summary_without_room_is_a_defined_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "write_atomic", no_room_for_summary)
    with pytest.raises(DiskError, match=r"summary.json could not be written"):
        HeadFile(tmp_path).write_file(SUMMARY, "{}")


def test_a_full_store_is_told_of_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also by the many calls that name nobody to tell."""
    calls = []

    async def call() -> str:
        calls.append(capsys.readouterr().err)
        if len(calls) == 1:
            raise StoreUnavailableError("database or disk is full")
        return "written"

    written = asyncio.run(with_retries(call, within_s=600.0, what="committing step 3"))
    assert written == "written"
    assert "committing step 3: waiting until" in calls[1] and "disk is full" in calls[1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["metrics", *soak("head", "summary")])
def test_a_run_whose_disk_fills_up_is_resumed_without_a_loss(
    where: str,
    tmp_path: Path,
    small_config: Any,
    quiet_view: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(tmp_path / "run", "cold_start.episodes=8", "trainer.steps=2")
    begin_at = MetricsLog._begin_at
    committed = chain.HeadFile.note_commit

    def filling(self: MetricsLog, lines: list[bytes]) -> None:
        begin_at(self, lines)
        self._file = FullDisk(self._file, b'"step": 2')

    def full_after(self: chain.HeadFile, end: chain.End) -> None:
        if end.step == 2:
            monkeypatch.setattr(chain, "write_atomic", no_room)
        committed(self, end)

    if where == "metrics":
        monkeypatch.setattr(MetricsLog, "_begin_at", filling)
    elif where == "head":
        monkeypatch.setattr(chain.HeadFile, "note_commit", full_after)
    else:
        monkeypatch.setattr(chain, "write_atomic", no_room_for_summary)

    with pytest.raises(DiskError, match="and resume"):
        train(config, view=quiet_view())

    monkeypatch.undo()
    assert run_record.HeadFile is chain.HeadFile

    run = train(config, resume=True, view=quiet_view())
    assert run.summary["steps"] == 2 and run.audit().violations == []
