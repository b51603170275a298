"""What a stage is made of, so that it is told from what it was: contents count, and not where they
lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig
from agentevo.pipeline.state import digest_of_path

FILES = {"tasks": ("train", "eval"), "data": ("train", "eval", "pairs"), "rm": ("pairs", "eval")}
"""Sections and keys of a recipe that name files from outside."""


def replaced_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """A tree in which paths of other stages are the digests of what lies there."""
    if isinstance(value, Mapping):
        return {key: replaced_texts(one, texts) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced_texts(one, texts) for one in value]
    if isinstance(value, str):
        for path, digest in texts.items():
            value = value.replace(path, digest)
    return value


def without_places(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe in which files from outside have their names only: what is in them counts, and not
    where they lie."""
    found = dict(tree)
    for section, keys in FILES.items():
        given = found.get(section)
        if isinstance(given, Mapping):
            found[section] = {
                key: _named(value) if key in keys else value for key, value in given.items()
            }
    if "import" in found:
        found["import"] = _named(found["import"])
    return found


def _named(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_named(one) for one in value]
    is_path = isinstance(value, str) and "/stages/" not in value
    return Path(value).name if is_path else value


def files_outside(config: RunConfig | None, dir_: Path) -> dict[str, str]:
    """Digests of the files that a recipe names and that no stage has made."""
    found: dict[str, str] = {}
    for section, keys in FILES.items() if config is not None else ():
        for key in keys:
            given = getattr(getattr(config, section), key)
            for source in given if isinstance(given, tuple) else [given]:
                path = Path(str(source))
                if source is not None and path.exists() and not path.is_relative_to(dir_):
                    found[f"file.{section}.{key}.{path.name}"] = digest_of_path(path) or ""
    return found
