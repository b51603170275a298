"""Creates or replaces a run's folder without mixing two runs."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from agentevo.config import RunConfig, to_yaml
from agentevo.errors import ConfigError
from agentevo.observability.current_activity import NOW
from agentevo.observability.tracing.setup import FOLDER as TRACING
from agentevo.rollout.given_tasks import TASKS_FILE
from agentevo.runs.folder.chain import HEAD, HeadFile, is_given_up
from agentevo.runs.folder.lock import LOCK, check_free, only_trainer
from agentevo.runs.folder.resume_rules import check_resume
from agentevo.runs.folder.run_folder import MADE_BY
from agentevo.runs.folder.shared_store import check_store, prepare_store
from agentevo.runtime.files import PARTIAL, remove_leftovers
from agentevo.runtime.paths import check_new_folder, short

RunCommand = Literal["train", "learn", "sft", "loop"]
"""The commands whose runs take steps; `loop`: a program's own training loop."""
_LOG = "metrics.jsonl"
_BEFORE_CONFIG = {
    LOCK,
    _LOG,
    HEAD,
    NOW,
    TASKS_FILE,
    TRACING,
    "bad_rows.jsonl",
    "config.yaml",
    "logs",
    "store.sqlite",
}
"""Files that may exist in a folder before its config.yaml, which makes it a run's folder."""


@contextmanager
def new_folder(config: RunConfig) -> Iterator[Callable[[], None]]:
    """Creates an empty folder for a new run, and an empty store. Yields a function that makes the
    folder final. If the run fails before that call, everything stays as it was, including an
    overwritten run, but not the data of that run in a store outside its folder.

    Refuses to mix two runs, or to replace a run that is being trained.
    """
    check_folder(config)
    folder = config.run_dir.absolute()
    replaced = None
    exists = (folder / "config.yaml").is_file() or was_killed_early(folder)
    final = False

    with only_trainer(folder) if exists else nullcontext():
        prepare_store(config)
        if exists:
            remove_leftovers(folder)
            replaced = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
            folder.rename(replaced)

    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={short(folder)} can't be made ({error.strerror or error}): give a folder "
            "that can be written"
        ) from error

    def make_final() -> None:
        nonlocal final
        final = True
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    try:
        yield make_final
    finally:
        if not final:
            shutil.rmtree(folder, ignore_errors=True)
            # the deepest first; a folder that other processes use by now stays
            for parent in missing:
                with suppress(OSError):
                    parent.rmdir()
            if replaced is not None:
                replaced.rename(folder)


def check_folder(config: RunConfig) -> None:
    """Raises ConfigError for a folder where no new run may start. Inside the folder of another run,
    a new run may only replace a run that was abandoned, or killed before it became a run."""
    folder = config.run_dir
    check_new_folder(folder, "run.dir")

    exists = (folder / "config.yaml").is_file()
    if exists and not config.run.overwrite and not is_given_up(folder):
        raise ConfigError(
            f"{short(folder)} holds a run already: resume it with --resume, give "
            "another run.dir, or "
            "delete it with run.overwrite=true"
        )

    if not exists and _has_something(folder) and not was_killed_early(folder):
        raise ConfigError(
            f"{short(folder)} is not empty and is not a run's folder: give another run.dir"
        )
    check_free(folder)


def check_place(
    config: RunConfig, command: str, *, resume: bool, may_create: bool = True
) -> dict[str, tuple[Any, Any]]:
    """Checks the folder and the store of a run. Refuses a resume without a run, and a new run where
    a run exists. Returns the changed keys of a resume as a map from a key to its (old, new) values.
    Without `may_create`, no database is created. Raises ConfigError."""
    if resume:
        check_free(config.run_dir)
        return check_resume(config, command)

    check_folder(config)
    check_store(config, may_create=may_create)
    return {}


def was_killed_early(folder: Path) -> bool:
    """Whether the folder contains only files that a run creates before its config.yaml. Such a run
    was killed during its start and has played nothing. A run that is starting now looks the same,
    but holds the lock."""
    if not (folder / LOCK).is_file() or (folder / "config.yaml").exists():
        return False
    names = {_base_name(path.name) for path in folder.iterdir()}
    log = folder / _LOG
    return names <= _BEFORE_CONFIG and not (log.is_file() and log.stat().st_size)


def _base_name(name: str) -> str:
    """The name of a file without the suffixes that its writer or SQLite adds temporarily."""
    name = name.removesuffix(".tmp").removeprefix(".") if name.endswith(".tmp") else name
    for ending in ("-wal", "-shm", "-journal"):
        name = name.removesuffix(ending)
    return name


def _has_something(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def write_config(config: RunConfig, command: str = "train") -> None:
    """Writes config.yaml atomically to the run's folder, which is created if needed. The first line
    names the command that made the run, see `command_of`. From now on, the run's head (chain.py)
    lists the file, and the record of the run's tasks. The file has run.overwrite=false, so that its
    use as a recipe does not overwrite the run."""
    folder = config.run_dir
    config = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": False})})
    folder.mkdir(parents=True, exist_ok=True)
    head = HeadFile(folder)
    head.record_file(TASKS_FILE)
    head.write_file("config.yaml", f"{MADE_BY}{command}\n{to_yaml(config)}")


def kind_of(command: RunCommand) -> str:
    """The name of a command's run in the file that `write_config` writes."""
    return "train" if command == "learn" else command
