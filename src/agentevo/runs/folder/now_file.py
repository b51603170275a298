"""RUN/now.json: the current activity of the run, for readers of its folder.

    {"phase": "sampling", "detail": "step 12", "since": 1795473961.2, "done": 37, "total": 64,
     "unit": "attempts", "step": 11, "planned": 60, "heartbeat_at": 1795473970.0, ...}

The fields are those of observability/current_activity.py. A thread rewrites the file: after a
change, at most once in MIN_INTERVAL_S seconds, and otherwise every HEARTBEAT_S seconds. At the end,
the file says how the run ended. The run waits for that thread at most END_TIMEOUT_S seconds. If the
disk is full, read-only or hangs, the file is missing or old, and a note appears at the end. The
file is not synced to the disk.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from agentevo.observability.current_activity import Ended, Moment, failure
from agentevo.runtime.files import write_atomic

NOW = "now.json"
MIN_INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
END_TIMEOUT_S = 3.0


class NowFile:
    """Writes RUN/now.json during a block, from a thread. The run's folder must exist. The thread
    calls `look` for the current activity."""

    def __init__(
        self,
        folder: Path,
        look: Callable[[], Moment],
        *,
        note: Callable[[str], None] = lambda text: None,
        least_s: float = MIN_INTERVAL_S,
        is_written: bool = True,
    ) -> None:
        """`is_written`: whether this process writes the file."""
        self._path = folder / NOW
        self._read_moment = look
        self._note = note
        self._min_interval_s = least_s
        self._is_written = is_written
        self._started_at = time.time()
        self._is_ending = threading.Event()
        self._ended: tuple[Ended, str] = ("", "")
        self._problem = ""
        self._thread = threading.Thread(target=self._write_until_end, name="now.json", daemon=True)

    def __enter__(self) -> Self:
        if self._is_written:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            last_moment = self._read_moment()
            is_complete = (
                last_moment.planned is not None and last_moment.step >= last_moment.planned
            )
            self._ended = (
                "stopped" if last_moment.is_stopping and not is_complete else "finished",
                "",
            )
        elif isinstance(error, Exception):
            self._ended = ("failed", failure(error))
        else:  # Ctrl-C, SIGTERM, or a cancellation
            self._ended = ("stopped", "")

        if not self._is_written:
            return

        self._is_ending.set()
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            self._problem = "its disk does not answer"

        if self._problem:
            self._note(
                f"{self._path} could not be written ({self._problem}): pages and commands that "
                f"show runs lack the newest state of this one"
            )

    def _write_until_end(self) -> None:
        last_moment = Moment()
        written_at = -HEARTBEAT_S
        while not self._is_ending.is_set():
            moment = self._read_moment()
            now = time.monotonic()
            if moment != last_moment or now - written_at >= HEARTBEAT_S:
                self._write(moment)
                last_moment = moment
                written_at = now
            self._is_ending.wait(self._min_interval_s)

        ending, reason = self._ended
        self._write(msgspec.structs.replace(self._read_moment(), ended=ending, reason=reason))

    def _write(self, moment: Moment) -> None:
        stamped = msgspec.structs.replace(
            moment,
            heartbeat_at=time.time(),
            started_at=self._started_at,
            process=os.getpid(),
            host=socket.gethostname(),
        )
        try:
            write_atomic(self._path, msgspec.json.encode(stamped) + b"\n")
        except OSError as error:
            self._problem = error.strerror or str(error)
        else:
            self._problem = ""
