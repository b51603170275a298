"""The folder of an evaluation. An interrupted evaluation is resumed from it.

    eval.json           the settings: tasks, models, attempts, sampling; written first, so
                        `--resume` can continue even if no other file exists
    tasks.jsonl         the tasks, a line each
    trajectories.jsonl  every attempt in full, with its messages and tokens
    results.jsonl       a line for each attempt, see AttemptLine
    summary.json        the summary of the attempts; written last

Both logs only grow. The attempts of a model at a task form a play: their lines have the same play
name and are appended together, trajectories first. The newest complete play of a task counts. A
play is incomplete if a line is missing or was cut off because the process was killed. A task
without a complete play is played again. An interruption loses nothing else of an evaluation.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from agentevo.errors import ConfigError, describe_error
from agentevo.runs.folder.lock import check_empty, locked_output
from agentevo.runtime.decoding import decode_json
from agentevo.runtime.files import must_write, sync_to_disk, write_atomic
from agentevo.runtime.parsing import parse_json
from agentevo.types import Status, Task, Trajectory

T = TypeVar("T")
SETTINGS = "eval.json"
TASKS = "tasks.jsonl"
RESULTS = "results.jsonl"
TRAJECTORIES = "trajectories.jsonl"
SUMMARY = "summary.json"
LOCK = "eval.lock"
_PARTIAL_SETTINGS = f".{SETTINGS}.tmp"
"""The file that remains if a process was killed while it wrote SETTINGS."""
REMEDY = "make room there, or make it writable, and continue with --resume"
_ENCODER = msgspec.json.Encoder(enc_hook=lambda column: column.tolist())  # columns of turns


class AttemptLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an attempt."""

    model: str
    task: str
    attempt: int
    status: Status
    reward: float | None
    """None for a failed attempt, because a missing score is not 0."""
    parts: dict[str, float] = {}
    success: bool = False
    scorer: str = ""
    """The name of the task's scorer, else of the recipe's rewards."""
    source: str = ""
    """The source of the task."""
    answer: str = ""
    """The stated answer (in the task's form, else `auto`), shortened."""
    tokens: int = 0
    """The number of tokens that the model generated."""
    turns: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    """The cost of remote models, by the recipe's prices."""
    truncated: bool = False
    error: str | None = None
    play: str = ""
    """The play's name. Lines that were written together have the same name."""


class KeptTrajectory(msgspec.Struct, frozen=True):
    """A line of trajectories.jsonl."""

    model: str
    trajectory: Trajectory
    play: str = ""
    """The play's name, the same as in the attempt's line."""


def task_digest(tasks: Sequence[Task]) -> str:
    """The digest of all tasks in order."""
    return hashlib.sha256(msgspec.json.encode(list(tasks))).hexdigest()


class ResultsFolder:
    """Reads and writes the folder of an evaluation. Only one process may use it at a time, see
    `lock`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lock(self) -> AbstractContextManager[None]:
        """Raises ConfigError if another process evaluates into the folder, or if the folder can't
        be locked."""
        return locked_output(self.path, LOCK, "evaluates")

    def check_new(self) -> None:
        """Raises ConfigError if the folder is not empty."""
        if (self.path / SETTINGS).exists():
            raise ConfigError(
                f"{self.path} has an evaluation already: continue it with --resume, or give "
                "another --out"
            )
        check_empty(self.path, but=(LOCK, _PARTIAL_SETTINGS))

    def begin(self, settings: dict[str, Any], tasks: Sequence[Task]) -> None:
        """Writes the settings and the tasks."""
        with must_write(self.path, REMEDY):
            write_atomic(self.path / SETTINGS, _json(settings), durable=True)
            self._write_tasks(tasks)

    def check_and_resume(self, settings: dict[str, Any], tasks: Sequence[Task]) -> None:
        """Writes the settings and the tasks if a killed process did not write them. Raises
        ConfigError if the folder belongs to another evaluation."""
        recorded = self.settings()
        changed_keys = [key for key in settings if settings[key] != recorded.get(key)]
        if changed_keys:
            key = changed_keys[0]
            old_text, new_text = (
                str(setting)[:100] for setting in (recorded.get(key), settings[key])
            )
            raise ConfigError(
                f"{self.path}: the evaluation there started with {key} = {old_text}, and this "
                f"command has {key} = {new_text}: give the original arguments, or another --out"
            )

        if not (self.path / TASKS).exists():
            with must_write(self.path, REMEDY):
                self._write_tasks(tasks)

    def _write_tasks(self, tasks: Sequence[Task]) -> None:
        lines = b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)
        write_atomic(self.path / TASKS, lines, durable=True)

    def settings(self) -> dict[str, Any]:
        """The evaluation's settings. Raises ConfigError if they can't be read."""
        remedy = "give a folder that `agentevo eval --out FOLDER` made"
        if not self.path.is_dir():
            raise ConfigError(f"{self.path}: there is no such folder: {remedy}")

        try:
            recorded = parse_json((self.path / SETTINGS).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} is not the folder of an evaluation (it has no {SETTINGS}): {remedy}"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.path / SETTINGS} can't be read ({describe_error(error)}): restore it, or "
                f"{remedy}"
            ) from error

        if not isinstance(recorded, dict):
            raise ConfigError(f"{self.path / SETTINGS} is damaged: restore it")

        return recorded

    def tasks(self) -> list[Task]:
        """The tasks. Raises ConfigError if they can't be read, or were changed."""
        if not (self.path / TASKS).exists():
            raise ConfigError(f"{self.path} has no {TASKS} yet: continue its evaluation (--resume)")

        recorded = list(_lines(self.path / TASKS, Task))
        if task_digest(recorded) != self.settings().get("tasks_digest"):
            raise ConfigError(
                f"{self.path / TASKS} was changed since it was written: restore it, or evaluate "
                "again"
            )

        return recorded

    def attempts(self) -> dict[tuple[str, str, int], AttemptLine]:
        """The lines of each task's newest complete play, by model, task and number."""
        size = self.settings().get("attempts", 1)
        plays: dict[tuple[str, str], dict[str, dict[int, AttemptLine]]] = {}
        for line in _lines(self.path / RESULTS, AttemptLine):
            task_plays = plays.setdefault((line.model, line.task), {})
            task_plays.setdefault(line.play, {})[line.attempt] = line

        return {
            (model, task, number): line
            for (model, task), task_plays in plays.items()
            for number, line in next(
                (lines for lines in reversed(task_plays.values()) if len(lines) >= size), {}
            ).items()
        }

    def trajectories(self) -> dict[tuple[str, str, int], Trajectory]:
        """The trajectories of the plays that `attempts` returns."""
        counted_plays = {key: line.play for key, line in self.attempts().items()}
        by_attempt = {}
        for kept_line in _lines(self.path / TRAJECTORIES, KeptTrajectory):
            key = (kept_line.model, kept_line.trajectory.task_id, kept_line.trajectory.attempt)
            if counted_plays.get(key) == kept_line.play:
                by_attempt[key] = kept_line.trajectory
        return by_attempt

    def add(self, lines: Sequence[AttemptLine], trajectories: Sequence[Trajectory]) -> None:
        """Appends all attempts of a model at a task."""
        play = secrets.token_hex(4)
        rows = [KeptTrajectory(lines[0].model, trajectory, play) for trajectory in trajectories]
        with must_write(self.path, REMEDY):
            _append(self.path / TRAJECTORIES, rows)
            _append(
                self.path / RESULTS, [msgspec.structs.replace(line, play=play) for line in lines]
            )

    def end(self, summary: dict[str, Any]) -> None:
        """Writes the summary, after all lines are on the disk."""
        with must_write(self.path, REMEDY):
            for name in (TRAJECTORIES, RESULTS):
                if (self.path / name).exists():
                    sync_to_disk(self.path / name)
            write_atomic(self.path / SUMMARY, _json(summary), durable=True)


def storable(trajectory: Trajectory) -> Trajectory:
    """The trajectory, or a failed trajectory without turns if JSON can't represent the agent's
    data."""
    try:
        _ENCODER.encode(trajectory)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        return msgspec.structs.replace(
            trajectory,
            turns=[],
            remote_turns=[],
            files={},
            reward=0.0,
            reward_parts={},
            metrics={},
            success=False,
            status="failed",
            error=f"it can't be stored: {describe_error(error)}",
        )

    return trajectory


def _append(path: Path, records: Iterable[Any]) -> None:
    content = b"".join(_ENCODER.encode(record) + b"\n" for record in records)
    with path.open("ab+") as file:
        _end_line(file)
        file.write(content)


def _end_line(file: IO[bytes]) -> None:
    """Ends an incomplete line of a killed process, so that the next line stays intact."""
    if file.seek(0, 2):
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The complete lines of a log."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with suppress(msgspec.MsgspecError):
                yield decode_json(line, kind)


def _json(content: Any) -> str:
    # without sort_keys: the other models are compared with the first
    return json.dumps(content, indent=1) + "\n"
