"""RUN/logs/train.log: the messages of a run, line by line with their time, and the traceback that
ended the run.

It has the plain lines of the live view, even if a terminal showed the panel, and the lines on
stderr, such as tracebacks of a user's code. Lines are buffered until the folder exists. A run that
ends before that has no file. The file and the older file (train.log.1) have at most MAX_BYTES each.
Passwords in URLs are removed.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Self

from agentevo.runtime.console import listen, to_stderr, unlisten
from agentevo.runtime.credentials import without_passwords

MAX_BYTES = 16 * 2**20
EARLY_LINES = 1000
"""The maximum number of buffered texts until the file exists."""
FILE = "train.log"


class RunLog:
    """A context manager around a run. Any thread may call `write`."""

    def __init__(self) -> None:
        self._early: deque[logging.LogRecord] = deque(maxlen=EARLY_LINES)
        self._file: _File | None = None
        # reentrant, because a failed write is logged, which calls `write` again
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        listen(self.write)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        unlisten(self.write)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self.write(f"ended by {kind.__name__ if kind is not None else ''}")
        elif error is not None:
            self.write("".join(traceback.format_exception(error)).rstrip())

        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._early.clear()

    def write(self, text: str) -> None:
        """Writes one line or several."""
        record = logging.makeLogRecord({"msg": without_passwords(text)})
        with self._lock:
            if self._file is None:
                self._early.append(record)
            else:
                self._file.emit(record)

    def begin(self, run_dir: Path, words: str) -> None:
        """Starts the log file, after the folder exists. `words` is the first line, or the first new
        line of a resumed run."""
        file = _File(run_dir / "logs" / FILE)
        with self._lock:
            file.emit(logging.makeLogRecord({"msg": words}))
            for record in self._early:
                file.emit(record)
            self._early.clear()
            self._file = file


class _File(RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        self._is_lost = False
        path.parent.mkdir(exist_ok=True)
        super().__init__(
            path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace",
            delay=True,
        )  # fmt: skip
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_lost:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignores a full disk: the log is lost, but nothing depends on it."""
        self._is_lost = True
        to_stderr(f"{self.baseFilename} is no longer written")
