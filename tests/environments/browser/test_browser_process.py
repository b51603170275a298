"""The process of the browser, without Chromium."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from agentevo.environments.browser import BrowserConfig, BrowserEnvironment
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
        _, writer = await asyncio.open_connection("127.0.0.1", await gate.open())
        async with asyncio.timeout(300):
            while not gate._tunnels:
                await asyncio.sleep(0.01)
            await gate.close()
        writer.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert problems == []
