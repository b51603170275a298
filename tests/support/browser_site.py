"""A site on this machine for tests in a browser, and the processes of Chromium."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from agentevo.environments.browser.process import find_chromium
from agentevo.errors import ConfigError

HUGE_MB = 100
DEADLINE_S = 240.0


class Site(ThreadingHTTPServer):
    """Serves `pages`, by path. `asked` has the paths of all requests."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.asked.append(path)
        if path == "/redirect":
            self.send_response(302)
            self.send_header("Location", query)
            self.end_headers()
        elif path == "/download":
            self._send(b"x" * 1000, "application/octet-stream", attachment=True)
        elif path == "/huge":
            self._send_huge()
        elif path in self.server.pages:
            self._send(self.server.pages[path].encode(), "text/html; charset=utf-8")
        else:
            self.send_error(404)

    def _send(self, content: bytes, kind: str, attachment: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if attachment:
            self.send_header("Content-Disposition", "attachment; filename=evil.exe")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        line = b"<p>" + b"all work and no play " * 50_000 + b"</p>"
        try:
            for _ in range(HUGE_MB * 1_000_000 // len(line)):
                self.wfile.write(line)
        except OSError:
            pass  # the browser has gone

    def log_message(self, *words: Any) -> None:
        """Quiet."""


def browser_processes() -> list[psutil.Process]:
    """The processes of Chromium below this one."""
    names = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "chrom" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                names.append(process)
        except psutil.Error:
            continue
    return names


def require_chromium() -> str:
    """The program. Skips the test without it."""
    pytest.importorskip("playwright.async_api", reason="pip install 'agentevo[browser]'")
    try:
        return find_chromium("")
    except ConfigError as error:
        pytest.skip(str(error))


@contextmanager
def serving() -> Iterator[Site]:
    server = Site()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def kill_browser() -> None:
    _kill(_main_process)


def kill_a_page() -> None:
    _kill(lambda: [item for item in browser_processes() if "--type=renderer" in item.cmdline()][-1])


def kill_driver() -> None:
    """Playwright's process, which is above Chromium."""
    _kill(lambda: _main_process().parents()[0])


def _main_process() -> psutil.Process:
    processes = [item for item in browser_processes() if "agentevo-browser=" in str(item.cmdline())]
    return processes[0]


def _kill(find: Callable[[], psutil.Process]) -> None:
    """Kills the process as soon as there is one: Chromium may be starting."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            process = find()
            assert process.pid != os.getpid()
            process.kill()
            return
        except (IndexError, psutil.Error):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def wait_for_no_process(limit_s: float = DEADLINE_S) -> None:
    """Waits until no process of Chromium is left."""
    deadline = time.monotonic() + limit_s
    while (left := browser_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
