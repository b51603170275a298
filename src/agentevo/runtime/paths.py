"""Checks paths from a user before anything is created: whether a text can be a path, and whether a
folder can be created there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from agentevo.errors import ConfigError
from agentevo.runtime.registry import nearest

MAX_NAME = 255
"""The maximum number of bytes in the name of a file or folder, on every file system in use."""
MAX_PATH = 4000
"""The maximum number of bytes in a whole path. Linux accepts 4096."""
RESERVED_NAME_BYTES = 80
"""The number of bytes that are reserved for the names of the files in a run's folder."""
TRIAL_BYTES = 2**20
"""The minimum space that a run needs, in bytes."""
MAX_NEIGHBOURS = 2000
"""The maximum number of names in a folder with which a misspelt name is compared."""


def name_problem(path: str) -> str:
    """Why a text can't be a path, and the remedy. Empty if it can. The function does not check
    whether the path exists."""
    if "\0" in path:
        return "has a NUL character, which no path has: remove it"

    try:
        names = path.encode("utf-8").split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8: give another path"

    longest = max(map(len, names))
    if longest > MAX_NAME:
        return f"has a name of {longest:,} bytes, and file systems take {MAX_NAME}: shorten it"

    num_bytes = sum(map(len, names)) + len(names)
    if num_bytes > MAX_PATH:
        return f"has {num_bytes:,} bytes, and systems take {MAX_PATH:,}: shorten it"

    return ""


def short(path: Path) -> str:
    """The path in a message: relative to the current folder if it is inside that folder."""
    with suppress(ValueError, OSError):
        return str(path.relative_to(Path().absolute()))
    return str(path)


def check_new_folder(folder: Path, key: str) -> None:
    """Raises ConfigError if a folder can't be created, or if files can't be written to it. `key` is
    the key that sets another folder. A file without a name tests the place. It disappears when this
    function returns or the process dies."""
    problem = name_problem(f"{folder.absolute()}/{'x' * RESERVED_NAME_BYTES}") or _place_problem(
        folder
    )
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
            pass  # a file above the folder: the loop reaches it
        except OSError as error:
            return f"can't be read ({error.strerror})"

        place = place.parent

    if not stat.S_ISDIR(mode):
        what = "is a file" if stat.S_ISREG(mode) else "is not a folder"
        return what if place == folder.absolute() else f"can't be made: {_shown(place)} {what}"

    if not os.access(place, os.W_OK | os.X_OK):
        return f"can't be made: no permission to write into {_shown(place)}"

    try:
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(bytes(TRIAL_BYTES))
    except OSError as error:
        return f"can't be made: {_shown(place)} accepts no file ({error.strerror or error})"

    return ""


def spelling_hint(path: Path, accepts: Callable[[Path], bool] = Path.exists) -> str:
    """`did you mean 'runs/lake'? ` for a missing path, if its folder has an entry that is accepted
    and has nearly that name, whatever its ending. Else empty."""
    try:
        entries = sorted(entry.name for entry in islice(os.scandir(path.parent), MAX_NEIGHBOURS))
        by_stem = {Path(entry).stem: entry for entry in entries if not entry.startswith(".")}
        likely = path.with_name(by_stem.get(nearest(path.stem, list(by_stem)) or "", path.name))
        is_useful = likely != path and accepts(likely)
    except (OSError, ValueError):
        return ""

    return f"did you mean {str(likely)!r}? " if is_useful else ""


def _shown(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:197]}..."
