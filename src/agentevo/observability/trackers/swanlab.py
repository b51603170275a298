"""SwanLab, in its cloud or on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerConfig,
    TrackingBegun,
)


class SwanLabConfig(TrackerConfig):
    """SwanLab. SwanLab reads its own key: SWANLAB_API_KEY, or `swanlab login`."""

    mode: Literal["online", "local", "offline"] | None = None
    """local and offline write files below swanlog/ in the run's folder. Default: SWANLAB_MODE,
    else online."""
    workspace: str | None = Field(default=None, min_length=1)
    """User or team. Default: the key's user."""


class SwanLab(Tracker):
    """SwanLab: steps, attempts as texts, plots. With mode: local it needs no cloud."""

    Config = SwanLabConfig
    packages = (("swanlab", "swanlab"),)

    def begin(self, run: TrackedRun) -> TrackingBegun:
        import swanlab

        _silence()
        mode = self.config.mode or os.environ.get("SWANLAB_MODE") or "online"
        online = mode in ("online", "cloud")
        self._step = run.last_step
        self._run = swanlab.init(
            project=run.project,
            workspace=self.config.workspace,
            name=run.name,
            description=run.notes or None,
            job_type=run.kind,
            group=run.group,
            tags=list(run.tags) or None,
            mode=mode,
            log_dir=str(run.folder / "swanlog"),
            id=run.id if online else None,
            resume="allow" if online else None,
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        where = str(run.folder / "swanlog")
        return TrackingBegun(run.id, f"{run.project}, run {run.name}" if online else where)

    def log(self, row: TrackedRow) -> None:
        import swanlab

        values: dict[str, Any] = {
            name: value for name, value in row.metrics.items() if math.isfinite(value)
        }
        for table in row.tables:
            values[table.name] = [
                swanlab.Text(_words(table.columns, cells)) for cells in table.rows
            ]

        self._run.log(values, step=row.step)
        self._step = row.step

    def figure(self, name: str, path: Path) -> None:
        import swanlab

        self._run.log({name: swanlab.Image(str(path))}, step=max(self._step, 0))

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._run.finish("success" if state == "finished" else "aborted")


def _silence() -> None:
    """Redirects SwanLab's greetings, which would go to the command's stdout. SwanLab 0.10 has no
    setting for that."""
    with suppress(ImportError, AttributeError):
        from swanlab.sdk.internal.pkg import console

        console.c.quiet = True


def _words(columns: tuple[str, ...], cells: tuple[object, ...]) -> str:
    return "\n".join(f"{name}: {cell}" for name, cell in zip(columns, cells, strict=True))
