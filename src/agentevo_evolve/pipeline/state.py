"""The state of a pipeline: `pipeline.json` in its folder, which is rewritten at every change.

    waiting -> running -> finished | failed | stopped
    waiting -> skipped

A stage's `digest` identifies its inputs: kind, recipe, options, files from outside, and the digest
of every output of another stage that it used (`inputs`). A stage runs again if and only if the
digest differs. `made_by` of an output is the digest of the stage that made it, so the file contains
the lineage of every model. For files from outside, contents count, and paths don't.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from agentevo.config import RunConfig
from agentevo.errors import ConfigError
from agentevo.models.checkpoint_manifest import TRAINING_FILES
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import must_write, open_regular, write_atomic
from agentevo_evolve.pipeline.schema import MAX_STAGES

STATE = "pipeline.json"
FILE = "pipeline.yaml"
LOCK = ".lock"
Status = Literal["waiting", "running", "finished", "failed", "stopped", "skipped"]
MAX_COUNT = 2**53
"""The maximum value of a count."""
MAX_BYTES = 64_000_000
"""The maximum size of pipeline.json, in bytes."""
MAX_STATES = 2 * MAX_STAGES + 1
"""The maximum number of stages and measurements."""


class StageOutput(msgspec.Struct, kw_only=True):
    """An output of a stage."""

    path: str
    """Relative to the pipeline's folder, if the path is inside that folder."""
    sha256: str
    """The digest of the content. For a whole run's folder, a name that no other run has."""


class Input(msgspec.Struct, kw_only=True):
    """An output of another stage that a stage has used."""

    stage: str
    key: str
    sha256: str


class StageState(msgspec.Struct, kw_only=True):
    """A stage, round or measurement."""

    kind: str
    status: Status = "waiting"
    why: str = ""
    """The reason, for a stage that was skipped, failed, or run again, or that finished and could
    not teach anything."""
    digest: str = ""
    """The digest of `setting`."""
    setting: dict[str, str] = {}
    """The stage's inputs, by key."""
    inputs: list[Input] = []
    outputs: dict[str, StageOutput] = {}
    numbers: dict[str, float] = {}
    seed: int | None = None
    starts: int = 0
    """The number of processes that have worked on the stage."""
    began_at: float | None = None
    ended_at: float | None = None
    wall_s: float = 0.0
    """The time of all its processes, in seconds."""
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    cost: float = 0.0


class PipelineState(msgspec.Struct, kw_only=True):
    """The contents of pipeline.json."""

    name: str
    seed: int
    status: Literal["running", "finished", "failed", "stopped", "over budget"] = "running"
    wall_s: float = 0.0
    """Running time of the pipeline over all resumptions, in seconds."""
    stages: dict[str, StageState] = {}
    """The stages by id, in the order of the plan."""
    version: Literal[1] = 1

    @property
    def tokens(self) -> int:
        """The tokens of all stages."""
        return sum(stage.tokens for stage in self.stages.values())

    @property
    def cost(self) -> float:
        """The cost of all stages."""
        return sum(stage.cost for stage in self.stages.values())


def is_pipeline_folder(path: Path) -> bool:
    """Whether the folder has the state of a pipeline, or of a pipeline with several seeds."""
    return os.path.isfile(path / STATE) or os.path.isfile(path / FILE)


def read_state(folder: Path) -> PipelineState:
    """Raises ConfigError for a folder without a state, or a damaged file."""
    path = folder / STATE
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)

        if len(content) > MAX_BYTES:
            raise OSError(f"it has more than {MAX_BYTES:,} bytes")

        state = decode_json(content, PipelineState)
        if len(state.stages) > MAX_STATES:
            raise OSError(f"it has more than {MAX_STATES:,} stages")

        return state
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: there is no pipeline (no {STATE}): give its folder"
        ) from error
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} can't be read ({error}): restore it, or start over with overwrite=true"
        ) from error


def write_state(folder: Path, state: PipelineState) -> None:
    """Raises DiskError."""
    content = msgspec.json.format(msgspec.json.encode(state), indent=1)
    with must_write(folder / STATE):
        write_atomic(folder / STATE, content, durable=True)


def digest_of(setting: Mapping[str, str]) -> str:
    """The digest of a stage's inputs."""
    return hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()


def as_setting(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Every value of a tree by its dotted key, as JSON."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from as_setting(value, f"{prefix}.{key}")
    else:
        yield prefix, json.dumps(tree, sort_keys=True, default=str)


def digest_of_path(path: Path) -> str | None:
    """The sha256 of a file, or of the files of a model's folder with their names. None if there is
    no file."""
    if path.is_file():
        return _digest_of_file(path)
    if not path.is_dir():
        return None

    digest = hashlib.sha256()
    has_files = False
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in TRAINING_FILES:
            has_files = True
            digest.update(f"{file.relative_to(path).as_posix()}\0".encode("utf-8", "replace"))
            digest.update(_digest_of_file(file).encode())

    return digest.hexdigest() if has_files else None


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def what_changed(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first keys in which two settings differ, as text."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    keys.sort(key=lambda key: not key.startswith(("input.", "file.")))
    shown = [
        f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}" for key in keys[:2]
    ]
    rest = f", and {len(keys) - 2} more" if len(keys) > 2 else ""
    return "; ".join(shown) + rest


def _short(value: str | None) -> str:
    if value is None:
        return "not given"
    return value if len(value) <= 40 else f"{value[:37]}..."


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
