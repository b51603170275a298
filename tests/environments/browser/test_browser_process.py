"""The process of the browser, without Chromium."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentevo.environments.browser import BrowserConfig, BrowserEnvironment
from agentevo.environments.browser import process as browser_process
from agentevo.environments.browser.gate import HostGate
from agentevo.environments.browser.permissions import permissions_for
from agentevo.environments.browser.process import BrowserProcess, close_browsers
from agentevo.errors import EnvironmentFailure

pytest.importorskip("playwright.async_api", reason="pip install 'agentevo[browser]'")


@pytest.fixture
def process() -> Iterator[BrowserProcess]:
    browser = BrowserProcess("")
    yield browser
    browser.close()


def test_a_driver_that_dies_during_a_call_is_a_failure_of_the_environment(
    process: BrowserProcess,
) -> None:
    async def die() -> None:
        raise Exception("Connection closed while reading from the driver")

    async def be_wrong() -> None:
        raise ValueError("a mistake of ours")

    with pytest.raises(EnvironmentFailure, match="the browser failed: Connection closed"):
        process.call(die, 10.0)
    with pytest.raises(ValueError, match="of ours"):
        process.call(be_wrong, 10.0)


def test_a_start_without_a_temporary_folder_says_how_to_get_one(
    process: BrowserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(prefix: str) -> Path:
        raise OSError(28, "No space left on device", f"/tmp/{prefix}x")

    monkeypatch.setattr(browser_process, "new_folder", refuse)
    with pytest.raises(EnvironmentFailure, match=r"No space left.*/tmp/agentevo-browser-.*TMPDIR"):
        process.start()


def test_a_folder_whose_removal_is_broken_off_is_removed_later(
    process: BrowserProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    process._folders.append(folder)
    goes_on = threading.Event()

    with monkeypatch.context() as patch:
        patch.setattr(browser_process, "remove_folder", lambda _: goes_on.wait(300))
        patch.setattr(browser_process, "CLOSE_S", 0.0)
        with pytest.raises(EnvironmentFailure, match=r"within 0.1 s"):
            process.call(process._stop, 0.1)
        goes_on.set()

    process.call(process._stop, 300)
    assert not folder.exists()
    assert not process._folders


PARENT = """
import subprocess, sys
print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
sys.stdin.read()
"""


def test_a_process_that_nobody_reaps_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_process, "CLOSE_S", 300.0)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        process = psutil.Process(int(parent.stdout.readline()))
        started = time.monotonic()
        browser_process._kill_all([process])
        assert time.monotonic() - started < 300
        assert process.status() == psutil.STATUS_ZOMBIE


class SlowBrowser:
    """A browser that takes longer to start than a page may, and whose pages hang."""

    def __init__(self) -> None:
        self.starts: list[str] = []

    async def launch(self) -> SlowBrowser:
        self.starts.append("begun")
        await asyncio.sleep(0.5)
        self.starts.append("done")
        return self

    def is_connected(self) -> bool:
        return True

    async def new_context(self, **options: Any) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def test_a_page_that_hangs_does_not_break_off_the_start_of_chromium() -> None:
    environment = BrowserEnvironment(
        BrowserConfig(url="http://127.0.0.1:9/", executable="true", deadline_s=0.1)
    )
    slow = SlowBrowser()
    process: Any = environment._browser

    async def launch() -> SlowBrowser:
        process._browser = await slow.launch()
        return slow

    process._launch = launch
    try:
        for _ in range(2):
            with pytest.raises(EnvironmentFailure, match=r"within 0.1 s \(environment.deadline_s"):
                environment.reset(seed=1)
        assert slow.starts == ["begun", "done"]
    finally:
        close_browsers()


def test_a_gate_that_closes_during_a_connection_reports_no_problem() -> None:
    """Python 3.11 reports a cancelled connection with a traceback on stderr."""
    problems: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: problems.append(problem)
        )
        gate = HostGate(permissions_for("http://127.0.0.1:9/", ()), lambda _: None)
        _, writer = await asyncio.open_connection("127.0.0.1", await gate.open("127.0.0.1"))
        async with asyncio.timeout(300):
            while not gate._tunnels:
                await asyncio.sleep(0.01)
            await gate.close()
        writer.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert problems == []
