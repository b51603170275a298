"""Writes files and folders so that readers see a complete version or none.

The content is written to a hidden sibling, which is then renamed. So a killed process leaves no
incomplete file under the final name. Folders are not protected against power loss. For that, call
`sync_to_disk` for each file, for the folder, and for its parent folder, in this order. While an
existing folder is replaced, there is an instant between two renames in which neither folder has the
name.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from agentevo.errors import DiskError

PARTIAL = ".partial"
RESUME = "make room there, or make it writable, and resume: every committed step is kept"


def cache_root() -> Path:
    """$AGENTEVO_CACHE, or ~/.cache/agentevo: content that can be made again, with a folder for each
    kind."""
    root = os.environ.get("AGENTEVO_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "agentevo"


@contextmanager
def must_write(path: Path, remedy: str = RESUME) -> Iterator[None]:
    """A block that writes a file or folder. OSError becomes DiskError with the remedy."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} could not be written ({error.strerror or error}): {remedy}"
        ) from error


def write_atomic(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a file in UTF-8, which atomically replaces an existing file. Only one process may
    write it at a time. `durable`: the file survives a power failure after this call returns. Raises
    OSError, after which no partial file remains."""
    staging = path.with_name(f".{path.name}.tmp")
    try:
        staging.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            sync_to_disk(staging)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise

    if durable:
        sync_to_disk(path.parent)


def create_atomic(path: Path, content: str, *, mode: int = 0o666) -> bool:
    """Creates a file, whole and durably. Returns False, and changes nothing, if another process was
    first. Any number of processes may call this at the same time. Raises OSError."""
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        handle = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(content)
        sync_to_disk(staging)
        os.link(staging, path)
    except FileExistsError:
        return False
    finally:
        staging.unlink(missing_ok=True)

    return True


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading that other users may have created. It follows no symbolic link, and
    does not wait for the writer of a pipe. Raises OSError, also if the path is not a regular
    file."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder. It becomes `target` when the block ends, or is deleted if the block
    raises an error. An existing `target` is replaced."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = f".{target.name}.{uuid.uuid4().hex[:8]}"
    staging = target.parent / f"{unique}{PARTIAL}"
    retired = target.parent / f"{unique}.old{PARTIAL}"

    staging.mkdir()
    try:
        yield staging
        if target.exists():
            target.rename(retired)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.exists():
            shutil.rmtree(retired, ignore_errors=True)


def sync_to_disk(path: Path) -> None:
    """Makes the bytes of a file, or the names in a folder, survive a power failure. Raises
    OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(target: Path) -> None:
    """Deletes the temporary files of killed writers of `target`. The caller must hold a lock on
    `target`."""
    for path in target.parent.glob(f".{target.name}.*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
