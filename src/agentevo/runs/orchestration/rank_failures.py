"""The failure that ends a training of several processes: which process failed first, and why.

A process that fails writes its error into the store that all processes share, before its
connections break. The processes that wait for it then fail with that error instead of a connection
error. A process that was killed can write nothing: the others report that a process is gone.

    RUN/logs/rank-N.log   the calls of process N, and the traceback at its end
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import distributed

from agentevo.errors import AgentEvoError, TrainingError, describe_error

_KEY = "failure"
POLL_INTERVAL_S = 3.0
"""How long a process whose connection broke waits for the error of another one."""
_LOST = ("connection", "gloo", "nccl", "timed out", "timeout", "socket", "peer", "recvvalue")


class Failures:
    """The failures of the processes that train together. This process has number `rank`."""

    def __init__(self, store: distributed.Store, rank: int, world: int) -> None:
        self._store = store
        self.rank = rank
        self.world = world
        self.log: RankLog | None = None

    def report(self, error: BaseException) -> BaseException:
        """Called once with the error that has ended this process's part; returns the error to
        raise. The first failure of all is shown, with the process's number, before the other
        processes can know of it."""
        is_lost = isinstance(error, RuntimeError) and _is_lost(error)
        first = self._first(POLL_INTERVAL_S if is_lost else 0.0)
        if first is None and not is_lost:
            first = self._publish(error)
        if self.log is not None:
            self.log.log_failure(error)

        if first is not None and first[0] == self.rank:
            print(f"process {self.rank} of {self.world}: {describe_error(error)}", file=sys.stderr)
            sys.stderr.flush()
            return error

        if isinstance(error, AgentEvoError) or not is_lost:
            return error

        if first is None:
            return TrainingError(
                f"another one of the {self.world} processes that train together ended without an "
                f"error message (killed, or out of memory), or did not answer in time: see its "
                f"launcher's output, and resume the run"
            )

        return TrainingError(f"process {first[0]} of {self.world} failed first: {first[1]}")

    def _publish(self, error: BaseException) -> tuple[int, str] | None:
        """Writes this process's error into the store; returns the first error that a process has
        written."""
        words = json.dumps([self.rank, describe_error(error)])
        with suppress(RuntimeError):  # the process that had the store has ended
            return _read(self._store.compare_set(_KEY, "", words))
        return self.rank, describe_error(error)

    def _first(self, within_s: float) -> tuple[int, str] | None:
        deadline = time.monotonic() + within_s
        while True:
            try:
                if self._store.check([_KEY]):
                    return _read(self._store.get(_KEY))
            except RuntimeError:
                return None

            if time.monotonic() >= deadline:
                return None

            time.sleep(0.05)


def _read(words: bytes | str) -> tuple[int, str]:
    rank, text = json.loads(words)
    return int(rank), str(text)


def _is_lost(error: RuntimeError) -> bool:
    """Whether the error may be a collective's report that another process is gone."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(word in text for word in _LOST)


class RankLog:
    """The log of one process; see the module. A run folder that this machine does not see has
    none."""

    def __init__(self, run_dir: Path, rank: int, world: int, place: str) -> None:
        """`place`: the position of the process among the others."""
        self._path: Path | None = None
        if run_dir.is_dir():
            self._path = run_dir / "logs" / f"rank-{rank}.log"
        self._write(f"process {rank} of {world} ({place}): {socket.gethostname()}, {os.getpid()}")

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A context around one call that all processes make."""
        started = time.perf_counter()
        yield
        self._write(f"{name}: {time.perf_counter() - started:.3f} s")

    def log_failure(self, error: BaseException) -> None:
        """Logs the end, with the traceback."""
        self._write("".join(traceback.format_exception(error)).rstrip())

    def _write(self, text: str) -> None:
        if self._path is None:
            return

        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:  # a full disk loses the log, and nothing depends on it
            print(f"{self._path} can't be written any more: {error}", file=sys.stderr)
            self._path = None
