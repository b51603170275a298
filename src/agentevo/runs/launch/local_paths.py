"""Paths of this machine in a recipe that other machines run.

Python files that the recipe imports are copied with it. For machines that see this machine's
folders (Slurm, Ray), every other path becomes absolute. Containers have their own disks. For them,
files of rows that are small enough are also copied with the recipe, and any other path is refused.
Paths that belong to an image (`/usr` and similar) are not changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentevo.errors import ConfigError
from agentevo.runtime.parsing import read_text

COPIED_KEYS = ("tasks.train", "tasks.eval", "data.train", "data.eval", "data.pairs")
"""Keys whose files are copied with the recipe. Their paths become relative to the recipe."""
MAX_COPIED_BYTES = 16 * 2**20
"""The maximum size of a copied file, in bytes."""
_LAUNCH_KEYS = ("run.", "store.", "import.")
"""Keys that the launch sets itself."""
_IMAGE_PATHS = ("/bin/", "/dev/", "/etc/", "/lib", "/opt/", "/proc/", "/sys/", "/usr/")


def copy_imports(tree: dict[str, Any], files: dict[str, str]) -> None:
    """Adds the Python files that a resolved recipe imports to `files` (contents by name). Changes
    the recipe in place, so that its paths are relative to itself. Raises ConfigError for a folder,
    for two files with the same name, and for an unreadable file."""
    for index, entry in enumerate(tree["import"]):
        path = Path(entry)
        if not path.is_absolute():
            continue  # a module, which the machines have installed

        if path.is_dir():
            raise ConfigError(
                f"import: {path.name} is a folder: install it as a package on the machines, and "
                "import it by its name"
            )

        tree["import"][index] = _add_file("import", path, read_text(path), files)


def make_paths_absolute(tree: dict[str, Any]) -> dict[str, str]:
    """Makes the paths of this machine in a resolved recipe absolute, in place. Returns the paths by
    their keys."""
    paths = {}
    for key, place, index in _local_paths(tree):
        place[index] = paths[key] = os.path.abspath(os.path.expanduser(place[index]))
    return paths


def copy_rows(tree: dict[str, Any], runs: str, files: dict[str, str]) -> None:
    """Adds the files of rows that a resolved recipe names to `files` (contents by name). Changes
    the recipe in place, so that its paths are relative to itself. `runs`: the folder of this
    machine that the other machines see. Raises ConfigError for a path that can't be copied."""
    problems = []
    for key, place, index in list(_local_paths(tree)):
        path = os.path.realpath(os.path.expanduser(place[index]))
        if path.startswith(f"{runs}/"):
            continue

        is_rows = any(key == name or key.startswith(f"{name}.") for name in COPIED_KEYS)
        if not is_rows or not os.path.isfile(path):
            problems.append(
                f"{key}: {place[index]} is a path on this machine, which the machines of the "
                f"launch do not see: give a name that they can fetch, or a path below {runs}"
            )
            continue

        try:
            text = read_text(Path(path), at_most=MAX_COPIED_BYTES)
        except ConfigError as error:
            problems.append(
                f"{key}: it can't be copied with the recipe: {error}, or a path below {runs}, "
                "which the machines see"
            )
        else:
            place[index] = _add_file(key, Path(path), text, files)

    if problems:
        raise ConfigError("\n".join(problems))


def _add_file(key: str, path: Path, text: str, files: dict[str, str]) -> str:
    """The file's path relative to the recipe. Raises ConfigError if another file has the same
    name."""
    if files.setdefault(path.name, text) != text:
        raise ConfigError(
            f"{key}: two files are called {path.name}: rename one of them, since they are copied "
            "into one folder"
        )

    return f"./{path.name}"


def _local_paths(
    tree: dict[str, Any] | list[Any], above: str = ""
) -> Iterator[tuple[str, Any, str | int]]:
    """Yields (key, container, index in the container) for every text that is a path of this
    machine."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for index, value in items:
        key = f"{above}{index}"
        if isinstance(value, (dict, list)):
            yield from _local_paths(value, f"{key}.")
        elif isinstance(value, str) and not key.startswith(_LAUNCH_KEYS) and _is_local(value):
            yield key, tree, index


def _is_local(text: str) -> bool:
    """Whether a value is written as a path that exists."""
    if not text.startswith(("~", ".")) and "/" not in text:
        return False
    if "\0" in text or "\n" in text or "://" in text:
        return False
    path = os.path.expanduser(text)
    return not path.startswith(_IMAGE_PATHS) and os.path.lexists(path)
