"""Files of a run's processes in its folder: announcements of engines, logs, the newest weights.
Symbolic links are not followed, and only regular files are opened. A name from a URL is joined to a
path only if the folder contains that name."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from agentevo.inference.serving.directory import DEAD_S, Announcement
from agentevo.inference.weights.weight_transport import Latest
from agentevo.observability.pages.text import shown
from agentevo.runs.folder.sources import RunSource
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import open_regular

MAX_FILES = 1_000
MAX_JSON_BYTES = 65_536
LOG_BYTES = 65_536
"""The number of bytes that are read from the end of a log."""
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, moves
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-~]"
)
MAX_LOG_LINE = 2_000
"""The maximum number of characters of a line of a log."""


class ListedEngine(Announcement, frozen=True, kw_only=True):
    """An engine that has announced itself."""

    beaten_at: float = 0.0
    """The time of its last heartbeat, Unix time."""
    lives: bool = False


class Log(NamedTuple):
    """A log of the run."""

    name: str
    size: int
    changed_at: float


class LogEnd(NamedTuple):
    """The last bytes of a log."""

    log: Log
    data: bytes
    is_cut: bool
    """Whether the log has more before them."""


class Weights(NamedTuple):
    """The weights that the trainer published last."""

    version: int
    published_at: float
    versions: list[int]
    """The versions in the folder."""


def engines(source: RunSource) -> list[ListedEngine]:
    """The engines by name. A file that is not from an engine is left out."""
    listed = []
    for path, what in _files(source.file("engines"), ".json"):
        with suppress(OSError, msgspec.MsgspecError):
            engine = decode_json(_read_end(path, MAX_JSON_BYTES)[0], ListedEngine)
            lives = abs(time.time() - what.st_mtime) <= DEAD_S
            listed.append(msgspec.structs.replace(engine, beaten_at=what.st_mtime, lives=lives))

    return sorted(listed, key=lambda engine: engine.name)


def weights(source: RunSource) -> Weights | None:
    """The newest weights. None if the run has no folder of weights, because its single process
    needs none."""
    folder = source.file("weights")
    for path, what in _files(folder, "latest.json"):
        with suppress(OSError, msgspec.MsgspecError):
            latest = decode_json(_read_end(path, MAX_JSON_BYTES)[0], Latest)
            return Weights(latest.version, what.st_mtime, _versions(folder))
    return None


def _versions(folder: Path | None) -> list[int]:
    names = []
    if folder is not None:
        with suppress(OSError), os.scandir(folder) as entries:
            names = [
                entry.name.removeprefix("version-")
                for entry in entries
                if entry.name.startswith("version-") and entry.is_dir(follow_symlinks=False)
            ]

    return sorted(int(name) for name in names if name.isdecimal())


def logs(source: RunSource) -> list[Log]:
    """The logs of the run's own processes, and the log that a sweep keeps for the run."""
    return [log for _, log in _logs(source)]


def log_end(source: RunSource, name: str, *, num_bytes: int = LOG_BYTES) -> LogEnd | None:
    """None if the run has no log with that name. Reads at most `num_bytes`, however long the log
    is. Raises OSError."""
    for path, log in _logs(source):
        if log.name == name:
            data, size = _read_end(path, num_bytes)
            return LogEnd(log._replace(size=size), data, size > len(data))
    return None


def log_text(data: bytes, *, is_cut: bool, most_lines: int = 400) -> str:
    """The last lines of the part of a log that was read, without terminal escapes. Of a line that a
    progress bar overwrote, only its last state. `is_cut`: whether the part begins within a line.
    That line is left out."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    lines = text.split("\n")
    if is_cut and len(lines) > 1:
        lines = lines[1:]
    if lines and not lines[-1]:
        lines.pop()

    # A carriage return at the end has not overwritten anything yet.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines[-most_lines:]]
    return "\n".join(shown(line, MAX_LOG_LINE) for line in lines)


def _logs(source: RunSource) -> Iterator[tuple[Path, Log]]:
    for path, what in _files(source.file("logs"), ".log"):
        yield path, Log(path.name, what.st_size, what.st_mtime)

    if source.sweep is not None and source.folder is not None:
        # The log is outside the run's folder. It is read only if the sweep's folder is shown too.
        log_name = f"{source.folder.name}.log"
        for path, what in _files(source.folder.parent / "logs", log_name):
            if path.name == log_name:
                yield path, Log(f"sweep/{log_name}", what.st_size, what.st_mtime)


def _files(folder: Path | None, ending: str) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files of a folder, by name. Empty if the folder is a symbolic link."""
    if folder is None:
        return

    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            return
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(ending))[
                :MAX_FILES
            ]
    except OSError:
        return

    for name in names:
        with suppress(OSError):
            what = (folder / name).lstat()
            if stat.S_ISREG(what.st_mode):
                yield folder / name, what


def _read_end(path: Path, most: int) -> tuple[bytes, int]:
    """The last bytes of a regular file, and its size."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - most, 0))
        return file.read(most), size
