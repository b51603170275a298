"""Sixteen contexts of one Chromium play at once while it, its pages and its driver are killed.
Every attempt ends: solved, or failed with the reason. Nothing hangs, and nothing is left."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from browser_site import (
    DEADLINE_S,
    Site,
    kill_a_page,
    kill_browser,
    kill_driver,
    wait_for_no_process,
)

from agentevo.environments.browser import BrowserConfig, BrowserEnvironment, close_browsers
from agentevo.environments.browser.process import PREFIX
from agentevo.errors import EnvironmentFailure

pytestmark = pytest.mark.slow

NUM_CONTEXTS = 16
REPEAT_S = 3.0
PAGE = """<button onclick="this.textContent = 'thanks ' + document.cookie">go</button>
<script>document.cookie = 'seed=SEED'.replace('SEED', Math.random())</script>"""
REASONS = (
    "the browser failed: ",
    "the page crashed",
    "the page closed its window",
    "the page did not answer within ",
    "can't be opened: ",
)


class Player:
    """Attempts in one context after another."""

    def __init__(self, url: str) -> None:
        self._environment = BrowserEnvironment(
            BrowserConfig(
                url=url,
                observation="both",
                viewport=(200, 100),
                deadline_s=DEADLINE_S,
                reward={"type": "element", "selector": "button", "text": "thanks seed="},
            )
        )
        self.num_solved = 0
        self.failures: list[str] = []

    def play(self, is_over: threading.Event) -> None:
        """Until `is_over`, and an attempt that began afterwards is solved."""
        is_last_solved = False
        while not is_last_solved:
            was_over = is_over.is_set()
            is_last_solved = self._attempt() and was_over
        self._environment.close()

    def _attempt(self) -> bool:
        try:
            self._environment.reset(seed=self.num_solved)
            _, reward, is_over, _, info = self._environment.step("click button")
        except EnvironmentFailure as error:
            self.failures.append(str(error))
            return False

        assert (reward, is_over, info["success"]) == (1, True, True)
        self.num_solved += 1
        return True


def wait_until(
    is_true: Callable[[], bool],
    playing: list[Future[None]],
    repeat: Callable[[], None] | None = None,
) -> None:
    """Calls `repeat` every REPEAT_S."""
    deadline = time.monotonic() + DEADLINE_S
    repeat_at = time.monotonic() + REPEAT_S
    while not is_true():
        if repeat is not None and time.monotonic() > repeat_at:
            repeat()
            repeat_at = time.monotonic() + REPEAT_S

        assert time.monotonic() < deadline
        for future in playing:
            if future.done():
                future.result()  # a surprise
        time.sleep(0.1)


def test_kills_while_sixteen_contexts_play(chromium: str, site: Site) -> None:
    close_browsers()
    num_threads = threading.active_count()
    ports = listening_ports()
    site.pages["/many"] = PAGE
    is_over = threading.Event()
    players = [Player(f"{site.url}/many") for _ in range(NUM_CONTEXTS)]

    def num_solved() -> int:
        return sum(player.num_solved for player in players)

    def num_failed() -> int:
        return sum(len(player.failures) for player in players)

    with ThreadPoolExecutor(NUM_CONTEXTS) as pool:
        playing = [pool.submit(player.play, is_over) for player in players]
        try:
            for kill in (kill_browser, kill_a_page, kill_driver, kill_browser):
                solved = num_solved()
                wait_until(lambda least=solved + 4: num_solved() >= least, playing)

                # Chromium also has renderers without an attempt, such as the next page's.
                repeat = kill if kill is kill_a_page else None
                failed = num_failed()
                kill()
                wait_until(lambda most=failed: num_failed() > most, playing, repeat)
        finally:
            is_over.set()

        for future in playing:
            future.result(DEADLINE_S)

    reasons = {reason for player in players for reason in player.failures}
    assert not [text for text in reasons if not any(part in text for part in REASONS)]

    close_browsers()
    wait_for_no_process()
    assert not list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*-{os.getpid()}-*"))
    wait_until(lambda: threading.active_count() <= num_threads, [])
    assert listening_ports() <= ports


def listening_ports() -> set[int]:
    """The TCP ports of this process."""
    sockets = psutil.Process().net_connections("tcp")
    return {item.laddr.port for item in sockets if item.status == psutil.CONN_LISTEN}
