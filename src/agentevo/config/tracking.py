"""The recipe's section `tracking`: where a run's metrics go in addition to its own folder."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import pydantic
from pydantic import Field, SerializeAsAny, field_validator

from agentevo.config.field_words import read_entry
from agentevo.errors import AgentEvoError
from agentevo.observability.trackers.tracker import TrackerConfig, trackers
from agentevo.runtime.section import Section

KEY = "tracking.backends"
ALWAYS = ("console", "file")
"""The loggers of verl that need no tracker: the live view, and metrics.jsonl."""
OTHER = ", or install a package that provides it (entry point agentevo.trackers)"


class TrackingSection(Section):
    """Outputs of a run's metrics in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/ in the run's folder."""
    report: bool = True
    """Write report.html and plots/ at the end of the run."""
    token_numbers: bool = True
    """Store the change in log-prob and the sampling entropy of each trained token, in
    token_numbers/ of the run's folder. `agentevo ui` shades tokens by them. One file per step, at
    most 4 bytes per token; only for runs that train on attempts."""
    backends: tuple[SerializeAsAny[TrackerConfig], ...] = ()
    """Trackers that receive every step's metrics, as a list such as [wandb] or [{name: mlflow,
    tracking_uri: "http://127.0.0.1:5000"}] (`agentevo list trackers`). verl's `console` and `file`
    are accepted and ignored: the live view and metrics.jsonl are always on."""
    project: str = Field(default="agentevo", min_length=1, max_length=128)
    """Project of the run in the tracker; the experiment in MLflow."""
    name: str | None = Field(default=None, min_length=1, max_length=128)
    """Name of the run in trackers. Default: run.name."""
    group: str | None = Field(default=None, min_length=1, max_length=128)
    """Group of related runs, such as the seeds of one setting."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """Tags of the run in trackers."""
    notes: str = ""
    """Notes about the run, for people."""
    attempts: int = Field(default=0, ge=0, le=100)
    """Number of attempts per step that are sent to trackers as a table, with their messages. 0
    sends no text of attempts."""
    log_model: bool = False
    """Send the best checkpoint to trackers that store artifacts, at the end of the run."""
    flush_s: float = Field(default=30.0, ge=0, le=86400)
    """Maximum wait for trackers to receive the remaining data at the end of a run, in seconds."""

    @field_validator("backends", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return read_backends(value)


def read_backends(value: Any) -> tuple[TrackerConfig, ...]:
    """The entries, each a name or a mapping with a name. Raises ValueError with what is wrong with
    the first one that can't be read."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    configs: list[TrackerConfig] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, TrackerConfig):
            configs.append(entry)
        elif entry not in (None, *ALWAYS):
            config, problems = read_entry(
                f"[{index}]", entry, trackers.names(), lambda name: trackers.get(name).Config, OTHER
            )
            if config is None:
                raise ValueError(problems[0])
            configs.append(config)

    names = [config.name for config in configs]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"{duplicate} is listed twice: give one entry")
    return tuple(configs)


def tracker_models() -> dict[str, dict[str, type[pydantic.BaseModel]]]:
    """Key -> the options of every registered tracker by its name, for explanations. A tracker that
    can't be imported is left out here, and refused when a recipe names it."""
    models: dict[str, type[pydantic.BaseModel]] = {}
    for name in trackers.names():
        with suppress(AgentEvoError):
            models[name] = trackers.get(name).Config
    return {KEY: models}
