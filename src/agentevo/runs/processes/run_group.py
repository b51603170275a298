"""The common parts of sweeps and pipelines: several runs under one lock, each with a log."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentevo.errors import ConfigError

ERROR = "error: "
"""The beginning of each error line at the end of an AgentEvo command (cli/main.py)."""
REASON_LINES = 8
"""Lines of a failed command's log that are shown, or may follow its error."""


def last_lines(log: Path, count: int) -> str:
    """The last nonempty lines of a log, within its last 4 KiB."""
    return "\n".join(_end_of(log, 4096)[-count:])


def why_failed(name: str, how: str, log: Path) -> str:
    """The report about a failed command, whose output is in `log`: one line, with the error that
    the command ended with; if it printed none, as a killed process, the last lines of its log under
    it."""
    lines = _end_of(log, 65_536)
    errors = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    if not errors or len(lines) - errors[-1] > REASON_LINES:
        return "\n    ".join([f"{name}: {how}; the end of {log}:", *lines[-REASON_LINES:]])

    first = errors[-1]
    while first and lines[first - 1].startswith(ERROR):
        first -= 1
    return f"{name}: {how}: {lines[first].removeprefix(ERROR)} (all of it: {log})"


def _end_of(log: Path, num_bytes: int) -> list[str]:
    """The nonempty lines among the last bytes of a log."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - num_bytes, 0))
        lines = [line.rstrip() for line in file.read().decode("utf-8", "replace").splitlines()]
    return [line for line in lines if line]


@contextmanager
def held_lock(folder: Path, name: str, what: str) -> Iterator[int]:
    """File descriptor of the lock FOLDER/NAME; it is free again when this process and every run
    that inherited it have ended. (The package filelock, which guards all other files here, does not
    hand its descriptor on.) Raises ConfigError if runs of this `what` are under way."""
    with (folder / name).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{folder}: runs of this {what} are under way (see logs/ there): wait for them, "
                "or stop them"
            ) from error

        yield file.fileno()
