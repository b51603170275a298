"""Weights & Biases, online or offline."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from agentevo.errors import ConfigError
from agentevo.observability.trackers.tracker import (
    State,
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerConfig,
    TrackingBegun,
)

CLOUD = "https://api.wandb.ai"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandBConfig(TrackerConfig):
    """Weights & Biases. W&B reads its own key: WANDB_API_KEY, or `wandb login`."""

    mode: Literal["online", "offline"] | None = None
    """offline writes files below wandb/ in the run's folder, which `wandb sync` sends later.
    Default: WANDB_MODE, else online."""
    entity: str | None = Field(default=None, min_length=1)
    """User or team. Default: the key's user."""


class WandB(Tracker):
    """Weights & Biases: steps, attempts as tables, plots, files. With mode: offline it needs no
    network."""

    Config = WandBConfig
    packages = (("wandb", "wandb"),)

    @classmethod
    def check(cls, config: WandBConfig) -> None:
        super().check(config)
        if _mode(config) == "online" and not _has_key():
            raise ConfigError(
                "tracking.backends: wandb has no key: set WANDB_API_KEY, run `wandb login`, or "
                "write {name: wandb, mode: offline}"
            )

    def begin(self, run: TrackedRun) -> TrackingBegun:
        import wandb

        mode = _mode(self.config)
        self._run = wandb.init(
            project=run.project,
            entity=self.config.entity,
            name=run.name,
            group=run.group,
            job_type=run.kind,
            tags=list(run.tags) or None,
            notes=run.notes or None,
            config=dict(run.config),
            dir=str(run.folder),
            id=run.id,
            mode=mode,
            resume=None if mode == "offline" else "allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        if mode == "offline":
            synced = f"offline files: wandb sync {Path(self._run.dir).parent}"
            return TrackingBegun(self._run.id, f"{synced} --append" if run.resumed else synced)

        return TrackingBegun(self._run.id, self._run.url or "")

    def log(self, row: TrackedRow) -> None:
        import wandb

        values: dict[str, Any] = dict(row.metrics)
        for table in row.tables:
            values[table.name] = wandb.Table(
                columns=list(table.columns), data=[list(cells) for cells in table.rows]
            )

        self._run.log(values, step=row.step, commit=True)

    def figure(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def artifact(self, name: str, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(
            f"{self._run.id}-{name}".replace("/", "-"),
            type="model" if path.is_dir() else "run",
        )
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"run/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=0 if state == "finished" else 1)


def _mode(config: WandBConfig) -> str:
    return config.mode or os.environ.get("WANDB_MODE") or "online"


def _has_key() -> bool:
    """Whether W&B would find a key without a prompt."""
    if any(os.environ.get(name) for name in KEYS):
        return True

    host = urlsplit(os.environ.get("WANDB_BASE_URL") or CLOUD).hostname or ""
    home = Path.home()
    for path in (os.environ.get("NETRC"), home / ".netrc", home / "_netrc"):
        try:
            if path and netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue

    return False
