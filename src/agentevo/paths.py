"""Paths that somebody gave: what can't be one, and where no folder can be made, said before
anything is created."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from agentevo.errors import ConfigError

MAX_NAME = 255
"""Bytes in the name of a file or folder, on every file system in use."""
MAX_PATH = 4000
"""Bytes in a whole path; Linux takes 4096."""
LONGEST_OWN = 80
"""Bytes for the names of what a run has in its folder."""


def name_problem(path: str) -> str:
    """What keeps a text from being a path and what to do, or empty. Whether something is there is
    not looked at."""
    if "\0" in path:
        return "has a NUL character, which no path has: remove it"

    try:
        names = path.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8: give another path"

    longest = max(map(len, names))
    if longest > MAX_NAME:
        return f"has a name of {longest:,} bytes, and file systems take {MAX_NAME}: shorten it"

    whole = sum(map(len, names)) + len(names)
    if whole > MAX_PATH:
        return f"has {whole:,} bytes, and systems take {MAX_PATH:,}: shorten it"

    return ""


def short(path: Path) -> str:
    """The path as a message names it: from the current folder where it lies below."""
    with suppress(ValueError, OSError):
        return str(path.relative_to(Path().absolute()))
    return str(path)


def check_new_folder(folder: Path, key: str) -> None:
    """Raises ConfigError where a folder can't be made or written into; `key` is what gives another.
    Nothing is created."""
    problem = name_problem(f"{folder.absolute()}/{'x' * LONGEST_OWN}") or _place_problem(folder)
    if problem:
        raise ConfigError(f"{_shown(folder)} {problem}: give another {key}")


def _place_problem(folder: Path) -> str:
    place = folder.absolute()
    while True:
        try:
            mode = os.stat(place).st_mode
            break
        except FileNotFoundError:
            if os.path.islink(place):
                return f"would be at the end of {_shown(place)}, a link to nothing"
        except NotADirectoryError:
            pass  # a file above it: found there
        except OSError as error:
            return f"can't be looked at ({error.strerror})"

        place = place.parent

    if not stat.S_ISDIR(mode):
        what = "is a file" if stat.S_ISREG(mode) else "is no folder"
        return what if place == folder.absolute() else f"can't be made: {_shown(place)} {what}"

    if not os.access(place, os.W_OK | os.X_OK):
        return f"can't be made: nothing may be written into {_shown(place)}"

    return ""


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:197]}..."
