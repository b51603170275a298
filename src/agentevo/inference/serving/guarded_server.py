"""Starts a server as a child process that ends when this process ends for any reason.

A guard process (this file as a program) runs between the two. It reads from a pipe that no process
writes to. The pipe closes when this process ends. Then the guard ends the server and every process
that the server started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 10.0
SHOWN_LINES = 15


class GuardedServer:
    """See the module."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: variables that the server has in addition to those of this process."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", __file__, *command],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def describe_end(self) -> str:
        """How the server ended, with the last lines of its log; empty while it runs."""
        code = self._guard.poll()
        if code is None:
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"exit code {code}; {self.log} ends with:", *lines[-SHOWN_LINES:]])

    def close(self) -> None:
        """Ends the server and waits for it."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()

        self._guard.terminate()
        try:
            self._guard.wait(3 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()


def guard(command: Sequence[str]) -> int:
    """Runs the command until it ends, standard input closes, or the guard receives SIGTERM."""
    stop_event = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_event.set())
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def wait_for_parent() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop_event.set()

    def end_when_asked() -> None:
        stop_event.wait()
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            try:
                os.killpg(server.pid, number)
                server.wait(wait_s)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    for work in (wait_for_parent, end_when_asked):
        threading.Thread(target=work, daemon=True).start()

    code = server.wait()
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # processes that the server has left behind

    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(guard(sys.argv[1:]))
