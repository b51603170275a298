"""A lock that allows only one trainer at a time in a run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from agentevo.errors import ConfigError
from agentevo.runtime.paths import short

LOCK = "trainer.lock"


@contextmanager
def only_trainer(folder: Path) -> Iterator[None]:
    """Locks the folder, because two trainers of the same run would undo each other's steps. The
    lock ends with the process, in whatever way the process ends."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(
            f"{short(folder)}: another process trains there: stop it first, or give another run.dir"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder / LOCK} can't be written ({error.strerror or error}), so no run can train "
            f"there: make room, make the folder writable, or give another run.dir"
        ) from error

    try:
        yield
    finally:
        lock.release()


def check_free(folder: Path) -> None:
    """Raises ConfigError while another process trains in the folder. Creates nothing."""
    if (folder / LOCK).is_file():
        with only_trainer(folder):
            pass
