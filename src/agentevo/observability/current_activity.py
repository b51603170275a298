"""What a run does at a moment: the state of its live view, and RUN/now.json, for readers of its
folder.

    {"phase": "sampling", "detail": "step 12", "since": 1795473961.2, "done": 37, "total": 64,
     "unit": "attempts", "step": 11, "planned": 60, "heartbeat_at": 1795473970.0, ...}

A thread rewrites the file: after a change, at most once in MIN_INTERVAL_S seconds, and otherwise
every HEARTBEAT_S seconds. At the end, the file says how the run ended. The run waits for that
thread at most END_TIMEOUT_S seconds. If the disk is full, read-only or hangs, the file is missing
or old, and a note appears at the end. The file is not synced to the disk.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import msgspec

from agentevo.errors import AgentEvoError, describe_error, storable
from agentevo.runtime.console import format_duration
from agentevo.runtime.files import write_atomic

Ended = Literal["", "finished", "stopped", "failed"]

PAUSED = "paused"
"""The phase of a run that was paused by a request."""
MAX_REASON_CHARS = 2000
MAX_FILE_BYTES = 100_000
"""AgentEvo does not write a larger file."""
MAX_TIME = 1e11
"""A Unix time in seconds that is later than any run."""
NOW = "now.json"
MIN_INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
LATE_HEARTBEAT_S = 20.0
"""A heartbeat that is older than this, in seconds, is late."""
END_TIMEOUT_S = 3.0


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """All times are Unix times, in seconds."""

    phase: str = "starting"
    """Such as playing, training, evaluating, saving, publishing weights."""
    detail: str = ""
    since: float = 0.0
    """The time when the phase began."""
    step: int = 0
    """The number of completed steps."""
    planned: int | None = None
    done: float | None = None
    """The amount of `total` that is done in this phase. None if nothing is counted."""
    total: float | None = None
    unit: str = ""
    is_stopping: bool = False
    """Whether a stop was requested."""
    heartbeat_at: float = 0.0
    """The time when the process was last known to live, in a moment from a file."""
    started_at: float = 0.0
    """The time when the process began or resumed the run."""
    process: int = 0
    host: str = ""
    ended: Ended = ""
    """How the run ended. Empty while it is running, or if its process was killed."""
    reason: str = ""
    """Why it failed, in a sentence."""

    def words(self) -> str:
        """`sampling, step 12: 37 of 64 attempts`."""
        text = f"{self.phase}, {self.detail}" if self.detail else self.phase
        if count_text := self.count_text():
            text = f"{text}: {count_text}"
        return f"{text} (asked to stop)" if self.is_stopping else text

    def count_text(self) -> str:
        """`37 of 64 attempts`. Empty if nothing is counted."""
        if self.done is None or not self.total:
            return ""
        if self.unit == "bytes":
            return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.done:,.0f} of {self.total:,.0f} {self.unit}".rstrip()

    def share(self) -> float | None:
        """The share of this phase that is done, from 0 to 1."""
        if self.done is None or not self.total:
            return None
        return min(max(self.done / self.total, 0.0), 1.0)

    def silent_s(self, now: float | None = None) -> float:
        """The age of the heartbeat, in seconds. A heartbeat in the future, by another machine's
        clock, counts as new."""
        return max((time.time() if now is None else now) - self.heartbeat_at, 0.0)

    def ending(self, resume: str = "") -> str:
        """How the run ended, in a sentence. Empty while it is running. `resume`: the command that
        continues the run, if it is known."""
        if self.ended == "failed":
            return self.reason or "the run failed"
        when = time.strftime("%H:%M:%S", time.localtime(self.heartbeat_at))
        if self.ended == "stopped":
            return f"it was asked to stop, and stopped at {when}: {_goes_on(resume)}"
        return ""

    def death(self, resume: str = "") -> str:
        """The message if the process is gone and has not reported how it ended."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.heartbeat_at))
        return (
            f"its process ended without a message after {when}, within {self.words()}: it was "
            "killed, "
            f"such as for too much memory, or its machine went down; {_goes_on(resume)}"
        )

    def lateness(self, now: float | None = None) -> str:
        """The message about a process that has the run's lock and writes no heartbeat."""
        return (
            f"its process {self.process} has given no sign of life for "
            f"{format_duration(self.silent_s(now))}, within {self.words()}: it was halted, its "
            "machine is out of memory, or its disk is full, does not answer, or can't be written"
        )


def _goes_on(resume: str) -> str:
    command = f"`{resume}`" if resume else "the command that started it, with --resume,"
    return f"{command} resumes it"


def failure(error: BaseException) -> str:
    """The sentence about an error, for `reason`."""
    message = storable(str(error)) if isinstance(error, AgentEvoError) else describe_error(error)
    text = " ".join(message.split())
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."


def read_moment(path: Path) -> Moment | None:
    """The moment in a file. None if there is no file, or if another program wrote it. Raises
    OSError for a file that can't be read."""
    try:
        what = path.stat()
        if not stat.S_ISREG(what.st_mode) or what.st_size > MAX_FILE_BYTES:
            return None
        moment = msgspec.convert(json.loads(path.read_bytes()), Moment)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None

    times = (moment.since, moment.heartbeat_at, moment.started_at)
    counts = (moment.done, moment.total)
    sane = all(0 <= unix_time <= MAX_TIME for unix_time in times) and all(
        math.isfinite(count) for count in counts if count is not None
    )
    return moment if sane else None


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
