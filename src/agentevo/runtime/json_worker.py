"""A separate process for work that a thread can't interrupt, such as sympy or a foreign chat
template. The process has a memory limit, and its caller kills it if it is late.

A request is a line of JSON, and so is the answer. The first line of the process says that it is
ready. The end of the requests ends the process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil

START_S = 120.0
"""The maximum time in seconds that a process takes to import its modules on a busy machine."""
REQUEST_TIMEOUT_S = 120
"""If no caller waits for a request, the process ends after this time, in seconds."""


class JsonWorker:
    """A process, which only one thread may use at a time."""

    def __init__(self, module: str, name: str) -> None:
        """`module` calls `serve_requests`. `name` is the process's name in messages. Raises
        RuntimeError or TimeoutError if it does not start."""
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, not the worker
            bufsize=0,
        )
        self.end = weakref.finalize(self, _end_process, self._process)
        self._read_answer(time.monotonic() + START_S, START_S, "start")

    @property
    def is_alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def ask(self, request: dict[str, Any], limit_s: float, purpose: str) -> dict[str, Any]:
        """The answer to a request. `purpose` names the work in messages. Raises TimeoutError and
        RuntimeError, after which the process has ended."""
        assert self._process.stdin is not None
        until = time.monotonic() + limit_s
        line = memoryview(json.dumps(request).encode() + b"\n")
        try:
            while line:
                line = line[self._process.stdin.write(line) or 0 :]
        except OSError as error:
            self.end()
            raise RuntimeError(f"the process of {self._name} has ended: {error}") from error
        return self._read_answer(until, limit_s, purpose)

    def _read_answer(self, until: float, limit_s: float, purpose: str) -> dict[str, Any]:
        """The next line. Every error ends the process."""
        assert self._process.stdout is not None

        line = bytearray()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not line.endswith(b"\n"):
                    time_left = until - time.monotonic()
                    if time_left <= 0 or not selector.select(time_left):
                        raise TimeoutError(
                            f"the process of {self._name} took longer than {limit_s:g} s to "
                            f"{purpose}"
                        )

                    piece = os.read(self._process.stdout.fileno(), 65536)
                    if not piece:
                        raise RuntimeError(
                            f"the process of {self._name} ended before it could {purpose}"
                        )

                    line += piece

            answer: dict[str, Any] = json.loads(line)
        except BaseException:
            self.end()
            raise

        return answer


def serve_requests(
    answer_to: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    prepare: Callable[[], object],
    max_memory: int,
) -> None:
    """Runs in the process: answers requests until there are no more. `prepare` imports modules
    before the first request. `max_memory` is the additional address space that is allowed after
    that, in bytes."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a package's own output is not an answer
    prepare()
    _limit_memory(max_memory)

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        _end_after(REQUEST_TIMEOUT_S)
        print(json.dumps(answer_to(json.loads(line))), file=answers, flush=True)
        _end_after(0)  # the next request may be minutes away


def _limit_memory(extra_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return

    most = psutil.Process().memory_info().vms + extra_bytes
    _, highest = resource.getrlimit(resource.RLIMIT_AS)
    limit = most if highest == resource.RLIM_INFINITY else min(most, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, highest))


def _end_after(seconds: int) -> None:
    """Kills this process after that many seconds. 0 cancels an earlier call."""
    if hasattr(signal, "alarm"):  # not on Windows
        signal.alarm(seconds)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.wait()
