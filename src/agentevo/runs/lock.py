"""A lock that lets one trainer at a time into a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from agentevo.errors import ConfigError


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Two trainers of one run would undo each other's steps. The lock ends with the process,
    however it ends."""
    lock = FileLock(folder / "trainer.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{folder}: another process trains there: stop it first, or give another run.dir"
        ) from None
    try:
        yield
    finally:
        lock.release()
