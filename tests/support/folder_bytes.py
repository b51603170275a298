"""All that a folder holds, to see that somebody has left it as it was."""

from __future__ import annotations

import hashlib
from pathlib import Path


def contents(folder: Path) -> dict[str, str]:
    """File -> digest of its bytes; folders and links are there by their names. Left out is what
    SQLite makes to read at all: the memory that readers share, and a log without an entry."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_file = path.is_file() and not path.is_symlink()
        is_empty_log = path.name.endswith("-wal") and is_file and not path.stat().st_size
        if not is_empty_log and not path.name.endswith("-shm"):
            text = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else "no file"
            found[str(path.relative_to(folder))] = text

    return found
