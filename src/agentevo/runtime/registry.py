"""Registers the names that YAML can use, by kind. Other packages add names through Python entry
points.

For example, a package adds an environment by listing it under the entry-point group
`agentevo.environments`. The environment is imported only when its name is used. The same holds for
objects that ship with AgentEvo and are not needed by every run (`packaged`). A registered name
takes precedence over both.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from agentevo.errors import ConfigError, LoadingTimeoutError, UnknownNameError
from agentevo.runtime.tracebacks import describe_failure
from agentevo.runtime.user_code import load_in_time


def nearest(name: str, known_names: list[str]) -> str | None:
    """The known name that `name` most likely meant, or None."""
    same = [candidate for candidate in known_names if candidate.lower() == name.lower()]
    similar = same or difflib.get_close_matches(name, known_names, n=5, cutoff=0.5)
    swapped = [
        candidate for candidate in similar if sorted(candidate) == sorted(name)
    ]  # letters in another order are nearer than a wrong letter
    return swapped[0] if swapped else similar[0] if similar else None


def _is_same(first: object, second: object) -> bool:
    names = [
        (getattr(item, "__module__", None), getattr(item, "__qualname__", None))
        for item in (first, second)
    ]
    return first is second or (names[0] == names[1] and names[0][1] is not None)


def installed_points(group: str) -> Iterable[EntryPoint]:
    """The entry points of the installed packages. Reading them takes 10 ms, which adds up for a
    recipe with ten kinds of names. So they are read only once for the same folders."""
    return _points(tuple(map(_with_modification_time, sys.path)), group)


def _with_modification_time(folder: str) -> tuple[str, int]:
    """A folder that packages are found in, and the time when a package was last added or
    removed."""
    try:
        return folder, os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return folder, 0


@lru_cache(maxsize=64)
def _points(folders: tuple[tuple[str, int], ...], group: str) -> Iterable[EntryPoint]:
    points: Iterable[EntryPoint] = _all_points(folders).select(group=group)
    return points


@lru_cache(maxsize=1)
def _all_points(folders: tuple[tuple[str, int], ...]) -> Any:
    return entry_points()


T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects of the same kind (`kind` is a plural noun, as in the entry-point
    group). `packaged` maps a name to MODULE:OBJECT, for objects that ship in packages above the
    registry's."""

    def __init__(self, kind: str, packaged: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._packaged = packaged or {}
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: registers the object under `name`. Refuses a name that another object has,
        unless that object is an earlier run of the same definition (a notebook cell that is run
        again)."""

        def add(item: T) -> T:
            if not _is_same(self._items.get(name, item), item):
                raise ValueError(
                    f"{self.kind}: the name {name!r} is already taken by {self._items[name]!r}"
                )
            self._items[name] = item
            return item

        return add

    def _entry_points(self) -> dict[str, EntryPoint]:
        group = f"agentevo.{self.kind}"
        points = {point.name: point for point in installed_points(group)}
        shipped = {name: EntryPoint(name, where, group) for name, where in self._packaged.items()}
        return points | shipped

    def _load(self, point: EntryPoint) -> T:
        try:
            item: T = load_in_time(point.load, f"{self.kind}: the import of {point.value}")
        except (LoadingTimeoutError, KeyboardInterrupt):
            raise
        except BaseException as error:  # includes SystemExit, and any other error of the package
            where = f" of the package {point.dist.name}" if point.dist is not None else ""
            raise ConfigError(
                f"{self.kind}: {point.name!r}{where} ({point.value}) can't be imported: "
                f"{describe_failure(error)}"
            ) from error

        return item

    @property
    def _singular(self) -> str:
        if self.kind.endswith("xes"):
            return self.kind.removesuffix("es")
        stem = self.kind.removesuffix("ies")
        return self.kind.rstrip("s") if stem == self.kind else f"{stem}y"

    def names(self) -> list[str]:
        return sorted({*self._items, *self._entry_points()})

    def name_of(self, item: object) -> str | None:
        """The name under which exactly that object is registered."""
        return next((name for name, filed in self._items.items() if filed is item), None)

    def get(self, name: str) -> T:
        """The object with the name `name`. Raises `UnknownNameError` with the nearest known
        name."""
        if name not in self._items:
            point = self._entry_points().get(name)
            if point is not None:
                self._items[name] = self._load(point)

        if name not in self._items:
            guess = nearest(name, self.names())
            hint = f"did you mean {guess!r}? " if guess else ""
            raise UnknownNameError(
                f"no {self._singular} is called {name!r}: {hint}known {self.kind}: "
                f"{', '.join(self.names()) or 'none'}"
            )

        return self._items[name]
