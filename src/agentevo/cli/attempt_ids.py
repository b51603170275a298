"""Ids of attempts that a user gives by their first letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from agentevo.errors import UnknownNameError

MAX_LISTED = 40
"""The most ids that a list of ids with the same beginning names."""


def only_match(names: Iterable[str], prefix: str, run_dir: Path) -> str:
    """The name that equals `prefix`, or the only one that begins with it. Raises
    UnknownNameError."""
    matches = matching_names(names, prefix)
    if len(matches) == 1:
        return matches[0]

    if matches:
        shown = "\n".join(shorten_list(matches))
        raise UnknownNameError(
            f"{run_dir}: {len(matches)} ids begin with {prefix!r}: give more of one:\n{shown}"
        )

    raise UnknownNameError(
        f"{run_dir}: no trajectory is called {prefix!r}: `agentevo trajectories show {run_dir}` "
        "shows the newest"
    )


def matching_names(names: Iterable[str], prefix: str) -> list[str]:
    """The name that equals `prefix`, or all names that begin with it."""
    names = list(names)
    return [prefix] if prefix in names else [name for name in names if name.startswith(prefix)]


def shorten_list(names: Sequence[str]) -> list[str]:
    """The first MAX_LISTED names, and how many more there are."""
    num_hidden = len(names) - MAX_LISTED
    return [*names[:MAX_LISTED], *([f"and {num_hidden} more"] if num_hidden > 0 else [])]
