"""Paths of this machine in a recipe that other machines run.

Machines that see this one's folders (Slurm, Ray) read them under the same absolute path. Containers
have a disk of their own: rows that fit beside the recipe are carried along, and any other path is
refused. What an image has of its own (`/usr` and the like) is left as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentevo.errors import ConfigError
from agentevo.parsing import read_text

CARRIED = ("tasks.train", "tasks.eval", "data.train", "data.eval", "data.pairs")
"""Keys whose files go along: their paths start at the recipe."""
LARGEST = 16 * 2**20
"""Bytes of a file that goes along."""
_PLACED = ("run.", "store.", "import.")
"""Keys that the launch places by itself."""
_OF_AN_IMAGE = ("/bin/", "/dev/", "/etc/", "/lib", "/opt/", "/proc/", "/sys/", "/usr/")


def with_absolute_paths(tree: dict[str, Any]) -> dict[str, str]:
    """The paths of this machine in a resolved recipe by their keys, in the recipe absolute from now
    on (it is changed in place)."""
    paths = {}
    for key, place, index in _local_paths(tree):
        place[index] = paths[key] = os.path.abspath(os.path.expanduser(place[index]))
    return paths


def carry(tree: dict[str, Any], runs: str) -> dict[str, str]:
    """Contents of the files that go along, by name; in the recipe they lie beside it from now on
    (it is changed in place). `runs`: the folder that the machines have of this one. Raises
    ConfigError for what can't go along."""
    files: dict[str, str] = {}
    sources: dict[str, str] = {}
    problems = []
    for key, place, index in list(_local_paths(tree)):
        path = os.path.realpath(os.path.expanduser(place[index]))
        if path.startswith(f"{runs}/"):
            continue

        is_rows = any(key == name or key.startswith(f"{name}.") for name in CARRIED)
        if not is_rows or not os.path.isfile(path):
            problems.append(
                f"{key}: {place[index]} is a place on this machine, which the machines of the "
                f"launch do not see: give a name that they can fetch, or a path below {runs}"
            )
            continue

        name = os.path.basename(path)
        if sources.setdefault(name, path) != path:
            raise ConfigError(
                f"{key}: two files are called {name}: rename one of them, they go into one folder"
            )

        try:
            files[name] = read_text(Path(path), at_most=LARGEST)
        except ConfigError as error:
            problems.append(
                f"{key}: it can't go along with the recipe: {error}, or a path below {runs}, where "
                "the machines find it"
            )
        place[index] = f"./{name}"

    if problems:
        raise ConfigError("\n".join(problems))
    return files


def _local_paths(
    tree: dict[str, Any] | list[Any], above: str = ""
) -> Iterator[tuple[str, Any, str | int]]:
    """(key, what holds it, its place in there) of every text that is a path of this machine."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for index, value in items:
        key = f"{above}{index}"
        if isinstance(value, (dict, list)):
            yield from _local_paths(value, f"{key}.")
        elif isinstance(value, str) and not key.startswith(_PLACED) and _is_local(value):
            yield key, tree, index


def _is_local(text: str) -> bool:
    """Whether a value is written as a path, and something lies there."""
    if not text.startswith(("~", ".")) and "/" not in text:
        return False
    if "\0" in text or "\n" in text or "://" in text:
        return False
    path = os.path.expanduser(text)
    return not path.startswith(_OF_AN_IMAGE) and os.path.lexists(path)
