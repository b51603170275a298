"""Work folders on the host's disk, for sandboxes without a separate file system. The folders of a
killed process are deleted when another process creates a folder. Only a process of the same process
namespace deletes them, so containers that share a disk do not touch one another's folders."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

PREFIX = "agentevo-sandbox-"
_NAME = re.compile(rf"{PREFIX}(\d+-\d+-\d+)-\w+")


def new_folder() -> Path:
    """A new empty folder whose name identifies its owner: namespace, process and its time of
    start."""
    remove_stale()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner()}-"))


def owner() -> str:
    """The identity of this process, unique over time: namespace, id and time of start."""
    me = os.getpid()
    return f"{_namespace()}-{me}-{_start_time(me)}"


def is_gone(name: str) -> bool:
    """Whether the process that `owner` identifies has ended. False if it would not be visible
    here."""
    namespace, pid, started = map(int, name.split("-"))
    return namespace == _namespace() and _start_time(pid) != started


def remove_stale() -> None:
    """Deletes the folders of this user's processes that have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue

        with contextlib.suppress(OSError):
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
