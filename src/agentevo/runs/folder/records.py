"""Append-only JSON-lines files in a run's folder, for changes that people make in a run. Each line
is appended by a single write, and is synced to the disk. A killed writer may leave a partial line,
which readers skip. No line is ever changed or deleted. Several processes may append at the same
time. Symbolic links are never followed.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from agentevo.errors import ConfigError
from agentevo.runtime.files import open_regular

CHANGES = "changes.jsonl"
"""The file with the changes that people made in a run, through the dashboard or at the command
line."""
MAX_LINE = 1_000_000
"""The maximum number of bytes of a line. Longer lines are neither written nor read."""
MAX_READ = 64_000_000
"""The maximum number of bytes that are read. Of a longer file, only the end is read."""


class RecordTooLongError(ConfigError):
    """A line of more than MAX_LINE bytes."""


def add_record(path: Path, record: dict[str, Any]) -> None:
    """Appends a line. Raises ConfigError if the path is not a file or can't be written, and
    RecordTooLongError."""
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = line.encode("utf-8", "backslashreplace") + b"\n"
    if len(data) > MAX_LINE:
        raise RecordTooLongError(f"this record has {len(data):,} bytes: the limit is {MAX_LINE:,}")

    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o666)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            if status.st_size and os.pread(file, 1, status.st_size - 1) != b"\n":
                data = b"\n" + data  # a writer was killed in the middle of a line
            if os.write(file, data) != len(data):
                raise OSError(errno.ENOSPC, "the disk is full")

            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written ({error.strerror or error}), so the change was not made: "
            f"make room, or make the folder writable"
        ) from error


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records in the last MAX_READ bytes of the file, the oldest first, without invalid lines.
    Empty if there is no file. Raises ConfigError if the file can't be read."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_READ))
            lines = file.read(MAX_READ).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror or error}): move it away"
        ) from error

    records = []
    for line in lines[:-1]:  # the text after the last newline may still be incomplete
        if not line or len(line) > MAX_LINE:
            continue

        try:
            record = json.loads(line)
            if b"\\u" in line:  # a lone surrogate can't be written
                record = json.loads(
                    json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")
                )
        except (ValueError, RecursionError):
            continue

        if isinstance(record, dict):
            records.append(record)

    return records
