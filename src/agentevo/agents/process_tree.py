"""Runs a process, and ends it together with all processes that it starts.

The process has its own session, so that Ctrl-C does not reach it. Its descendants are found by
their parents, and by a unique value in their environment. The value also finds processes that left
the session and lost their parent. The remaining processes get SIGTERM, and are killed GRACE_S
later. This happens when the process has ended, when `stop` is called, and at the end of this
process. A process that changed both its environment and its parents is not found.

The last KEPT_BYTES bytes of its output are kept, and any amount can be written.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

KEPT_BYTES = 64 * 2**10
"""The number of bytes of each stream that are kept."""
GRACE_S = 1.0
KILLING_S = 2.0
"""How long to search for further processes to kill, since processes can start others in that
time."""
POLL_INTERVAL_S = 0.02
DRAIN_S = 0.3
_CHUNK = 2**16

_alive: set[ProcessTree] = set()


@dataclass(frozen=True)
class EndedProcess:
    """How a process ended."""

    code: int
    """Exit code; negative for the signal that ended it."""
    stdout: str
    stderr: str


class ProcessTree:
    """See the module. `run` is called once, on its own thread; `stop` on any thread."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path | None, environment: Mapping[str, str], mark: str
    ) -> None:
        """`mark`: the environment variable with a value that no other process has."""
        self._command = list(command)
        self._cwd = cwd
        self._environment = dict(environment)
        self._mark = (mark, self._environment[mark])
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        self.ended = threading.Event()
        """Set when `run` has returned or raised, and all processes of the tree have ended."""

    def stop(self) -> None:
        """Begins to end the tree, which takes seconds. `ended` is set afterwards."""
        self._stopped.set()

    def written(self, stream: str) -> str:
        """The last part of the process's output to `stdout` or `stderr`."""
        return bytes(self._written[stream][-KEPT_BYTES:]).decode("utf-8", "replace")

    def run(self) -> EndedProcess:
        """Runs the process until it ends or is stopped. Raises OSError if it can't be started."""
        _alive.add(self)
        try:
            with subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as self._process:
                self._read_until_over(self._process)
        finally:
            _alive.discard(self)
            self.ended.set()

        return EndedProcess(
            self._process.returncode, self.written("stdout"), self.written("stderr")
        )

    def _read_until_over(self, process: subprocess.Popen[bytes]) -> None:
        with selectors.DefaultSelector() as streams:
            for name in self._written:
                stream: IO[bytes] = getattr(process, name)
                os.set_blocking(stream.fileno(), False)
                streams.register(stream, selectors.EVENT_READ, self._written[name])

            try:
                while process.poll() is None and not self._stopped.is_set():
                    self._read(streams)
                self._drain(streams)
            finally:
                self.kill(grace_s=GRACE_S)
                self._drain(streams)

    def _drain(self, streams: selectors.BaseSelector) -> None:
        """Reads the last output, for a limited time: other processes of the tree can still
        write."""
        until = time.monotonic() + DRAIN_S
        while self._read(streams, 0.0) and time.monotonic() < until:
            continue

    def _read(self, streams: selectors.BaseSelector, within_s: float = POLL_INTERVAL_S) -> bool:
        """Reads one piece of the available output. Returns whether there was any."""
        if not streams.get_map():
            self._stopped.wait(within_s)
            return False

        has_read = False
        for key, _ in streams.select(within_s):
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    streams.unregister(key.fileobj)
                    continue

                has_read = True
                recent: bytearray = key.data
                recent += chunk
                if len(recent) > 4 * KEPT_BYTES:
                    del recent[:-KEPT_BYTES]

        return has_read

    def kill(self, *, grace_s: float) -> None:
        """Ends the living processes of the tree."""
        living = self._living({})
        for process in living.values():
            with contextlib.suppress(psutil.Error):
                process.terminate()

        asked_at = time.monotonic()
        while living and time.monotonic() - asked_at < grace_s:
            time.sleep(POLL_INTERVAL_S / 2)
            living = self._living(living, is_thorough=False)

        living = self._living(living)
        asked_at = time.monotonic()
        while living and time.monotonic() - asked_at < KILLING_S:
            for process in living.values():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(POLL_INTERVAL_S / 2)
            living = self._living(living)

    def _living(
        self, processes: Mapping[int, psutil.Process], *, is_thorough: bool = True
    ) -> dict[int, psutil.Process]:
        """The running processes of the tree, by id: the root and `processes`, their descendants,
        and with `is_thorough` all processes with the mark in their environment."""
        process = self._process
        roots = list(processes.values())
        with contextlib.suppress(psutil.Error):
            if process is not None and process.poll() is None:
                roots.append(psutil.Process(process.pid))

        if is_thorough:
            roots += [
                candidate for candidate in psutil.process_iter() if self._is_marked(candidate)
            ]

        living: dict[int, psutil.Process] = {}
        for root in roots:
            with contextlib.suppress(psutil.Error):
                for member in (root, *root.children(recursive=True)):
                    if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                        living[member.pid] = member

        return living

    def _is_marked(self, process: psutil.Process) -> bool:
        name, value = self._mark
        try:
            return process.pid != os.getpid() and process.environ().get(name) == value
        except (psutil.Error, OSError):
            return False


@atexit.register
def _kill_all() -> None:
    """Kills the remaining processes if the interpreter ends immediately, as after a second
    Ctrl-C."""
    for tree in list(_alive):
        tree.kill(grace_s=0.0)
