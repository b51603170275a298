"""The trackers of one run: the trackers in its configuration, and the data that they receive at its
beginning and at its end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from agentevo.config import RunConfig
from agentevo.config.interpolation import escape_tree
from agentevo.errors import AgentEvoError, MissingExtraError
from agentevo.observability import LiveView
from agentevo.observability.current_activity import Moment, NowFile
from agentevo.observability.trackers import (
    TrackedRow,
    TrackedRun,
    TrackedTable,
    TrackerConfig,
    Tracking,
    trackers,
)
from agentevo.observability.trackers.secrets import without_secrets
from agentevo.observability.trackers.tracker import State
from agentevo.observability.trackers.tracking import clean_table
from agentevo.runs.folder.lock import only_trainer
from agentevo.runtime.parsing import parse_json
from agentevo.types import Trajectory

TENSORBOARD = "tensorboard"
MAX_CONVERSATION_CHARS = 4000
"""The maximum number of characters of an attempt's conversation in the table of attempts."""
COLUMNS = ("task", "attempt", "status", "reward", "success", "turns", "tokens", "said", "error")


def chosen_trackers(config: RunConfig, *, board: bool = True) -> list[TrackerConfig]:
    """The options of each tracker, including TensorBoard unless it is off. `board`: whether the run
    has a folder, which TensorBoard needs."""
    backends = [backend for backend in config.tracking.backends if backend.name != TENSORBOARD]
    is_listed = len(backends) < len(config.tracking.backends)
    has_board = board and (is_listed or config.tracking.tensorboard)
    return [*([TrackerConfig(name=TENSORBOARD)] if has_board else []), *backends]


def check_tracking(config: RunConfig) -> None:
    """Raises ConfigError for a tracker whose package or key is missing. Makes no network call."""
    for tracker in chosen_trackers(config):
        try:
            trackers.get(tracker.name).check(tracker)
        except MissingExtraError as error:
            if tracker.name != TENSORBOARD:
                raise
            raise MissingExtraError(
                "tracking.tensorboard=true needs the package tensorboard: pip install "
                "tensorboard, or set tracking.tensorboard=false"
            ) from error


@contextmanager
def track(
    config: RunConfig,
    kind: str,
    note: Callable[[str], None],
    is_stopped: Callable[[], bool] = lambda: False,
    *,
    warn: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> Iterator[Tracking]:
    """The trackers of a run. `note` and `warn` show their messages; without `warn`, warnings are
    notes. At the end of the block they are closed with the final state. If
    several processes train together, only the first one has trackers. `folder`: the folder for the
    files of a command without a run's folder, such as an evaluation."""
    tracking = Tracking(
        [
            (tracker, trackers.get(tracker.name))
            for tracker in chosen_trackers(config, board=folder is None)
        ]
        if is_first()
        else [],
        _describe_run(config, kind, folder),
        note=note,
        warn=warn or note,
        flush_s=config.tracking.flush_s,
        keep_record=folder is None,
    )
    state: State = "failed"
    try:
        yield tracking
        state = "stopped" if is_stopped() else "finished"
    except (KeyboardInterrupt, SystemExit):
        state = "stopped"
        raise
    finally:
        if tracking:
            _end(tracking, config, state, config.run_dir if folder is None else None)


def report_evaluation(
    config: RunConfig,
    metrics: Mapping[str, float],
    *,
    step: int = 0,
    folder: Path,
    note: Callable[[str], None],
) -> None:
    """Reports an evaluation as a separate run to the configuration's trackers, except TensorBoard,
    which needs a run's folder. The trackers write their files below `folder`."""
    if not chosen_trackers(config, board=False):
        return
    with track(config, "eval", note, folder=folder) as tracking:
        tracking.put(TrackedRow(step=step, time=time.time(), metrics=dict(metrics)))


def attempts_table(
    config: RunConfig, trajectories: Sequence[Trajectory]
) -> tuple[TrackedTable, ...]:
    """A table of the first attempts of a step, at most `tracking.attempts`, for people."""
    count = config.tracking.attempts
    if not count or not trajectories:
        return ()

    rows = [
        (
            trajectory.task_id,
            trajectory.attempt,
            trajectory.status,
            trajectory.reward,
            trajectory.success,
            len(trajectory.turns),
            trajectory.num_completion_tokens(),
            _transcript(trajectory),
            trajectory.error or "",
        )
        for trajectory in trajectories[:count]
    ]
    return (clean_table(TrackedTable("attempts", COLUMNS, tuple(rows))),)


def _transcript(trajectory: Trajectory) -> str:
    parts = []
    for turn in trajectory.turns:
        for message in turn.messages:
            calls = "".join(
                f"\n-> {tool_call.name}({tool_call.arguments})" for tool_call in message.tool_calls
            )
            parts.append(f"[{message.role}] {message.text}{calls}")

    text = "\n".join(parts)
    left_out = len(text) - MAX_CONVERSATION_CHARS
    return (
        text
        if left_out <= 0
        else f"{text[:MAX_CONVERSATION_CHARS]}... ({left_out} characters more)"
    )


def _describe_run(config: RunConfig, kind: str, folder: Path | None) -> TrackedRun:
    section = config.tracking
    name = section.name or config.run.name
    return TrackedRun(
        folder=folder or config.run_dir,
        project=section.project,
        name=f"{name}-eval" if kind == "eval" else name,
        group=section.group,
        tags=section.tags,
        notes=section.notes,
        kind=kind,
        config=without_secrets(cast("dict[str, Any]", escape_tree(config.model_dump(mode="json")))),
    )


def _end(tracking: Tracking, config: RunConfig, state: State, folder: Path | None) -> None:
    """Closes the trackers, after they have received the files of the run's folder."""
    figures: dict[str, Path] = {}
    artifacts: dict[str, Path] = {}
    summary: dict[str, Any] = {}
    if folder is not None:
        figures = {f"plots/{path.stem}": path for path in sorted((folder / "plots").glob("*.png"))}
        files = {"metrics": folder / "metrics.jsonl", "summary": folder / "summary.json"}
        artifacts = {name: path for name, path in files.items() if path.is_file()}
        with suppress(OSError, ValueError):
            summary = without_secrets(parse_json((folder / "summary.json").read_bytes()))
        if config.tracking.log_model and state == "finished":
            artifacts |= _best_checkpoint(config)

    tracking.close(state, summary, figures=figures, artifacts=artifacts)


def _best_checkpoint(config: RunConfig) -> dict[str, Path]:
    from agentevo.training.checkpoint import Checkpoints

    folder = config.run_dir / "checkpoints"
    try:
        return {"model": Checkpoints(folder, config.checkpoint.keep_last).find("best")}
    except AgentEvoError:
        model = config.run_dir / "model"
        return {"model": model} if model.is_dir() else {}


def is_first() -> bool:
    """Whether this process is the first of the processes that train together
    (training/parallel.py). Before the processes have joined, the launcher's variable RANK
    decides."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def only_trainer_here(
    folder: Path, view: LiveView, is_stopped: Callable[[], bool]
) -> Iterator[None]:
    """Holds the run's lock, and keeps RUN/now.json up to date for other processes. If several
    processes train together, the first one writes the file."""

    def moment() -> Moment:
        return msgspec.structs.replace(view.moment(), is_stopping=is_stopped())

    now_file = NowFile(folder, moment, note=view.note, is_written=is_first())
    with only_trainer(folder), now_file:
        yield
