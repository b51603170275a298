"""The packages of this repository that build on `agentevo`. Each adds commands (`commands.py`), and
may add names to `agentevo list` (`listings.py`). This package imports them here only, by name, and
works without them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

PACKAGES = ("agentevo_ui", "agentevo_evolve")


def package_modules(name: str) -> Iterator[ModuleType]:
    """The module `name` of every installed package that has one."""
    for package in PACKAGES:
        if find_spec(package) and find_spec(f"{package}.{name}"):
            yield import_module(f"{package}.{name}")
