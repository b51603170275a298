"""The tracker contract: the data that a tracker receives, and its registration by name.

    begin(run) ─► log(row) ... ─► figure, artifact ... ─► end(state, summary)

A tracker object serves one run. One thread calls all its methods, one after the other
(delivery.py). Methods may block. If a method raises an error, the run prints a warning and loses
the row. Rows arrive in rising order of steps, each step once, and only after the step can't be
undone.

Another package lists its class under the entry-point group `agentevo.trackers`. A class in a user's
own module is registered by `@agentevo.tracker(NAME)`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import pydantic

from agentevo.errors import MissingExtraError
from agentevo.runtime.registry import Registry

State = Literal["finished", "stopped", "failed"]
"""How a run ended: `finished` after its last step, `stopped` by a signal, `failed` by an error."""


class TrackerConfig(pydantic.BaseModel):
    """A tracker in a recipe's list `tracking.backends`: its name and its options."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    name: str
    """Registered name of the tracker."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a run at its start or resume."""

    folder: Path
    """The run's folder. A tracker's local files belong below it."""
    project: str
    name: str
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    kind: str = "train"
    """The command: train, sft, learn, loop, rm or eval."""
    config: Mapping[str, Any] = {}
    """The resolved configuration, without secrets."""
    id: str = ""
    """The tracker's id of the run. For a new run, a random id that the tracker may use."""
    resumed: bool = False
    last_step: int = -1
    """The last step of the run that the tracker has."""


class TrackedTable(msgspec.Struct, frozen=True):
    """A table, such as the attempts of a step, with a row for each."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | bool | None, ...], ...]


class TrackedRow(msgspec.Struct, frozen=True, kw_only=True):
    """All metrics and tables of a step."""

    step: int
    time: float
    """Unix seconds."""
    metrics: Mapping[str, float]
    """verl's name of a metric -> value, which may be NaN or infinite."""
    tables: Sequence[TrackedTable] = ()


class TrackingBegun(msgspec.Struct, frozen=True):
    """The result of `begin`."""

    id: str
    """The id by which a resumed run finds the tracker's run."""
    where: str = ""
    """The URL of the run, or the command that shows it."""


class Tracker(ABC):
    """The base of every tracker. `Class(config)` creates a tracker for a run, and does nothing
    else."""

    Config: ClassVar[type[TrackerConfig]] = TrackerConfig
    packages: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of a module to import and the name of its package for pip."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuses invalid settings without using the network. A run calls this method before it
        creates anything. Raises MissingExtraError or ConfigError."""
        for module, package in cls.packages:
            if importlib.util.find_spec(module) is None:
                raise MissingExtraError(
                    f"tracking.backends: {config.name} needs the package {package!r}: "
                    f"pip install {package}"
                )

    @abstractmethod
    def begin(self, run: TrackedRun) -> TrackingBegun:
        """Opens a new run in the tracker, or the run `run.id` if `run.resumed` is true."""

    @abstractmethod
    def log(self, row: TrackedRow) -> None:
        """Logs a step."""

    def figure(self, name: str, path: Path) -> None:  # noqa: B027
        """Receives a picture at the run's end, as a PNG file. Default: ignores it."""

    def artifact(self, name: str, path: Path) -> None:  # noqa: B027
        """Receives a file or a folder that belongs to the run. Default: ignores it."""

    @abstractmethod
    def end(self, state: State, summary: Mapping[str, Any]) -> None:
        """Delivers everything, because the run has ended."""


T = TypeVar("T", bound=type[Tracker])
_HERE = "agentevo.observability.trackers"
trackers: Registry[type[Tracker]] = Registry(
    "trackers",
    {
        "tensorboard": f"{_HERE}.tensorboard:TensorBoard",
        "wandb": f"{_HERE}.wandb:WandB",
        "mlflow": f"{_HERE}.mlflow:MLflow",
        "swanlab": f"{_HERE}.swanlab:SwanLab",
        "trackio": f"{_HERE}.trackio:Trackio",
    },
)
"""Maps the name of a tracker to its class."""


def tracker(name: str) -> Callable[[T], T]:
    """Decorator: registers a subclass of `Tracker` under a name, for recipes that import its
    module (key `import`)."""
    return trackers.register(name)  # type: ignore[return-value]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration as one mapping with dotted keys. Lists are not flattened."""
    flat_values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat_values |= flat(value, f"{prefix}{key}.")
        else:
            flat_values[f"{prefix}{key}"] = value
    return flat_values
