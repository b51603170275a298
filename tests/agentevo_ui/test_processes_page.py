"""Engines, logs, leases and weights as the page says them, over a folder as it may be found."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from agentevo.inference.serving.directory import Announcement, EngineDirectory
from agentevo.runs.folder.sources import RunSource
from agentevo.store import open_store
from agentevo.types import Call, Task
from agentevo_ui.process_files import LOG_BYTES, log_end, log_text

HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b[0m\u202eevil & \"'>"
GIGABYTE = 1 << 30
Get = Callable[..., httpx.Response]


def announcement(name: str) -> Announcement:
    version = {"engine-0": 5, "engine-1": 7}.get(name)
    began = time.time() - 60
    return Announcement(
        url="http://127.0.0.1:5", name=name, pid=77, started_at=began, version=version
    )


def furnish(run: Path) -> None:
    """Two engines, one of them dead, logs, weights; and what is none of these."""
    engines = EngineDirectory(run / "engines")
    for name in ("engine-0", "engine-1", f"engine-{HOSTILE[:8].replace('/', '')}"):
        engines.announce(announcement(name))

    old = time.time() - 3600
    os.utime(run / "engines" / "engine-1.json", (old, old))
    (run / "engines" / "broken.json").write_bytes(b"\xff[1, 2")
    (run / "engines" / "far.json").symlink_to("/etc/hostname")
    os.mkfifo(run / "engines" / "pipe.json")
    (run / "weights" / "version-000007").mkdir(parents=True)
    (run / "weights" / "latest.json").write_bytes(
        msgspec.json.encode({"version": 7, "sha256": "0" * 64})
    )

    logs = run / "logs"
    logs.mkdir()
    (logs / "engine-0.log").write_text(f"one\n{HOSTILE}\n 5%\r 50%\r 100%\nlast\n")
    (logs / "secret.log").symlink_to("/etc/passwd")
    os.mkfifo(logs / "pipe.log")

    with (logs / "sampler-0.log").open("wb") as file:  # sparse: it takes no disk
        file.truncate(GIGABYTE)
        file.seek(GIGABYTE)
        file.write(b"\nthe very end\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: mine}\nrollout: {samplers: 1}\n")
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1.0, "staleness/mean": 0.5, "staleness/max": 1, '
        '"staleness/age_0": 0.6, "staleness/age_1": 0.4}\n'
    )
    furnish(folder)

    async def work() -> None:
        async with await open_store(f"sqlite:///{folder / 'store.sqlite'}") as store:
            await store.add_tasks([Task(id="held"), Task(id="free")])
            await store.lease_tasks("worker", lease_s=600, limit=1)
            await store.write_calls(
                [
                    Call(
                        id=f"abc-{n}",
                        trajectory_id=f"t{n}",
                        kind="attempt",
                        name="agent",
                        started_at=time.time(),
                    )
                    for n in range(3)
                ]
            )

    asyncio.run(work())
    return folder


@pytest.mark.slow
def test_the_page_says_what_lives(run: Path, get: Get) -> None:
    text = " ".join(get("/runs/mine/processes", run.parent).text.split())
    alive, dead = text.split(">engine-1<")
    assert "engine-0" in alive
    assert "version 5" in alive and "2 behind" in alive
    assert "version 7" in dead and "behind" not in dead.partition("</tr>")[0]
    assert "state running" in alive
    assert dead.index("state silent") < dead.index("Weights")
    assert "broken" not in text
    assert "Version 7 was published" in text
    assert "0.500 versions before on average, 1 at most" in text
    assert "1 version old</dt><dd>40%" in text
    assert 'abc</td><td class="num">3<' in text
    assert "1 task leased" in text
    assert "task=held" in text
    assert "task=free" not in text


@pytest.mark.slow
def test_hostile_logs_are_only_text_and_links_are_no_logs(run: Path, get: Get) -> None:
    listed = get("/runs/mine/processes", run.parent).text
    assert "secret.log" not in listed
    assert "pipe.log" not in listed

    text = get("/runs/mine/processes/log?name=engine-0.log", run.parent).text
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;red" in text
    assert "[31m" not in text
    assert "\u202e" not in text
    assert "50%" not in text.partition("<pre")[2]
    assert "100%" in text


@pytest.mark.parametrize(
    "name",
    ["secret.log", "pipe.log", "nothing.log", "../config.yaml", "/etc/passwd", "..", "\x00", ""],
)
def test_no_other_file_can_be_read(name: str, run: Path, get: Get) -> None:
    answer = get("/runs/mine/processes/log", run.parent, params={"name": name})
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_of_a_gigabyte_only_the_end_is_read(run: Path) -> None:
    begun = time.perf_counter()
    found = log_end(RunSource("mine", "mine", run), "sampler-0.log")
    assert time.perf_counter() - begun < 50
    assert found is not None
    assert len(found.data) == LOG_BYTES
    assert found.is_cut
    assert found.log.size > GIGABYTE
    assert log_text(found.data, is_cut=True) == "the very end"


@pytest.mark.slow
def test_a_folder_of_logs_that_is_a_link_is_none(run: Path, tmp_path: Path, get: Get) -> None:
    outside = tmp_path / "outside"
    shutil.move(run / "logs", outside)
    (run / "logs").symlink_to(outside)
    assert "engine-0.log" not in get("/runs/mine/processes", run.parent).text
    assert get("/runs/mine/processes/log?name=engine-0.log", run.parent).status_code == 404


def test_the_log_of_a_sweep_is_that_of_its_run(run: Path) -> None:
    sweep = run.parent / "logs"
    sweep.mkdir()
    (sweep / "mine.log").write_text("of the sweep\n")
    (sweep / "others-mine.log").write_text("of another\n")

    source = RunSource("runs~mine", "mine", run, sweep="runs")
    found = log_end(source, "sweep/mine.log")
    assert found is not None
    assert found.data == b"of the sweep\n"
    assert log_end(source, "sweep/others-mine.log") is None


@pytest.mark.slow
def test_a_run_without_any_says_so(run: Path, get: Get) -> None:
    for name in ("engines", "logs", "weights"):
        shutil.rmtree(run / name)

    (run / "store.sqlite").write_bytes(b"no database")
    answer = get("/runs/mine/processes", run.parent)
    assert answer.status_code == 200
    assert "No engine is announced" in answer.text
    assert "has no log" in answer.text
    assert "can&#39;t be read" in answer.text


def test_escapes_of_every_form_leave_a_log() -> None:
    data = b"a\x1b[1;31mb\x1b[0mc\x1b]0;title\x07d\x1b]8;;http://x\x1b\\e\x1bMf\x1b(Bg\n"
    assert log_text(data, is_cut=False) == "abcdefg"
    assert log_text(b"half\nwhole\r\n\nend", is_cut=True) == "whole\n\nend"
    assert log_text(b"", is_cut=False) == ""
    assert log_text(b"\n".join(b"%d" % n for n in range(500)), is_cut=False).startswith("100\n")
