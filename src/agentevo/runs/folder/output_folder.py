"""Folders for a command's results (`--out`). Only one process at a time writes to such a folder,
which must be new or made by the same command."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from agentevo.errors import ConfigError, describe_error


@contextmanager
def locked_output(folder: Path, lock_name: str, doing: str) -> Iterator[None]:
    """Locks the folder for this process, and creates it if needed. `doing`: what the other process
    does, for messages. Raises ConfigError if another process holds the lock, or if the folder can't
    be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / lock_name, timeout=0)
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{folder}: another process {doing} there: wait for it, or give another --out"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written ({error.strerror or error}): give another --out"
        ) from error

    try:
        yield
    finally:
        lock.release()


def check_empty(folder: Path, *, but: Collection[str]) -> None:
    """Raises ConfigError for a folder with other content than `but`. A missing folder counts as
    empty."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not a readable folder ({describe_error(error)}): give another --out"
        ) from error

    if any(name not in but for name in names):
        raise ConfigError(f"{folder} is not empty: give another --out")
