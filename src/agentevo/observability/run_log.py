"""RUN/logs/train.log: the messages of a run, line by line with their time, and the traceback that
ended it.

It has the plain lines of the live view, whether or not a terminal drew it, and the lines on stderr,
such as tracebacks of a user's code. Lines that come before the folder exists are kept and written
then; a run that ends before that has no file. The file never has more than MAX_BYTES, nor has the
one older file (train.log.1); no password of a URL is in it.
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

from agentevo.console import listen, to_stderr, unlisten
from agentevo.credentials import without_passwords

MAX_BYTES = 16 * 2**20
EARLY_LINES = 1000
"""The most texts that are kept until the file exists."""
FILE = "train.log"


class RunLog:
    """Context manager around a run. `write` is for any thread."""

    def __init__(self) -> None:
        self._early: deque[logging.LogRecord] = deque(maxlen=EARLY_LINES)
        self._file: _File | None = None
        self._lock = threading.RLock()  # a failed write is logged, which calls `write` again

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
        """Starts the log file: the folder exists, and lines go to its log from now on. `words` is
        the first line, or, of a resumed run, the first line that is added."""
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
        """A full disk costs the log, which nothing depends on."""
        self._is_lost = True
        to_stderr(f"{self.baseFilename} is no longer written")
