"""Temporary folders that belong to a process. Their names identify it: those of a killed process
are deleted when a process of this user makes such a folder again."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil


def new_folder(prefix: str) -> Path:
    """A new empty folder of this process in the system's temporary folder. Folders with this prefix
    whose process has ended are deleted first, but only those of the same process namespace, so
    containers that share a disk do not touch one another's. Raises OSError."""
    remove_stale(prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{owner()}-"))


def owner() -> str:
    """The identity of this process, unique over time: namespace, id and time of start."""
    me = os.getpid()
    return f"{_namespace()}-{me}-{_start_time(me)}"


def is_gone(name: str) -> bool:
    """Whether the process that `owner` identifies has ended. False if it would not be visible
    here."""
    namespace, pid, started = map(int, name.split("-"))
    return namespace == _namespace() and _start_time(pid) != started


def remove_stale(prefix: str) -> None:
    """Deletes the folders with this prefix of this user's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        match = re.fullmatch(rf"{re.escape(prefix)}(\d+-\d+-\d+)-\w+", path.name)
        if match is None or path.is_symlink():
            continue

        with suppress(OSError):
            is_root = os.geteuid() == 0
            is_ours = is_root or path.stat().st_uid == os.geteuid()
            if is_ours and is_gone(match[1]):
                shutil.rmtree(path, ignore_errors=True)


def _namespace() -> int:
    """The namespace of process ids: each container has its own. 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int:
    """The start time of a process, in hundredths of a second; 0 if there is none."""
    try:
        return int(psutil.Process(pid).create_time() * 100)
    except psutil.Error:
        return 0
