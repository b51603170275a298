"""The inputs of a stage, which show whether it has changed. Contents count, and paths don't."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentevo.config import RunConfig
from agentevo_evolve.pipeline.state import digest_of_path

FILES = {"tasks": ("train", "eval"), "data": ("train", "eval", "pairs"), "rm": ("pairs", "eval")}
"""Sections and keys of a recipe that name files from outside the pipeline."""
CORPUS = "corpus"
"""The option of a tool that also names a file from outside."""


def replaced_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """A tree in which paths of other stages are replaced by the digests of their content."""
    if isinstance(value, Mapping):
        return {key: replaced_texts(child, texts) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [replaced_texts(child, texts) for child in value]

    if isinstance(value, str):
        for path, digest in texts.items():
            value = value.replace(path, digest)

    return value


def without_places(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe in which paths of files from outside are reduced to the file names, because their
    folder does not count."""
    stripped = dict(tree)
    for section, keys in FILES.items():
        section_tree = stripped.get(section)
        if isinstance(section_tree, Mapping):
            stripped[section] = {
                key: _file_name(value) if key in keys else value
                for key, value in section_tree.items()
            }

    if "import" in stripped:
        stripped["import"] = _file_name(stripped["import"])
    if isinstance(agent := stripped.get("agent"), Mapping) and agent.get("tools"):
        stripped["agent"] = {
            **agent,
            "tools": [_with_named_corpus(tool) for tool in agent["tools"]],
        }

    return stripped


def _with_named_corpus(tool: Any) -> Any:
    options = tool.get("options") if isinstance(tool, Mapping) else None
    if not isinstance(options, Mapping) or CORPUS not in options:
        return tool
    return {**tool, "options": {**options, CORPUS: _file_name(options[CORPUS])}}


def _file_name(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_file_name(item) for item in value]
    is_path = isinstance(value, str) and "/stages/" not in value
    return Path(value).name if is_path else value


def files_outside(config: RunConfig | None, dir_: Path) -> dict[str, str]:
    """Digests of the files that a recipe names and that no stage has made."""
    digests: dict[str, str] = {}
    for section, keys in FILES.items() if config is not None else ():
        for key in keys:
            source_value = getattr(getattr(config, section), key)
            for source in source_value if isinstance(source_value, tuple) else [source_value]:
                path = Path(str(source))
                if source is not None and path.exists() and not path.is_relative_to(dir_):
                    digests[f"file.{section}.{key}.{path.name}"] = digest_of_path(path) or ""

    for tool in getattr(config.agent, "tools", ()) if config is not None else ():
        corpus = (getattr(tool, "options", None) or {}).get(CORPUS)
        path = Path(str(corpus)).expanduser()
        if corpus is not None and path.is_file() and not path.is_relative_to(dir_):
            digests[f"file.agent.tools.{path.name}"] = _digest_of_corpus(path)

    return digests


def _digest_of_corpus(path: Path) -> str:
    """The digest of a corpus. It is cached while the file does not change, because a corpus can
    have gigabytes and each stage needs its digest."""
    stat = path.stat()
    return _known_digest(str(path), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _known_digest(path: str, size: int, mtime_ns: int) -> str:
    return digest_of_path(Path(path)) or ""
