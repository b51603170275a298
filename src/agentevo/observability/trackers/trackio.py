"""trackio: a SQLite file on this machine, or a Hugging Face Space."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerConfig,
    TrackingBegun,
)


class TrackioConfig(TrackerConfig):
    """trackio: a file in TRACKIO_DIR, which `trackio show` displays, or a Space."""

    space_id: str | None = Field(default=None, min_length=1)
    """Hugging Face Space that gets the run, such as me/trackio. Default: TRACKIO_SPACE_ID, else
    this machine."""


class Trackio(Tracker):
    """trackio: steps, attempts as tables, plots, in a local file or a Hugging Face Space."""

    Config = TrackioConfig
    packages = (("trackio", "trackio"),)

    def begin(self, run: TrackedRun) -> TrackingBegun:
        import trackio

        _silence()
        name = run.id if run.resumed else f"{run.name}-{run.id[:6]}"
        self._step = run.last_step
        self._run = trackio.init(
            project=run.project,
            name=name,
            group=run.group,
            space_id=self.config.space_id,
            config={**run.config, "kind": run.kind, "tags": list(run.tags), "notes": run.notes},
            resume="allow" if run.resumed else "never",
            embed=False,
        )

        return TrackingBegun(name, f"run {name}: trackio show --project {run.project}")

    def log(self, row: TrackedRow) -> None:
        import trackio

        values: dict[str, Any] = dict(row.metrics)
        for table in row.tables:
            values[table.name] = trackio.Table(
                columns=list(table.columns), data=[list(cells) for cells in table.rows]
            )

        self._run.log(values, step=row.step)
        self._step = row.step

    def figure(self, name: str, path: Path) -> None:
        import trackio

        self._run.log({name: trackio.Image(str(path))}, step=max(self._step, 0))

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._run.finish()


def _silence() -> None:
    """Discards what trackio prints, which would go to the command's stdout. trackio 0.43 has no
    setting for that."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio" and module is not None:
            module.__dict__.setdefault("print", lambda *words, **options: None)
