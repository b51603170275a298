"""What sweeps and pipelines have in common: several runs under one lock, each with a log."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentevo.errors import ConfigError


def last_lines(log: Path, count: int) -> str:
    """The last lines of a log that say something, as far as 4 KiB reach."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return "\n".join([line for line in lines if line][-count:])


@contextmanager
def held_lock(folder: Path, name: str, what: str) -> Iterator[int]:
    """File descriptor of the lock FOLDER/NAME; it is free again when this process and every run
    that inherited it have ended. (The package filelock, which guards all other files here, does not
    hand its descriptor on.) Raises ConfigError where runs of this `what` are under way."""
    with (folder / name).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder}: runs of this {what} are under way (see logs/ there): wait for them, "
                "or stop them"
            ) from error
        yield file.fileno()
