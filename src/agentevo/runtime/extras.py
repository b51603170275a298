"""Imports of packages that only some features need."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from agentevo.errors import MissingExtraError

TRAINING_PACKAGES = ("torch", "accelerate", "gguf")
"""The modules of the extra `train`. Code that computes with a model needs them, and code that only
calls an engine does not."""


@contextmanager
def training_packages(needed_by: str) -> Iterator[None]:
    """A block that imports packages for computing with a model. Raises MissingExtraError, with the
    installing command, if they are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING_PACKAGES:
            raise
        raise MissingExtraError(
            f"{needed_by} needs the package {error.name!r}: pip install 'agentevo[train]'"
        ) from error


def load_extra(module: str, extra: str, needed_by: str, instead: str = "") -> ModuleType:
    """Imports the module and returns it.

    Raises MissingExtraError with the installing command. `needed_by` is the feature or the key of
    the configuration. `instead` is an alternative remedy, such as `, or set KEY=VALUE`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{needed_by} needs the package {error.name!r}: pip install "
            f"'agentevo[{extra}]'{instead}"
        ) from error
