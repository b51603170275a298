"""One chromium for all browser tests, and dashboards in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
AXE = Path(__file__).parent / "axe" / "axe-4.14.1.min.js"
STARTED_S = 300.0
SEEN_MS = 300_000
"""How long a page may take on a slow machine, in milliseconds."""


@contextmanager
def dashboard(*words: str | Path, control: bool = False) -> Iterator[str]:
    """The URL, with its token, of a dashboard that runs meanwhile, with indexes of its own; with
    `control` that of who may change something. Its priority is not lowered: beside other tests it
    would stand still for minutes."""
    command = [sys.executable, "-m", "agentevo", "ui", *map(str, words), "--nice", "0"]
    command += ["--control"] if control else []

    cache = tempfile.TemporaryDirectory(prefix="agentevo-index-")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"AGENTEVO_CACHE": cache.name},
    )
    try:
        assert process.stdout is not None
        printed = "".join(process.stdout.readline() for _ in range(4 if control else 2))
        found = re.findall(r"https?://\S+", printed)
        assert found, printed
        yield found[-1]
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=STARTED_S)
        cache.cleanup()

    assert "Traceback" not in errors, errors
    assert process.returncode == 0


@contextmanager
def chromium() -> Iterator[Any]:
    """Skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")

    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A page of somebody who has the token. At its end nothing may have gone wrong on any page: no
    message of an error, no request beyond this machine."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.root = url.partition("/?")[0]
        self.wrong: list[str] = []
        page.set_default_timeout(SEEN_MS)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", self._asked)
        page.goto(url)
        assert "token" not in page.url

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.root, "data:")):
            self.wrong.append(f"asked for {request.url}")

    def go(self, path: str) -> Any:
        """Opens a page and waits until its scripts are there."""
        answer = self.page.goto(self.root + path)
        assert answer.status == 200, path
        self.until("Boolean(window.agentevo && window.htmx && window.uPlot)")
        return self.page

    def whole_index(self, path: str) -> Any:
        """Opens a list of attempts when its index has read all that was said."""
        ends = time.monotonic() + SEEN_MS / 1000
        while self.go(path).locator("#index-state[hx-get]").count():
            assert time.monotonic() < ends, "the index never became whole"
            self.page.wait_for_timeout(100)
        return self.page

    def until(self, expression: str) -> None:
        """Waits until this is true on the page. (Playwright's own way needs `eval` in the page,
        which the page's policy forbids.)"""
        ends = time.monotonic() + SEEN_MS / 1000
        while not self.page.evaluate(expression):
            assert not self.wrong, self.wrong
            assert time.monotonic() < ends, f"{expression} never was true at {self.page.url}"
            self.page.wait_for_timeout(20)

    def check_accessible(self) -> None:
        """Nothing that axe-core finds on the page as it is now is serious or worse."""
        # As a bookmarklet would: the page's own policy lets nothing in by an element.
        if not self.page.evaluate("Boolean(window.axe)"):
            self.page.evaluate(AXE.read_text(encoding="utf-8"))

        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")
        serious = [
            f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious, f"{self.page.url}: {serious}"
