"""Reads the folder of a run: configuration, store, the texts of its tokens.

    config.yaml  metrics.jsonl  summary.json  report.html  plots/  checkpoints/  store.sqlite

The folder of a sweep has `sweep.yaml`, the folders of its runs, their logs, and the table of their
results.

This module writes nothing. A run may be running, interrupted, or moved to another place since it
was created.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentevo.config import sources
from agentevo.config.interpolation import shorten
from agentevo.errors import ConfigError
from agentevo.observability.summary import is_complete, read_summary
from agentevo.runtime.paths import name_problem

if TYPE_CHECKING:
    from agentevo.config import RunConfig
    from agentevo.observability import Decode
    from agentevo.store import Store

T = TypeVar("T")

UNSCORED = ("rewards=[]",)
"""Overrides for code that loads a run's model and scores nothing. The rewards may be functions of
the program that created the run, which no other process has."""

SWEEP_FILE = "sweep.yaml"
MADE_BY = "# agentevo "
"""The beginning of the first line of a run's config.yaml."""
MAX_WAIT_S = 15.0
"""The time in seconds that a command for a person waits for an unavailable database."""


def is_run_folder(path: Path) -> bool:
    return os.path.isfile(path / "config.yaml")  # also false if reading is not permitted


def is_sweep_folder(path: Path) -> bool:
    return os.path.isfile(path / SWEEP_FILE)


def finished_summary(path: Path) -> dict[str, Any] | None:
    """The summary.json of a run that reached its last step and was evaluated there. None for any
    other run."""
    file = path / "summary.json"
    if not is_run_folder(path) or not file.is_file():
        return None

    summary = read_summary(file)
    from agentevo.config import TrainerSection

    planned = summary.get("planned_steps")
    if planned is None:  # a run of an older version
        default = TrainerSection.model_fields["steps"].default
        planned = _section(path, "trainer").get("steps", default)

    if not isinstance(planned, int):
        raise ConfigError(
            f"{path}: the number of steps in summary.json or config.yaml is "
            f"{shorten(str(planned))}: restore these files"
        )

    missing = [key for key in ("seed", "steps", "wall_s") if key not in summary]
    if missing:
        raise ConfigError(f"{file}: is damaged: it has no {missing[0]}: restore or delete it")

    evaluation = summary["eval"]
    all_failed = (evaluation.get("failed") or {}).get("after") == 1.0
    is_evaluated = evaluation["after"] is not None or all_failed
    return summary if is_complete(summary, planned) and is_evaluated else None


def check_run_folder(path: Path) -> Path:
    """Returns the path if it is a run's folder. Otherwise raises `ConfigError` with nearby runs."""
    problem = name_problem(str(path))
    if problem:
        raise ConfigError(f"{str(path)[:60]!r} {problem}")
    if is_run_folder(path):
        return path

    near = sorted(
        {
            str(config_file.parent)
            for root in (path, Path("runs"))
            if os.path.isdir(root)
            for below in ("*/config.yaml", "stages/*/config.yaml")
            for config_file in root.glob(below)
        }
    )
    report = path / "report.html"
    is_pipeline = os.path.isfile(path / "pipeline.json") and os.path.isfile(report)
    hint = f"it is a pipeline, whose report is {report}; " if is_pipeline else ""
    hint += (
        f"runs here: {', '.join(near[:8])}"
        if near
        else "it is the folder that `agentevo train` printed, such as runs/coins"
    )
    raise ConfigError(f"{path}: is not the folder of a run (it has no config.yaml): {hint}")


def run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run's configuration, with the folder's current path as `run.dir`. Raises `ConfigError` if
    it can't be read."""
    from agentevo.config import build_config
    from agentevo.config.imports import check_code_of_run

    source = check_run_folder(path) / "config.yaml"
    tree = sources.overlay(
        sources.read_yaml(source), {"run": {"dir": str(path), "overwrite": False}}
    )
    check_code_of_run(path, tree, overrides)
    return build_config(tree, overrides, where=str(source), needs_environment=False)


def queued_group_size(path: Path) -> int | None:
    """The minimum number of attempts in the group of a queued task, which a resumed run can't
    change. None if no tasks are queued, because sampling and training alternate or a program's own
    loop samples, and None if config.yaml does not say."""
    from agentevo.config import TrainerSection

    try:
        rollout = _section(path, "rollout")
        trainer = _section(path, "trainer")
        curriculum = _section(path, "tasks").get("curriculum")
    except ConfigError:
        return None

    if command_of(path) == "loop":
        return None

    counts = [rollout.get("staleness", 0), rollout.get("samplers", 0)]
    size = trainer.get("group_size", TrainerSection.model_fields["group_size"].default)
    if isinstance(curriculum, dict) and isinstance(curriculum.get("attempts"), list):
        size = curriculum["attempts"][0]
    queues = any(isinstance(count, int) and count > 0 for count in counts)
    return size if queues and isinstance(size, int) else None


def command_of(folder: Path) -> str | None:
    """The command that made the run in the folder: `train` (also for `learn`), `sft`, or `loop` for
    a program's own loop. None if config.yaml does not say, or does not exist."""
    if not is_run_folder(folder):
        return None
    with (folder / "config.yaml").open(encoding="utf-8") as file:
        first = file.readline().strip()
    return first.removeprefix(MADE_BY) if first.startswith(MADE_BY) else None


def resume_command(folder: Path, command: str | None) -> str:
    """The command that resumes the run in that folder. Empty if no command started it, as for a
    program's own loop."""
    if command not in ("train", "sft"):
        return ""
    words = ["agentevo", command, str(folder / "config.yaml"), f"run.dir={folder}", "--resume"]
    return shlex.join(words)


def read_store(
    path: Path, work: Callable[[Store], Awaitable[T]], *, wait_s: float | None = None
) -> T:
    """Runs `work`, which only reads, on the run's store, see `use_store`. Raises `ConfigError` if
    there is no run, and `StoreError` if there is no store."""
    return use_store(run_store_url(path), work, wait_s=wait_s, read_only=True)


def run_store_url(path: Path) -> str:
    """The URL of the run's store, with the folder's current path. Raises ConfigError if config.yaml
    has another value there."""
    url = _section(path, "store").get("url")
    if url is not None and not isinstance(url, str):
        raise ConfigError(
            f"{path / 'config.yaml'}: store.url: {shorten(str(url))} is not a string: restore "
            f"the file"
        )
    return url or f"sqlite:///{path / 'store.sqlite'}"


def remote_model_names(path: Path) -> list[str]:
    """The remote models of the run's recipe."""
    return list(_section(path, "remote_models"))


def use_store(
    url: str,
    work: Callable[[Store], Awaitable[T]],
    *,
    create: bool = False,
    timeout_s: float = 60.0,
    wait_s: float | None = None,
    read_only: bool = False,
) -> T:
    """Runs `work` on a store, in a separate event loop, so it also works while a loop is running
    (in a notebook). A person waits for the result, so the wait for an unavailable database ends
    after `wait_s`, or MAX_WAIT_S. `timeout_s` is the deadline of each call. `read_only`: see
    `open_store`."""
    from agentevo.runs.folder.store_opening import open_run_store
    from agentevo.runtime.event_loop import run_coroutine

    async def on_store() -> T:
        async with await open_run_store(
            url,
            create=create,
            timeout_s=timeout_s,
            within_s=MAX_WAIT_S if wait_s is None else wait_s,
            remedy="start the database, correct its URL, or wait longer with --wait SECONDS",
            read_only=read_only,
        ) as store:
            return await work(store)

    return run_coroutine(on_store())


def token_texts(path: Path) -> Decode | None:
    """Maps a token id to its text, by `saved_tokenizer`. None if there is no tokenizer."""
    tokenizer = saved_tokenizer(path)
    if tokenizer is None:
        return None
    return lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))


def saved_tokenizer(path: Path) -> Any | None:
    """The tokenizer of the run's newest checkpoint, else of its model. None if neither is saved on
    this machine."""
    saved = sorted(
        path.glob("checkpoints/**/tokenizer_config.json"),
        key=lambda tokenizer_file: tokenizer_file.stat().st_mtime,
    )
    source = (
        str(saved[-1].parent) if saved else _saved_model(str(_section(path, "model").get("name")))
    )
    return None if source is None else tokenizer_in(source)


def tokenizer_in(source: str) -> Any:
    """The tokenizer of a model's folder. Raises ConfigError if it is damaged."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # damaged files can raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"{source}: its tokenizer can't be read ({reason}): restore it, or delete that folder"
        ) from error


def _saved_model(name: str) -> str | None:
    """The model's folder if it is on this machine. Nothing is downloaded."""
    from agentevo.models.files.cache import cache_folder, is_complete
    from agentevo.models.files.known_models import known_models

    folder = os.path.expanduser(name)
    if os.path.isfile(os.path.join(folder, "config.json")):  # false for an invalid path
        return folder
    if name in known_models.names() and is_complete(known_models.get(name), cache_folder(name)):
        return str(cache_folder(name))
    return None


def _section(path: Path, name: str) -> dict[str, Any]:
    """A section as written in config.yaml, unchecked, so that the store of a run can be read even
    if its environment is not installed."""
    section = sources.read_yaml(check_run_folder(path) / "config.yaml").get(name)
    return section if isinstance(section, dict) else {}
