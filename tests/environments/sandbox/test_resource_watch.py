"""What the host does about its sandboxes: trials, and the watch over what they use."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentevo.environments.sandbox import open_sandbox, resource_watch, termination
from agentevo.environments.sandbox.landlock import Landlock
from agentevo.environments.sandbox.section import SandboxSection
from agentevo.errors import SandboxError


@pytest.mark.slow
def test_a_failed_trial_says_nothing_of_other_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sandbox, "_working", set())

    async def tried(start_timeout_s: float) -> str:
        section = SandboxSection(type="none", start_timeout_s=start_timeout_s)
        return await open_sandbox.problem_of("none", section)

    assert "not started within 1e-05 s" in asyncio.run(tried(1e-5))
    assert asyncio.run(tried(60.0)) == ""


def test_a_trial_that_takes_too_long_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(kind: Landlock) -> str:
        raise subprocess.TimeoutExpired(["bwrap"], 20)

    monkeypatch.setattr(open_sandbox, "_working", set())
    monkeypatch.setattr(Landlock, "obstacle", hangs)
    with pytest.raises(SandboxError, match="timed out after 20"):
        asyncio.run(open_sandbox.chosen_kind(SandboxSection(type="landlock")))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_whose_name_is_no_text_is_watched_and_ended() -> None:
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, b'\\x0bRss\\xff', 0, 0, 0); print(1); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None

        process.stdout.readline()
        found: list[str] = []
        limits = {"memory_mib": 1, "processes": 100, "disk_mib": 1, "max_files": 10}
        resource_watch.WatchedSandbox(
            process.pid, **limits, folder=None, work="/", end=lambda kind, words: found.append(kind)
        ).look()

        assert found == ["OutOfMemory"]
        assert not termination._is_dead(process.pid)
        assert termination._is_of(Path(f"/proc/{process.pid}"), os.getuid())

        process.kill()


def test_what_can_not_be_watched_is_ended_and_others_are_watched_on() -> None:
    def broken() -> None:
        raise ValueError("no number")

    ended: dict[int, str] = {}
    watching = resource_watch.SandboxWatch()
    for pid in (-1, -2):
        one = resource_watch.WatchedSandbox(
            pid, 1, 1, 1, 1, None, "/", lambda _, words, pid=pid: end(pid, words)
        )
        one.look = broken  # type: ignore[method-assign]
        watching.add(one)

    def end(pid: int, words: str) -> None:
        ended[pid] = words
        watching.remove(pid)

    until = time.monotonic() + 300
    while len(ended) < 2 and time.monotonic() < until:
        time.sleep(0.01)

    assert ended.keys() == {-1, -2}
    assert "no number" in ended[-1]
