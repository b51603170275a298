"""Writing a folder so that readers see all of it or nothing.

The content is made in a hidden sibling and renamed into place, which a killed process can't leave
half done. It does not guard against power loss: that takes `sync_to_disk` of each file, of the
folder, and of the one that it lies in, in this order. Replacing an existing folder has one instant,
between two renames, in which neither is in place.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` when the block ends well, and is deleted when it
    raises. An old `target` is replaced."""
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
    """The bytes of a file, or the names in a folder, outlast a power cut from here on. Raises
    OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(target: Path) -> None:
    """Deletes what killed writers of `target` left beside it. Only for a caller that holds a lock
    on `target`."""
    for path in target.parent.glob(f".{target.name}.*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
