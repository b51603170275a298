"""Temporary folders that belong to a process. Their names identify it: those of a killed process
are deleted when such a folder is made again on the same machine, before it boots again."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

IDENTITY = r"[0-9a-f]{8}-\d+-[0-9a-f]+"
"""The form of the identities that `owner` returns, as a regular expression."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def new_folder(prefix: str) -> Path:
    """A new empty folder of this process in the system's temporary folder. Folders with this prefix
    whose process has ended are deleted first, but only those of the same machine, boot and process
    namespace, so machines and containers that share a disk do not touch one another's. Raises
    OSError."""
    remove_stale(prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{owner()}-"))


def owner() -> str:
    """The identity of this process, unique over time and machines: namespace, id and time of start.
    Raises OSError."""
    me = os.getpid()
    return f"{_namespace()}-{me}-{_start_time(me):x}"


def is_gone(identity: str) -> bool:
    """Whether the process that `owner` identifies has ended. False if it would not be visible
    here. Raises OSError if that can't be read, as without free file descriptors."""
    namespace, pid, started = identity.split("-")
    return namespace == _namespace() and _start_time(int(pid)) != int(started, 16)


def remove_stale(prefix: str) -> None:
    """Deletes the folders with this prefix whose processes have ended: those of this user, and for
    root those of all users, because a sandbox of root gives its folder to an unused user."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        match = re.fullmatch(rf"{re.escape(prefix)}({IDENTITY})-\w+", path.name)
        if match is None or path.is_symlink():
            continue

        with suppress(OSError):
            is_root = os.geteuid() == 0
            is_ours = is_root or path.stat().st_uid == os.geteuid()
            if is_ours and is_gone(match[1]):
                remove_folder(path)


def remove_folder(path: Path) -> None:
    """Deletes a folder with its content, however deep it is. What can't be deleted stays, without
    an error. Follows no links.

    Subfolders are moved to the top before they are emptied, so that two open folders suffice, and
    no path is too long for the system."""
    with suppress(OSError):
        top = os.open(path, _OPEN)
        try:
            names = _empty(top, top)
            while names:
                names += _remove_below(top, names.pop())
        finally:
            os.close(top)

        os.rmdir(path)


def _remove_below(top: int, name: str) -> list[str]:
    """Deletes a folder in `top`. Returns the names of its subfolders, which are then in `top`."""
    names: list[str] = []
    with suppress(OSError):
        folder = os.open(name, _OPEN, dir_fd=top)
        try:
            names = _empty(folder, top)
        finally:
            os.close(folder)

        os.rmdir(name, dir_fd=top)
    return names


def _empty(folder: int, top: int) -> list[str]:
    """Deletes the files and empty folders of a folder, and moves its other folders to `top`.
    Returns the names that they have there."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                elif folder == top:
                    names.append(entry.name)
                elif not _remove_empty(entry.name, folder):
                    name = uuid.uuid4().hex
                    os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
                    names.append(name)
    return names


def _remove_empty(name: str, folder: int) -> bool:
    """Deletes a folder in `folder` if it is empty. Returns whether it did."""
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _namespace() -> str:
    """The boot of this machine and the namespace of process ids, of which each container has its
    own. Eight hexadecimal digits. Raises OSError."""
    machine = platform.node()
    namespace = 0
    with suppress(FileNotFoundError):  # systems without /proc
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(FileNotFoundError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(f"{machine} {namespace}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> int:
    """The time of start of a process: in ticks since the boot, which do not change when the
    system's clock is set, and in hundredths of a second where there is no /proc. 0 if it has
    ended. Raises OSError."""
    if sys.platform != "linux":
        with suppress(psutil.Error):
            return int(psutil.Process(pid).create_time() * 100)
        return 0

    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0

    state, *numbers = stat.rpartition(b")")[2].split()  # the name before it can have any bytes
    return 0 if state in (b"Z", b"X") else int(numbers[18])
