"""What a run does now, and why it ended, as the dashboard and `agentevo top` know it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from agentevo.cli.top import top
from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.observability.current_activity import read_moment
from agentevo.runs.folder.lock import LOCK
from agentevo.runs.folder.run_state import RunReader, RunView
from agentevo.runs.folder.sources import RunSource

HERE = socket.gethostname()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "half"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: half}\ntrainer: {steps: 4}\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "timing_s/step": 1.0}\n')
    return run


def tell(folder: Path, *, age_s: float = 0.0, host: str = HERE, **told: Any) -> None:
    told = {"phase": "sampling", "detail": "step 2", "since": 7.0, "host": host} | told
    (folder / "now.json").write_text(json.dumps(told | {"heartbeat_at": time.time() - age_s}))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / LOCK)
    with lock:
        yield


def seen(folder: Path) -> RunView:
    reader = RunReader(RunSource("half", "half", folder))
    reader.read()
    return reader.view


def test_a_run_under_way_says_what_it_does(folder: Path) -> None:
    tell(folder, done=3, total=8, unit="attempts")
    with locked(folder):
        view = seen(folder)
    assert (view.state, view.is_silent, view.reason) == ("running", False, "")
    assert view.doing is not None and view.doing.words() == "sampling, step 2: 3 of 8 attempts"


def test_a_paused_run_is_called_so_and_a_stopped_one_names_the_command(folder: Path) -> None:
    (folder / "config.yaml").write_text("# agentevo train\nrun: {name: half}\n")
    tell(folder, phase="paused", detail="after step 1")
    with locked(folder):
        view = seen(folder)
    assert (view.state, view.badge) == ("running", "paused")
    tell(folder, phase="paused", ended="stopped")
    view = seen(folder)
    whole = f"`agentevo train {folder}/config.yaml run.dir={folder} --resume` resumes it"
    assert view.badge == "interrupted" and whole in view.reason


def test_a_process_that_gives_no_sign_is_told_from_one_that_is_dead(folder: Path) -> None:
    tell(folder, age_s=100.0)
    with locked(folder):
        slow = seen(folder)

    dead = seen(folder)
    assert (slow.state, slow.is_silent) == ("running", True)
    assert "has given no sign of life for 1m40s" in slow.reason
    assert (dead.state, dead.is_silent, dead.doing) == ("interrupted", False, None)
    assert "ended without a message" in dead.reason


def test_a_process_that_can_not_write_the_file_and_logs_its_steps_is_not_silent(
    folder: Path,
) -> None:
    tell(folder, age_s=100.0)
    row = {"step": 2, "time": time.time(), "timing_s/step": 1.0}
    with locked(folder), (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")
        log.flush()
        assert not seen(folder).is_silent


def test_a_killed_process_of_this_machine_is_dead_at_once_and_one_elsewhere_after_a_while(
    folder: Path,
) -> None:
    tell(folder)
    assert seen(folder).state == "interrupted"
    tell(folder, host="another-machine")
    assert seen(folder).state == "running"
    tell(folder, host="another-machine", age_s=100.0)
    assert seen(folder).state == "interrupted"


@pytest.mark.parametrize(
    ("ended", "state", "words"),
    [
        ("failed", "failed", "the disk <is> full"),
        ("stopped", "interrupted", "asked to stop"),
        ("finished", "finished", ""),
    ],
)
def test_how_it_ended(ended: str, state: str, words: str, folder: Path) -> None:
    tell(folder, ended=ended, reason="the disk <is> full" if ended == "failed" else "")
    view = seen(folder)
    assert view.state == state and words in view.reason


def test_a_resumed_run_is_no_more_what_it_ended_as(folder: Path) -> None:
    tell(folder, ended="failed", reason="the disk is full")
    reader = RunReader(RunSource("half", "half", folder))
    reader.read()
    assert reader.view.state == "failed"

    version = reader.view.version

    with locked(folder):
        tell(folder, phase="loading")
        reader.read()

    assert reader.view.state == "running" and reader.view.version > version


def test_a_new_count_is_a_beat_and_no_new_version(folder: Path) -> None:
    reader = RunReader(RunSource("half", "half", folder))
    with locked(folder):
        tell(folder, done=3, total=8)
        reader.read()
        before = reader.view
        tell(folder, done=41, total=80)
        reader.read()

    assert reader.view.beat > before.beat and reader.view.version == before.version


def test_the_list_and_top_say_why_a_run_failed(folder: Path, get: Any, capsys: Any) -> None:
    def once() -> str:
        top([str(folder.parent)], once=True)
        return str(capsys.readouterr().out)

    tell(folder, ended="failed", reason="the disk <is> full")
    text = get("/", folder.parent).text
    assert "the disk &lt;is&gt; full" in text and 'class="state failed"' in text
    assert "the disk &lt;is&gt; full" in get("/runs/half", folder.parent).text
    assert "! the disk <is> full" in once()

    tell(folder)
    with locked(folder):
        assert "sampling, step 2" in get("/", folder.parent).text
        assert "sampling, step 2" in once()


@pytest.mark.slow  # a whole run is made for it, once
def test_a_run_says_that_it_has_finished(runs_folder: Path) -> None:
    last = read_moment(runs_folder / "lake" / "now.json")
    assert last is not None and (last.ended, last.step, last.planned) == ("finished", 2, 2)


@pytest.mark.slow  # a whole run is made for it, once
def test_the_work_of_a_run_is_counted_and_its_failures_lead_to_their_attempts(
    runs_folder: Path, get: Any, tmp_path: Path
) -> None:
    text = get("/runs/lake/work", runs_folder, headers={"hx-request": "true"}).text
    assert "Dropped" in text and "state=dropped" in text
    assert get("/runs/lake/work", runs_folder).status_code == 404

    shutil.copytree(runs_folder, tmp_path / "copy")

    with (tmp_path / "copy" / "lake" / "metrics.jsonl").open("a") as log:
        row = {"step": 3, "time": 9.0, "timing_s/step": 1.0, "rollout/failed/ValueError": 2.0}
        log.write(json.dumps(row) + "\n")

    page = get("/runs/lake", tmp_path / "copy").text
    assert "/runs/lake/attempts?split=train&amp;error=ValueError" in page


@pytest.mark.slow
def test_a_store_that_is_gone_is_a_sentence_and_engines_are_shown_all_the_same(
    runs_folder: Path, get: Any, tmp_path: Path
) -> None:
    shutil.copytree(runs_folder, tmp_path / "copy")
    run = tmp_path / "copy" / "lake"
    (run / "store.sqlite").unlink()
    text = get("/runs/lake/work", tmp_path / "copy", headers={"hx-request": "true"}).text
    assert "no store at" in text


def test_work_tells_how_far_an_engine_is_behind(
    runs_folder: Path, get: Any, tmp_path: Path
) -> None:
    shutil.copytree(runs_folder, tmp_path / "copy")
    run = tmp_path / "copy" / "lake"
    for name in ("engine-0", "engine-1"):
        one = Announcement(url="http://127.0.0.1:1", name=name, pid=1, started_at=5, version=3)
        EngineDirectory(run / "engines").announce(one)
    os.utime(run / "engines" / "engine-1.json", (1.0, 1.0))
    (run / "weights").mkdir()
    (run / "weights" / "latest.json").write_text(json.dumps({"version": 7, "sha256": "0" * 64}))

    text = get("/runs/lake/work", tmp_path / "copy", headers={"hx-request": "true"}).text
    assert "serves version 3" in text and "4 behind" in text and "version 7" in text
    assert "Engines that live</dt><dd>1<" in text and "engine-1" not in text
