"""Locks of folders: only one trainer at a time in a run's folder, and only one command in a folder
for its results (`--out`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from agentevo.errors import ConfigError, describe_error
from agentevo.runtime.paths import short

LOCK = "trainer.lock"


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Locks the folder, because two trainers of the same run would undo each other's steps."""
    taken = f"{short(folder)}: another process trains there: stop it first, or give another run.dir"
    remedy = "make room, make the folder writable, or give another run.dir"
    with _hold(folder / LOCK, taken, f", so no run can train there: {remedy}"):
        yield


def check_free(folder: Path) -> None:
    """Raises ConfigError while another process trains in the folder. Creates nothing."""
    if (folder / LOCK).is_file():
        with only_trainer(folder):
            pass


@contextmanager
def locked_output(folder: Path, lock_name: str, doing: str) -> Iterator[None]:
    """Locks a folder for results, and creates it if needed. `doing`: what the other process does,
    for messages. Raises ConfigError if another process holds the lock, or if the folder can't be
    written."""
    remedy = "give another --out"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written ({error.strerror or error}): {remedy}"
        ) from error

    taken = f"{folder}: another process {doing} there: wait for it, or {remedy}"
    with _hold(folder / lock_name, taken, f": {remedy}"):
        yield


@contextmanager
def _hold(path: Path, taken: str, remedy: str) -> Iterator[None]:
    """The lock ends with the process, in whatever way the process ends."""
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(taken) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written ({error.strerror or error}){remedy}") from error

    try:
        yield
    finally:
        lock.release()


def check_empty(folder: Path, *, but: Collection[str]) -> None:
    """Raises ConfigError for a folder for results with other content than `but`. A missing folder
    counts as empty."""
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
