"""The state of a run from its folder: progress, numbers, warnings. Reading never raises an error.
An unreadable file becomes a sentence in `RunView.problem`."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentevo.config import sources as yaml_sources
from agentevo.errors import AgentEvoError
from agentevo.observability.current_activity import (
    LATE_HEARTBEAT_S,
    NOW,
    PAUSED,
    Moment,
    read_moment,
)
from agentevo.observability.metrics_table import MetricsTable
from agentevo.observability.run_warnings import WARNINGS, read_warnings, warnings_in_summary
from agentevo.observability.summary import is_complete, read_summary
from agentevo.runs.folder.lock import LOCK
from agentevo.runs.folder.run_folder import command_of, resume_command
from agentevo.runs.folder.sources import RunSource

State = Literal["running", "finished", "interrupted", "failed", "damaged", "unknown"]

PIECE_S = 1.0
"""The time of a reading in seconds, after which its result so far is shown."""


@dataclass(frozen=True)
class RunView:
    """The known state of a run at one moment."""

    source: RunSource
    version: int = 0
    """Increases with every change. 0: not read yet."""
    state: State = "unknown"
    problem: str = ""
    """The files that can't be read, and the remedy."""
    step: int = 0
    planned: int | None = None
    command: str = "train"
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty before the end of the run."""
    table: MetricsTable = field(default_factory=lambda: MetricsTable(Path("metrics.jsonl")))
    num_rows: int = 0
    warnings: tuple[tuple[int | None, str], ...] = ()
    """(step, observation and remedy) pairs, the newest first."""
    changed_at: float | None = None
    """The Unix time of the newest row."""
    is_behind: bool = False
    """Whether a part of metrics.jsonl is not read yet."""
    is_silent: bool = False
    """Whether a process has the run's lock but writes no heartbeat."""
    moment: Moment | None = field(default=None, compare=False)
    """What the run does, or did last, as its process reports it."""
    beat: int = field(default=0, compare=False)
    """Increases with each heartbeat of the process. A heartbeat makes no new version."""

    @property
    def key(self) -> str:
        return self.source.key

    @property
    def title(self) -> str:
        """The run's folder relative to the given one, which is unique, if it has a folder."""
        return self.name if self.source.folder is None else self.source.key.replace("~", "/")

    @property
    def name(self) -> str:
        """The run's own name, or its folder's."""
        run_name = self.summary.get("name") or self.setting("run", "name")
        return run_name if isinstance(run_name, str) and run_name else self.source.name

    @property
    def label(self) -> str:
        """Its name, and its place if the two differ, because runs of the same recipe share the
        name."""
        place = self.key.replace("~", "/")
        return self.name if place == self.name else f"{self.name} ({place})"

    @property
    def reason(self) -> str:
        """Why the run stopped, or writes no heartbeat, in a sentence. Else empty."""
        if self.moment is None or self.state not in ("running", "failed", "interrupted"):
            return ""
        if self.state == "running":
            return self.moment.lateness() if self.is_silent else ""
        resume = self.resume_command
        death = "" if self.moment.ended else self.moment.death(resume)
        return self.moment.ending(resume) or death

    @property
    def resume_command(self) -> str:
        """The command that continues the run after it has stopped. Empty if it is not known."""
        folder = self.source.folder
        return "" if folder is None else resume_command(folder, self.command)

    @property
    def badge(self) -> str:
        """The state as pages show it. A running run may also be silent or paused."""
        if self.is_silent:
            return "silent"
        is_paused = self.doing is not None and self.doing.phase == PAUSED
        return PAUSED if is_paused else self.state

    @property
    def doing(self) -> Moment | None:
        """What the run does now. None unless it runs and reports it."""
        lives = self.state == "running" and self.moment is not None and not self.moment.ended
        return self.moment if lives else None

    def setting(self, section: str, key: str) -> Any:
        """A value of config.yaml as written. None if there is none."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None


class RunReader:
    """Reads a run repeatedly. Only one caller at a time may call `read`. Any thread may read
    `view`."""

    def __init__(self, source: RunSource) -> None:
        self.view = RunView(source)
        self._table = MetricsTable(source.file("metrics.jsonl") or Path(os.devnull))
        self._warning_entries: list[Any] = []
        self._config: dict[str, Any] = {}
        self._summary: dict[str, Any] = {}
        self._signatures: dict[str, object] = {}
        self._problems: dict[str, str] = {}
        self._moment: Moment | None = None

    def read(self) -> None:
        """Reads the changes since the last call, for about PIECE_S seconds at most."""
        source = self.view.source
        if source.folder is None:
            return

        ends = time.monotonic() + PIECE_S
        changed = False
        is_behind = False
        try:
            while self._table.read_more():
                changed = True
                if time.monotonic() > ends:
                    is_behind = True
                    break

            if self._table.is_replaced:
                self._table = MetricsTable(self._table.path)
                changed = True
                self._table.read_more()

            self._problems.pop("metrics.jsonl", None)
        except OSError as error:
            self._problems["metrics.jsonl"] = f"metrics.jsonl can't be read ({error})"

        changed |= self._read_file("config.yaml", self._read_config)
        changed |= self._read_file("summary.json", self._read_summary)
        changed |= self._read_file(WARNINGS, self._read_warnings)
        before = self._moment
        beat = self.view.beat
        self._read_file(NOW, self._read_moment)
        beat += before is not self._moment
        new_view = replace(self.view, **self._facts(source), is_behind=is_behind)
        version = self.view.version + (changed or new_view != self.view)
        self.view = replace(new_view, version=version, moment=self._moment, beat=beat)

    def _facts(self, source: RunSource) -> dict[str, Any]:
        table = self._table
        planned = self._summary.get("planned_steps")
        if planned is None:
            trainer = self._config.get("trainer")
            planned = trainer.get("steps") if isinstance(trainer, dict) else None

        problems = list(self._problems.values())
        if table.num_bad_lines:
            problems.append(
                f"metrics.jsonl: {table.num_bad_lines:,} lines are no rows and left out, "
                f"the first of them line {table.first_bad_line:,}"
            )

        step = max(table.last_step, int(self._summary.get("steps") or 0))
        planned = planned if isinstance(planned, int) else None
        changed_at = table.times[-1] if table.num_rows else None
        state, is_silent = self._state(source, step, planned, changed_at)

        return {
            "state": state,
            "is_silent": is_silent,
            "problem": "; ".join(problems),
            "step": step,
            "planned": planned,
            "config": self._config,
            "summary": self._summary,
            "table": table,
            "num_rows": table.num_rows,
            "warnings": self._warnings(),
            "changed_at": changed_at,
        }

    def _warnings(self) -> tuple[tuple[int | None, str], ...]:
        """The warnings of the summary, which has all of them. Before the end, those of the
        committed steps."""
        return warnings_in_summary(self._summary or {"warnings": self._warning_entries})

    def _state(
        self, source: RunSource, step: int, planned: int | None, changed_at: float | None
    ) -> tuple[State, bool]:
        """The state, and whether a process that has the lock writes no heartbeat. If the lock is
        visible, it decides. A process of another machine shows only its heartbeat."""
        folder = source.folder
        moment = self._moment
        if folder is None or not self._config:
            return ("damaged" if "config.yaml" in self._problems else "unknown"), False

        goes_on = moment is not None and not moment.ended
        is_late = moment is None or moment.silent_s() > LATE_HEARTBEAT_S
        if is_locked(folder):
            has_logged = changed_at is not None and time.time() - changed_at <= LATE_HEARTBEAT_S
            return "running", goes_on and is_late and not has_logged

        if moment is not None and goes_on and not is_late and moment.host != socket.gethostname():
            return "running", False
        if moment is not None and moment.ended == "failed":
            return "failed", False

        # The summary counts committed steps, and an interrupted evaluation has rows after them.
        done = self._summary.get("steps")
        done = done if isinstance(done, int) else step
        is_done = self._summary and (
            planned is None or is_complete({**self._summary, "steps": done}, planned)
        )
        if is_done or (moment is not None and moment.ended == "finished"):
            return "finished", False

        return "interrupted", False

    def _read_file(self, name: str, read: Any) -> bool:
        """Reads the file if it has changed since the last call. Returns whether it has."""
        path = self.view.source.file(name)
        signature: object = None
        try:
            if path is not None:
                what = path.stat()
                signature = (what.st_ino, what.st_size, what.st_mtime_ns)
        except OSError:
            signature = None

        if name in self._signatures and self._signatures[name] == signature:
            return False

        self._signatures[name] = signature
        self._problems.pop(name, None)
        try:
            read(path if signature is not None else None)
        except (AgentEvoError, OSError) as error:
            self._problems[name] = str(error)

        return True

    def _read_config(self, path: Path | None) -> None:
        if path is None:
            self._config = {}
            self._problems["config.yaml"] = (
                "config.yaml is gone: was the folder moved or deleted? Put it back, or start "
                "`agentevo ui` with the folder's new place"
            )
            return

        self._config = yaml_sources.read_yaml(path)
        command = command_of(path.parent)
        self.view = replace(self.view, command=command or "train")

    def _read_moment(self, path: Path | None) -> None:
        self._moment = None if path is None else read_moment(path)

    def _read_warnings(self, path: Path | None) -> None:
        self._warning_entries = []
        if path is not None:
            self._warning_entries = read_warnings(path.parent)

    def _read_summary(self, path: Path | None) -> None:
        self._summary = {}
        if path is not None:
            self._summary = read_summary(path)


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine trains in that folder. The check locks nothing, because a
    lock could block a trainer that starts at this moment."""
    try:
        what = (folder / LOCK).stat()
    except OSError:
        return False

    name = f"{os.major(what.st_dev):02x}:{os.minor(what.st_dev):02x}:{what.st_ino}"
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return False

    return any(name in line.split() for line in locks.splitlines())
